"""A small project in which a day has 12 hours, its fix, and task files about it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.task import ExitCode, Task
from pipeline.taskfile import Gold, gold_path, write_gold, write_tasks
from tests.workers.claims import make_task
from tests.workers.conftest import RepoImage
from workers.verify.__main__ import main

FILES = {
    "Dockerfile": """
FROM {base}
STOPSIGNAL SIGKILL
ENV PYTHONDONTWRITEBYTECODE=1 GIT_AUTHOR_DATE=2025-01-01T00:00:00Z GIT_COMMITTER_DATE=2025-01-01T00:00:00Z
COPY repo /workspace
WORKDIR /workspace
RUN git init -q . && git config user.name t && git config user.email t@example.invalid \\
 && git add -A && git commit -qm base && cp -r /workspace /testbed
""",
    "repo/spans.py": '''def hours(text):
    """Hours in a span such as "3h" or "2d"."""
    number, unit = int(text[:-1]), text[-1]
    return number * {"h": 1, "d": 12}[unit]


def later(text):
    return hours(text) + 1
''',
    "repo/left.py": """def left(total, used):
    return total + used
""",
    "repo/tests/test_spans.py": """import pytest

from spans import hours


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1h", 1),
        ("3h", 3),
    ],
)
def test_hours(text, expected):
    assert hours(text) == expected
""",
}
FIX = """diff --git a/spans.py b/spans.py
--- a/spans.py
+++ b/spans.py
@@ -1,5 +1,5 @@
 def hours(text):
     \"\"\"Hours in a span such as "3h" or "2d".\"\"\"
     number, unit = int(text[:-1]), text[-1]
-    return number * {"h": 1, "d": 12}[unit]
+    return number * {"h": 1, "d": 24}[unit]
 
"""
MORE_CASES = """diff --git a/tests/test_spans.py b/tests/test_spans.py
--- a/tests/test_spans.py
+++ b/tests/test_spans.py
@@ -8,6 +8,8 @@
     [
         ("1h", 1),
         ("3h", 3),
+        ("1d", 24),
+        ("2d", 48),
     ],
 )
 def test_hours(text, expected):
"""
NEW_TEST = """diff --git a/tests/test_days.py b/tests/test_days.py
new file mode 100644
--- /dev/null
+++ b/tests/test_days.py
@@ -0,0 +1,5 @@
+from spans import later
+
+
+def test_a_day_has_24_hours():
+    assert later("1d") == 25
"""
FIXED = "grep -q '\"d\": 24' spans.py"  # as an eval script


@dataclass(slots=True)
class TaskFile:
    """Tasks graded by the exit status of a line of shell, to be verified by the command line."""

    path: Path
    image: RepoImage
    tasks: list[Task] = field(default_factory=list[Task])
    golds: list[Gold] = field(default_factory=list[Gold])

    def add(self, name: str, script: str, *, gold: str | None = FIX, image: str = "") -> Task:
        task = make_task(
            image or self.image.tag, id=f"test:{name}", verdict=ExitCode(eval_script=script + "\n")
        )
        self.tasks.append(task)
        if gold is not None:
            self.golds.append(Gold(id=task.id, patch=gold))
        write_tasks(self.path, self.tasks)
        write_gold(gold_path(self.path), self.golds)
        return task

    def verify(self, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
        """Exit status, and what --json says by task."""
        return verify(self.path, *arguments)


def verify(tasks: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    out = tasks.with_name("out.json")
    status = main([str(tasks), "--json", str(out), *arguments])
    return status, {line["task"]: line for line in json.loads(out.read_text())}
