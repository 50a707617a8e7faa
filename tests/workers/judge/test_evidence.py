"""The built-in rule "evidence": steps that rest on what was seen, and check what was done."""

from collections.abc import Sequence

import pytest

from pipeline.trajectory import Action, Turn
from tests.workers.judge.rollouts import SUBMISSION, ran, turn
from workers.judge.functions import RULES

FIND = turn(ran("grep -rn 'def add(' .", "./calc.py:1:def add(a, b):\n"))
READ = turn(ran("cat -n calc.py", "1\tdef add(a, b):\n2\t    return a - b\n"))
EDIT = turn(ran("sed -i '2s|.*|    return a + b|' calc.py"))
OTHER_EDIT = turn(ran("sed -i '2s|.*|    return a * b|' calc.py"))
RESET = turn(ran("git checkout -q . && cat -n calc.py", "1\tdef add(a, b):\n"))
CHECK = 'python3 -c "from calc import add; print(add(1, 1) == 2)" 2>&1 | tail -n 1'
PASSED, FAILED = turn(ran(CHECK, "True\n")), turn(ran(CHECK, "False\n"))
RAISED = turn(ran(CHECK, "TypeError: add() takes 1 argument\n"))
TESTS_FAILED = turn(ran("python -m pytest -q", "1 failed, 2 passed in 0.1s\n", exit_code=1))


def scores(turns: Sequence[Turn]) -> list[float | None]:
    found: list[float | None] = []
    for index in range(len(turns)):
        score = RULES["evidence"]("an issue", turns, index)
        assert score is None or isinstance(score, float)
        found.append(score)
    return found


STORIES = {
    "look, edit, check, submit": ([FIND, READ, EDIT, PASSED, SUBMISSION], [None, 1, 1, 1, 1]),
    "a blind edit that is never checked": ([FIND, EDIT, SUBMISSION], [None, -1, -1]),
    "a blind edit that turns out right": ([FIND, EDIT, PASSED, SUBMISSION], [None, -1, 1, 1]),
    "an edit that its check refutes": ([READ, OTHER_EDIT, FAILED, SUBMISSION], [1, -1, 1, -1]),
    "an edit whose check raises": ([READ, OTHER_EDIT, RAISED, SUBMISSION], [1, -1, 1, -1]),
    "starting over after a check that failed": (
        [READ, OTHER_EDIT, FAILED, RESET, EDIT, PASSED, SUBMISSION],
        [1, -1, 1, 1, 1, 1, 1],
    ),
    "a change after the last check": ([READ, EDIT, PASSED, OTHER_EDIT, SUBMISSION], [1, 1, 1, 1, -1]),
    "reading what is never edited": ([READ, SUBMISSION], [None, -1]),
    "doing the same again": ([READ, READ, EDIT, PASSED, PASSED], [1, -1, 1, 1, -1]),
    "reading again after a change": ([READ, EDIT, READ, OTHER_EDIT], [1, 1, 1, 1]),
    "making the same edit again": ([READ, EDIT, EDIT], [1, 1, -1]),
    "tests that show the fault": ([TESTS_FAILED, READ, EDIT, TESTS_FAILED], [1, 1, -1, 1]),
    "a command that fails": ([turn(ran("cat nowhere.py", exit_code=1))], [-1]),
    "a check by hand that raises": ([turn(ran(CHECK, "ImportError: no add\n", exit_code=1))], [1]),
    "a reply without a command": ([turn(text="I think.")], [-1]),
    "a last command that was not run": ([READ, EDIT, turn(Action(command="ls"))], [1, 1, None]),
}


@pytest.mark.parametrize(("turns", "wanted"), STORIES.values(), ids=list(STORIES))
def test_steps_are_scored_by_what_they_rest_on(turns: Sequence[Turn], wanted: list[float | None]) -> None:
    assert scores(turns) == wanted


@pytest.mark.parametrize(
    "look",
    [
        "sed -n '1,20p' src/calc.py",
        "nl -ba /workspace/src/calc.py | head -n 30",
        "cd src && head -n 40 calc.py",
        "grep -n -A 20 'def add' src/calc.py",
    ],
)
@pytest.mark.parametrize(
    "edit",
    [
        "cd src && sed -i.bak 's/-/+/' calc.py",
        "sed -i -e 's/-/+/' src/calc.py",
        "perl -pi -e 's/-/+/' src/calc.py",
        "echo '# end' >> ./src/calc.py",
    ],
)
def test_files_are_known_however_they_are_shown_and_edited(look: str, edit: str) -> None:
    assert scores([turn(ran(look, "...")), turn(ran(edit))]) == [1, 1]
    assert scores([turn(ran("ls src", "calc.py")), turn(ran(edit))]) == [None, -1]


@pytest.mark.parametrize(
    "change",
    ["cat > test_new.py <<'EOF'\nsed -i s/a/b/ calc.py\nEOF", "git apply fix.patch", "patch -p1 < fix.patch"],
)
def test_a_new_file_or_a_patch_needs_no_look_but_a_check(change: str) -> None:
    assert scores([turn(ran(change)), SUBMISSION]) == [1, -1]
    assert scores([turn(ran(change)), PASSED, SUBMISSION]) == [1, 1, 1]


@pytest.mark.parametrize("scratch", ["cat calc.py > /tmp/copy.py", "echo x | tee /tmp/out", "ls > /dev/null"])
def test_a_scratch_file_is_no_change(scratch: str) -> None:
    assert scores([READ, EDIT, PASSED, turn(ran(scratch)), SUBMISSION]) == [1, 1, 1, None, 1]


def test_quoted_text_is_no_command() -> None:
    assert scores([turn(ran("echo 'sed -i s/a/b/ calc.py > x.py; git stash'")), SUBMISSION]) == [None, -1]
