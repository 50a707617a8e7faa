"""Whatever a log says, reading it ends within the limits, and costs nobody but its patch."""

import contextlib
from collections.abc import Iterator

import pytest

from pipeline.task import SwebenchLog
from tests.workers.claims import make_task
from tests.workers.grading import logs
from workers.grading import swebench_rules
from workers.grading.judging import Remains, judged
from workers.grading.swebench_rules import LOG_PARSERS
from workers.isolation.calls import LimitExceeded, Processes
from workers.isolation.messages import Limits

MARKED = ">>>>> Start Test Output\n{}>>>>> End Test Output\n>>>>> Test Exit Code: 0\n"


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    processes = Processes(num_processes=1, limits=Limits(cpu_s=1))
    yield processes
    processes.close()


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
