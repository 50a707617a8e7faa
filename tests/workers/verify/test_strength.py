"""How strong a task's tests are: partial fixes are graded as any patch, and the share that passes is kept with the verification."""

import pytest
from msgspec.structs import replace

from pipeline.request import Limits
from pipeline.task import Calibration, pack
from pipeline.taskfile import Strength, read_verified, verified_path
from tests.pipeline import samples
from tests.workers.verify.spans import FIX, FIXED, TaskFile
from workers.verify.run import strength_rows
from workers.verify.strength import partial_fix_limits

pytestmark = pytest.mark.docker

# One operator is another one.
LEFT_FIX = """diff --git a/left.py b/left.py
--- a/left.py
+++ b/left.py
@@ -1,2 +1,2 @@
 def left(total, used):
-    return total + used
+    return total - used
"""
# No part of a new name can be taken back.
RENAMING = """diff --git a/spans.py b/spans.py
--- a/spans.py
+++ b/spans.py
@@ -4,5 +4,5 @@
     return number * {"h": 1, "d": 12}[unit]
 
 
-def later(text):
+def sooner(text):
     return hours(text) + 1
"""


@pytest.mark.slow
def test_a_weak_task_and_its_strong_twin_differ_where_the_fix_is_one_operator(
    file: TaskFile, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = "python3 -c 'from left import left; assert left({}, 2) == {}'".format
    file.add("strong", checks(7, 5), gold=LEFT_FIX)
    file.add("weak", checks(4, 2), gold=LEFT_FIX)
    status, lines = file.verify("--strength")
    assert status == 0
    strong, weak = lines["test:strong"], lines["test:weak"]
    assert (strong["num_partial_fixes"], strong["passing_partial_fixes"]) == (4, [])
    assert (weak["num_partial_fixes"], weak["passing_partial_fixes"]) == (4, ["left.py:2: total - left out"])
    assert (strong["weakness"], weak["weakness"]) == (0.0, 0.25)
    for one in (strong, weak):
        kept = read_verified(verified_path(file.path))[one["task"]]
        assert (kept.weakness, kept.weakness_interval) == (one["weakness"], tuple(one["weakness_interval"]))
    printed = capsys.readouterr().out
    assert "    weakness 0.00 (0.00 to 0.49, 4 partial fixes)\n" in printed
    assert (
        "    weakness 0.25 (0.05 to 0.70, 4 partial fixes), of which pass:\n    | left.py:2: total - left out\n"
        in printed
    )


def test_one_partial_fix_is_told_with_what_it_leaves_open() -> None:
    rows = strength_rows(Strength(num_partial_fixes=1, passing=()))
    assert [row.plain.strip() for row in rows] == ["weakness 0.00 (0.00 to 0.79, 1 partial fix)"]


@pytest.mark.parametrize(
    ("control_cpu_s", "limit_s"), [(0.0, 1800.0), (0.2, 20.0), (3.0, 60.0), (300.0, 1800.0)]
)
def test_a_partial_fix_that_never_ends_costs_a_multiple_of_the_tests(
    control_cpu_s: float, limit_s: float
) -> None:
    task = replace(samples.TASK, calibration=pack(Calibration(control_cpu_s=control_cpu_s)))
    assert partial_fix_limits(Limits(grade_cpu_s=1800.0), task).grade_cpu_s == limit_s


@pytest.mark.parametrize(
    ("control_wall_s", "limit_s"), [(0.0, 300.0), (10.0, 300.0), (60.0, 1200.0), (400.0, 7200.0)]
)
def test_a_partial_fix_that_waits_forever_is_stopped_after_a_multiple_of_the_tests(
    control_wall_s: float, limit_s: float
) -> None:
    calibration = Calibration(control_cpu_s=1.0, control_wall_s=control_wall_s)
    task = replace(samples.TASK, calibration=pack(calibration))
    assert partial_fix_limits(Limits(grade_wall_s=7200.0), task).grade_wall_s == limit_s


@pytest.mark.slow
def test_the_number_of_partial_fixes_has_a_bound(file: TaskFile) -> None:
    file.add("a", FIXED)
    _, lines = file.verify("--strength", "--partial-fixes", "3")
    assert lines["test:a"]["num_partial_fixes"] == 3


# Quick: the strength of a task is measured.
def test_strength_is_measured_only_if_it_is_wanted_and_the_known_fix_is_worth_1(file: TaskFile) -> None:
    file.add("right", FIXED)
    file.add("wrong", "exit 1")
    assert [line["weakness"] for line in file.verify()[1].values()] == [None, None]
    right, wrong = file.verify("--strength", "--partial-fixes", "2")[1].values()
    assert (right["num_partial_fixes"], wrong["weakness"], wrong["num_partial_fixes"]) == (2, None, 0)


@pytest.mark.slow
def test_of_a_fix_that_cannot_be_taken_apart_nothing_is_known(
    file: TaskFile, capsys: pytest.CaptureFixture[str]
) -> None:
    file.add("a", "grep -q sooner spans.py", gold=RENAMING)
    _, lines = file.verify("--strength")
    found = lines["test:a"]
    assert (found["weakness"], found["weakness_interval"], found["num_partial_fixes"]) == (None, [0, 1], 0)
    assert "weakness not known: no partial fix could be made of the known fix" in capsys.readouterr().out


@pytest.mark.slow
def test_a_measured_strength_stays_until_the_task_changes(file: TaskFile) -> None:
    file.add("a", FIXED)
    first = file.verify("--strength", "--partial-fixes", "2")[1]["test:a"]
    assert file.verify()[0] == 0
    assert read_verified(verified_path(file.path))["test:a"].weakness == first["weakness"]
    unmeasured = file.add("b", FIXED)
    file.verify("--only", unmeasured.id)
    before = read_verified(verified_path(file.path))
    file.verify("--new", "--strength", "--partial-fixes", "2")
    after = read_verified(verified_path(file.path))
    assert after["test:a"] == before["test:a"], "it was measured before"
    assert after["test:b"].weakness is not None
    file.tasks[0] = replace(file.tasks[0], problem="Other words.")
    file.add("c", FIXED)
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
    _, lines = file.verify("--strength", "--partial-fixes", "6")
    found = lines["test:a"]
    assert (found["weakness"], found["num_partial_fixes"]) == (1.0, len(found["passing_partial_fixes"]))
    assert found["num_partial_fixes"] == 1, "the second patch does not fit on a changed first one"
