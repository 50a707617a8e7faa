"""How strong a task's tests are: partial fixes are graded as any patch, and the share that passes is kept with the verification."""

import pytest
from msgspec.structs import replace

from pipeline.taskfile import read_verified, verified_path
from tests.workers.verify.spans import FIX, TaskFile

pytestmark = pytest.mark.docker

# Two lines are changed, one of them with two numbers.
WIDE_FIX = """diff --git a/spans.py b/spans.py
--- a/spans.py
+++ b/spans.py
@@ -1,8 +1,8 @@
 def hours(text):
     \"\"\"Hours in a span such as "3h" or "2d".\"\"\"
     number, unit = int(text[:-1]), text[-1]
-    return number * {"h": 1, "d": 12}[unit]
+    return number * {"h": 1, "d": 24}[unit]
 
 
 def later(text):
-    return hours(text) + 1
+    return hours(text) + 1 if hours(text) >= 0 else 0
"""
CHECKED = "python3 -c 'from spans import hours; assert hours(\"1d\") == 24'"
WEAK = "python3 -c 'from spans import hours; assert hours(\"1d\") > 12'"
PASSING_EVERYWHERE = [
    "spans.py:8: line taken back: return hours(text) + 1 if hours(text) >= 0 else 0",
    "spans.py:8: >= becomes >",
    "spans.py:8: 1 becomes 2",
    "spans.py:8: 1 becomes 0",
    "spans.py:8: 0 becomes 1",
]


@pytest.mark.slow
def test_the_share_of_partial_fixes_that_pass_is_kept_and_printed(
    file: TaskFile, capsys: pytest.CaptureFixture[str]
) -> None:
    file.add("checked", CHECKED, gold=WIDE_FIX)
    file.add("weak", WEAK, gold=WIDE_FIX)
    status, lines = file.verify("--strength")
    assert status == 0
    checked, weak = lines["test:checked"], lines["test:weak"]
    of_hours = {"spans.py:4: 24 becomes 25", "spans.py:4: 24 becomes 23"}
    assert {*weak["passing_partial_fixes"]} - {*checked["passing_partial_fixes"]} == of_hours
    assert {*checked["passing_partial_fixes"]} >= {*PASSING_EVERYWHERE[1:]}
    for one in (checked, weak):
        assert one["weakness"] == len(one["passing_partial_fixes"]) / one["num_partial_fixes"]
        kept = read_verified(verified_path(file.path))[one["task"]]
        assert (kept.weakness, kept.ok) == (one["weakness"], True)
    printed = capsys.readouterr().out
    assert f"weakness {weak['weakness']:.2f}: {len(weak['passing_partial_fixes'])} of " in printed
    assert "    | spans.py:4: 24 becomes 25\n" in printed


@pytest.mark.slow
def test_the_number_of_partial_fixes_has_a_bound(file: TaskFile) -> None:
    file.add("a", CHECKED, gold=WIDE_FIX)
    _, lines = file.verify("--strength", "--partial-fixes", "3")
    assert lines["test:a"]["num_partial_fixes"] == 3


# Quick: the strength of a task is measured.
def test_strength_is_measured_only_if_it_is_wanted_and_the_known_fix_is_worth_1(file: TaskFile) -> None:
    file.add("right", CHECKED, gold=WIDE_FIX)
    file.add("wrong", "exit 1", gold=WIDE_FIX)
    assert [line["weakness"] for line in file.verify()[1].values()] == [None, None]
    right, wrong = file.verify("--strength", "--partial-fixes", "2")[1].values()
    assert (right["num_partial_fixes"], wrong["weakness"], wrong["num_partial_fixes"]) == (2, None, 0)


@pytest.mark.slow
def test_a_fix_that_cannot_be_taken_apart_is_not_weak(
    file: TaskFile, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = FIX.replace('{"h": 1, "d": 24}[unit]\n', "HOURS[unit]\n").replace(
        "@@ -1,5 +1,5 @@", "@@ -1,5 +1,5 @@"
    )
    file.add("a", "grep -q HOURS spans.py", gold=gold)
    _, lines = file.verify("--strength")
    assert (lines["test:a"]["weakness"], lines["test:a"]["num_partial_fixes"]) == (0, 0)
    assert "no partial fix could be made of the known fix" in capsys.readouterr().out


@pytest.mark.slow
def test_a_measured_strength_stays_until_the_task_changes(file: TaskFile) -> None:
    file.add("a", CHECKED, gold=WIDE_FIX)
    first = file.verify("--strength", "--partial-fixes", "2")[1]["test:a"]
    assert file.verify()[0] == 0
    assert read_verified(verified_path(file.path))["test:a"].weakness == first["weakness"]
    unmeasured = file.add("b", CHECKED, gold=WIDE_FIX)
    file.verify("--only", unmeasured.id)
    before = read_verified(verified_path(file.path))
    file.verify("--new", "--strength", "--partial-fixes", "2")
    after = read_verified(verified_path(file.path))
    assert after["test:a"] == before["test:a"], "it was measured before"
    assert after["test:b"].weakness is not None
    file.tasks[0] = replace(file.tasks[0], problem="Other words.")
    file.add("c", CHECKED, gold=WIDE_FIX)
    file.verify()
    assert read_verified(verified_path(file.path))["test:a"].weakness is None


# A second patch of a file that the first one changes, as the diffs of two commits one after the other.
SECOND = """diff --git a/spans.py b/spans.py
--- a/spans.py
+++ b/spans.py
@@ -1,5 +1,5 @@
 def hours(text):
     \"\"\"Hours in a span such as "3h" or "2d".\"\"\"
     number, unit = int(text[:-1]), text[-1]
-    return number * {"h": 1, "d": 24}[unit]
+    return number * {"h": 1, "d": 24.0}[unit]
 
"""


@pytest.mark.slow
def test_partial_fixes_that_do_not_apply_do_not_count(file: TaskFile) -> None:
    file.add("a", "grep -q 24 spans.py", gold=FIX + SECOND)
    _, lines = file.verify("--strength")
    found = lines["test:a"]
    assert (found["weakness"], found["num_partial_fixes"]) == (1.0, len(found["passing_partial_fixes"]))
    assert "spans.py:4: 24 becomes 25" not in found["passing_partial_fixes"], (
        "the second patch does not fit on it"
    )
