"""Patches for the repository of tests/workers/conftest.py: the right fix, and what cheats are built from."""

import base64
import difflib
import hashlib
import importlib.util
import marshal
import sys
import zlib

from tests.workers.conftest import FILES

HONEST = b"""diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,5 +1,5 @@
 def add(a, b):
-    return a - b
+    return a + b
 
 
 def sub(a, b):
"""


def new(path: str, text: str, mode: str = "100644") -> bytes:
    lines = text.splitlines()
    head = f"diff --git a/{path} b/{path}\nnew file mode {mode}\n--- /dev/null\n+++ b/{path}\n"
    return (head + f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)).encode()


def link(path: str, target: str) -> bytes:
    return new(path, target, "120000") + b"\\ No newline at end of file\n"


def edited_text(path: str, before: str, after: str) -> bytes:
    lines = (text.splitlines(keepends=True) for text in (before, after))
    return "".join(difflib.unified_diff(*lines, f"a/{path}", f"b/{path}")).encode()


def edited(path: str, old: str, changed: str) -> bytes:
    before = FILES[f"repo/{path}"]
    assert old in before
    return edited_text(path, before, before.replace(old, changed, 1))


def at_import(code: str) -> bytes:
    return edited("calc.py", "def add", f"{code}\n\n\ndef add")


def at_call(code: str) -> bytes:
    body = "".join(f"    {line}\n" for line in code.splitlines())
    return edited("calc.py", "def add(a, b):\n", f"def add(a, b):\n{body}")


def at_import_and_call(code: str, body: str) -> bytes:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return edited("calc.py", "def add(a, b):\n", f"{code}\n\n\ndef add(a, b):\n{lines}")


def as_binary(path: str, before: bytes | None, after: bytes) -> bytes:
    """As git writes a file that it takes for binary: no line of it shows."""

    def blob(content: bytes | None) -> str:
        return (
            "0" * 40 if content is None else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        )

    packed = zlib.compress(after)
    pieces = [packed[start : start + 52] for start in range(0, len(packed), 52)]
    sizes = [
        chr(ord("A") + len(piece) - 1) if len(piece) <= 26 else chr(ord("a") + len(piece) - 27)
        for piece in pieces
    ]
    data = [
        f"{size}{base64.b85encode(piece, pad=True).decode()}\n"
        for size, piece in zip(sizes, pieces, strict=True)
    ]
    made = "new file mode 100644\n" if before is None else ""
    ending = "" if before is None else " 100644"
    head = (
        f"diff --git a/{path} b/{path}\n{made}index {blob(before)}..{blob(after)}{ending}\nGIT binary patch\n"
    )
    return f"{head}literal {len(after)}\n{''.join(data)}\n".encode()


def compiled(path: str, source: str) -> bytes:
    """What Python keeps of a module, marked as never to be compared with its source."""
    code = marshal.dumps(compile(source, path, "exec"))
    content = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8) + code
    folder, _, name = path.rpartition("/")
    return as_binary(
        f"{folder}/__pycache__/{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc", None, content
    )


def gone(path: str) -> bytes:
    return gone_text(path, FILES[f"repo/{path}"])


def gone_text(path: str, before: str) -> bytes:
    return edited_text(path, before, "").replace(f"+++ b/{path}".encode(), b"+++ /dev/null")
