"""Patches that tests of the grader submit."""

import difflib

from tests.workers.conftest import FILES

FIX = b"""diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,5 +1,5 @@
 def add(a, b):
-    return a - b
+    return a + b
 
 
 def sub(a, b):
"""


HIDDEN_TESTS = """diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -1,4 +1,8 @@
-from calc import sub
+from calc import add, sub
+
+
+def test_add():
+    assert add(3, 1) == 4
 
 
 def test_sub():
"""


PYTEST = "#!/bin/bash\nset -e\ncd /workspace\npython3 -m pytest tests/test_calc.py\n"


def new_file(path: str, text: str) -> bytes:
    lines = text.splitlines()
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return (head + f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)).encode()


def edited(path: str, old: str, new: str) -> bytes:
    before = FILES[f"repo/{path}"]
    assert old in before
    lines = (text.splitlines(keepends=True) for text in (before, before.replace(old, new, 1)))
    return "".join(difflib.unified_diff(*lines, f"a/{path}", f"b/{path}")).encode()


NOTE = new_file("NOTE.txt", "done")
