"""The command agrees with workers.verify, for every kind of verdict and every state of a task."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.task import ExitCode, File, R2eExpected, SwebenchLog, Verdict
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


@pytest.mark.slow
@pytest.mark.parametrize("verdict", list(verdicts()), ids=lambda verdict: type(verdict).__name__)
def test_verify_and_grade_say_the_same_of_every_state_of_every_kind_of_task(
    tmp_path: Path, image: RepoImage, verdict: Verdict
) -> None:
    path = tmp_path / "tasks.jsonl"
    task = make_task(image.tag, base_commit=image.commit, verdict=verdict)
    write_tasks(path, [task])
    write_gold(gold_path(path), [Gold(id=task.id, patch=FIX, test_patch=NEW_TEST)])
    status, verified = verify(path, "--controls", "1")
    assert (status, verified[task.id]["states"]) == (0, EXPECTED), verified
    patches: dict[State, str] = {
        "empty": "",
        "useless": USELESS.decode(),
        "tests_only": NEW_TEST,
        "gold": FIX,
    }
    for state, patch in patches.items():
        preds = write_predictions(tmp_path / f"{state}.json", {task.id: patch})
        status, graded = grade(path, str(preds))
        assert status == 0
        (tried,) = verified[task.id]["tries"][state]
        one = graded[task.id]
        assert (one["value"], one["tests"]) == (tried["found"], tried["tests"]), state
        assert one["decided_by"] == tried["why"], state
        assert one["control"] == ("confirmed" if state == "gold" else ""), "verification calibrated it"
