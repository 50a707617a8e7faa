"""Whatever a log says, reading it ends within the limits, and costs nobody but its patch."""

import contextlib
from collections.abc import Iterator

import pytest

from pipeline.task import ExitCode, SwebenchLog
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from tests.workers.grading import logs
from tests.workers.grading.patches import FIX, new_file
from workers.grading import swebench_rules
from workers.grading.grade import Grader
from workers.grading.swebench_rules import LOG_PARSERS
from workers.grading.verdicts import Remains, judged
from workers.isolation import calls
from workers.isolation.calls import LimitExceeded, Processes
from workers.isolation.process import CallLimits

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
MARKED = f"{START}\n{{}}{END}\n>>>>> Test Exit Code: 0\n"


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    processes = Processes(num_processes=1, limits=CallLimits(cpu_s=1))
    yield processes
    processes.close()


@pytest.mark.slow_but_for("parse_log_pytest", "parse_log_django", "parse_log_astropy")
@pytest.mark.parametrize("parser", sorted(LOG_PARSERS))
async def test_every_parser_of_swebench_ends_within_its_limits(processes: Processes, parser: str) -> None:
    for log in logs.LOGS.values():
        with contextlib.suppress(LimitExceeded):  # and nothing else
            await processes.call(logs.statuses, parser, log)
    assert await processes.call(logs.statuses, "parse_log_pytest", "PASSED a.py::b\n") == {
        "a.py::b": "PASSED"
    }


def test_a_parser_that_breaks_off_makes_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks_off(log: str, spec: object) -> dict[str, str]:
        raise IndexError("list index out of range")

    monkeypatch.setitem(swebench_rules._grading.PARSER_REGISTRY, "parse_log_pytest", breaks_off)
    verdict = SwebenchLog(eval_script="", log_parser="parse_log_pytest", fail_to_pass=("a",), pass_to_pass=())
    remains = Remains(b"patch", 0, MARKED.format("").encode(), b"", None)
    reward = judged(make_task("image", verdict=verdict), remains).reward
    assert (reward.value, reward.tests) == (0.0, {"a": ""})
    assert reward.decided_by == "swebench: the parser broke off: IndexError: list index out of range"


@pytest.mark.slow
async def test_a_log_that_is_never_parsed_exceeds_the_limit_and_the_next_one_is_judged(
    processes: Processes,
) -> None:
    verdict = SwebenchLog(eval_script="", log_parser="parse_log_sympy", fail_to_pass=("a",), pass_to_pass=())
    task = make_task("image", verdict=verdict)
    hostile = MARKED.format(f"test_{' ' * 4_000_000}x\n").encode()
    with pytest.raises(LimitExceeded, match="within 1 s of CPU time"):
        await processes.call(judged, task, Remains(b"patch", 0, hostile, b"", None))
    found = await processes.call(
        judged, task, Remains(b"patch", 0, MARKED.format("a ok\n").encode(), b"", None)
    )
    assert found.reward.log_tail.endswith("Test Exit Code: 0\n")


@pytest.mark.slow
@pytest.mark.docker
async def test_an_endless_parse_is_a_zero_and_the_worker_goes_on(
    grader: Grader, repo_image: RepoImage, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_processes", processes)
    script = f"""echo '{START}'
python3 -c 'import calc; print(calc.add(1, 1) == 2 and "test_a ok" or "test_" + " " * 4_000_000 + "x")'
echo '{END}'
"""
    verdict = SwebenchLog(
        eval_script=script, log_parser="parse_log_sympy", fail_to_pass=("test_a",), pass_to_pass=()
    )
    task = make_task(repo_image.tag, verdict=verdict)
    hostile = await grader.grade(make_claim(task), new_file("notes", "nothing is fixed\n"))
    assert (hostile.value, hostile.applied_by) == (0.0, "git apply")
    assert hostile.decided_by == "the log could not be parsed within 1 s of CPU time"
    assert (await grader.grade(make_claim(task), FIX)).resolved


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.parametrize(
    "content", [f"a = {'[' * 50_000}", f"[tool]\n{'a.' * 20_000}b = 1\n"], ids=["nested", "dotted"]
)
async def test_a_settings_file_that_is_hard_to_parse_is_restored_or_a_zero(
    grader: Grader, repo_image: RepoImage, processes: Processes, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(calls, "_processes", processes)
    task = make_task(repo_image.tag, verdict=ExitCode(eval_script="test ! -e pyproject.toml\n"))
    reward = await grader.grade(make_claim(task), new_file("pyproject.toml", content))
    assert reward.resolved or reward.decided_by.startswith("its settings files could not be parsed")
