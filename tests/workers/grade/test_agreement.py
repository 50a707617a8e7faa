"""The command agrees with workers.verify, for every kind of verdict and every state of a task."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.task import ExitCode, File, R2eExpected, SwebenchLog, Task, Verdict
from pipeline.task import TestsJson as JsonVerdict  # pytest would take it for tests
from pipeline.taskfile import EXPECTED, Gold, State, gold_path, write_gold, write_tasks
from tests.workers.claims import make_task
from tests.workers.conftest import RepoImage
from tests.workers.grade.predicting import grade, write_predictions
from tests.workers.verify.spans import FIX, NEW_TEST, verify
from workers.verify.states import USELESS

pytestmark = pytest.mark.docker

PATH, NAME = "tests/test_days.py", "test_a_day_has_24_hours"
HIDDEN = "from spans import later\n\n\ndef test_a_day_has_24_hours():\n    assert later('1d') == 25\n"
PYTEST = f"python3 -m pytest -rA {PATH}\n"
PARSER = f"""import json, sys
log = open(sys.argv[1]).read()
status = "PASSED" if "PASSED {PATH}::{NAME}" in log else "FAILED"
json.dump({{"tests": [{{"name": "{PATH}::{NAME}", "status": status}}]}}, open(sys.argv[3], "w"))
"""


def verdicts() -> Iterator[Verdict]:
    """One of each kind."""
    file = File(path=PATH, content=HIDDEN.encode())
    yield ExitCode(eval_script=PYTEST, test_patch=NEW_TEST.encode(), protected_paths=(PATH,))
    written = f"cat > {PATH} <<'EOF_TESTS'\n{HIDDEN}EOF_TESTS\n"
    yield SwebenchLog(
        eval_script=f"set -uxo pipefail\n{written}: '>>>>> Start Test Output'\n{PYTEST}: '>>>>> End Test Output'\n",
        log_parser="parse_log_pytest",
        fail_to_pass=(f"{PATH}::{NAME}",),
        pass_to_pass=(),
        protected_paths=(PATH,),
    )
    yield R2eExpected(eval_script=PYTEST, expected={NAME: "PASSED"}, files=(file,))
    yield JsonVerdict(eval_script=PYTEST, parser=PARSER, tests=(f"{PATH}::{NAME}",), files=(file,))


@pytest.fixture
def tasks(tmp_path: Path, image: RepoImage) -> list[Task]:
    tasks = [
        make_task(image.tag, id=f"test:{number}", base_commit=image.commit, verdict=verdict)
        for number, verdict in enumerate(verdicts())
    ]
    write_tasks(tmp_path / "tasks.jsonl", tasks)
    golds = [Gold(id=task.id, patch=FIX, test_patch=NEW_TEST) for task in tasks]
    write_gold(gold_path(tmp_path / "tasks.jsonl"), golds)
    return tasks


def test_verify_and_grade_say_the_same_of_every_state_of_every_kind_of_task(
    tmp_path: Path, tasks: list[Task]
) -> None:
    path = tmp_path / "tasks.jsonl"
    status, verified = verify(path)
    assert (status, [one["states"] for one in verified.values()]) == (0, [EXPECTED] * 4), verified
    patches: dict[State, str] = {
        "empty": "",
        "useless": USELESS.decode(),
        "tests_only": NEW_TEST,
        "gold": FIX,
    }
    for state, patch in patches.items():
        preds = write_predictions(tmp_path / f"{state}.json", dict.fromkeys(verified, patch))
        status, graded = grade(path, str(preds))
        assert status == 0
        for task in tasks:
            (tried,) = verified[task.id]["tries"][state]
            one = graded[task.id]
            assert (one["value"], one["tests"]) == (tried["found"], tried["tests"]), (task.id, state)
            assert one["decided_by"] == tried["why"], (task.id, state)
