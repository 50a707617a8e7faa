"""Isolated calls: what a function returns and raises, and what becomes of a call that exceeds a limit."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import TaskBroken
from pipeline.task import File
from tests.workers.isolation import hostile
from workers.isolation.calls import LimitExceeded, Processes, ProcessLost
from workers.isolation.process import CallLimits

MIB = 1024**2
NEVER_ENDS = "a" * 64


@pytest.fixture
def processes() -> Iterator[Processes]:
    """One process with small limits."""
    limits = CallLimits(cpu_s=1, memory_bytes=256 * MIB, result_bytes=MIB)
    processes = Processes(num_processes=1, limits=limits)
    yield processes
    processes.close()


async def test_a_call_returns_what_the_function_returns(processes: Processes) -> None:
    assert await processes.call(hostile.squared, 7) == 49
    file = File(path="a", content=b"\x00\xff")
    assert await processes.call(hostile.with_content, file, None) == file
    assert await processes.call(hostile.with_content, file, b"b") == File(path="a", content=b"b")


async def test_a_process_stays_for_the_next_calls(processes: Processes) -> None:
    first = await processes.call(hostile.process_id)
    assert first != os.getpid()
    assert {await processes.call(hostile.process_id) for _ in range(3)} == {first}


async def test_a_call_whose_result_is_decided_by_the_task_raises_the_same_error(processes: Processes) -> None:
    first = await processes.call(hostile.process_id)
    with pytest.raises(TaskBroken, match="no such parser"):
        await processes.call(hostile.breaks_the_task, "no such parser")
    assert await processes.call(hostile.process_id) == first


@pytest.mark.slow
async def test_a_call_that_exceeds_a_limit_says_which_and_the_next_call_is_carried_out(
    processes: Processes,
) -> None:
    for match, exceeding in (
        ("^within 1 s of CPU time$", processes.call(hostile.never_ends, NEVER_ENDS)),
        ("^within 0.25 GiB of memory$", processes.call(hostile.fills_memory, 512 * MIB)),
        ("^because it is nested too deeply$", processes.call(hostile.nests, 100_000)),
        ("^into at most 1048576 bytes$", processes.call(hostile.returns_much, 2 * MIB)),
        (r"\(SIGSEGV\)$", processes.call(hostile.ends_by, signal.SIGSEGV)),
    ):
        with pytest.raises(LimitExceeded, match=match):
            await exceeding
        assert await processes.call(hostile.squared, 3) == 9


@pytest.mark.slow
async def test_each_call_has_the_whole_cpu_time(processes: Processes) -> None:
    assert len({await processes.call(hostile.burns, 0.8) for _ in range(4)}) == 1


@pytest.mark.slow
async def test_the_event_loop_goes_on_during_a_call_that_never_ends(processes: Processes) -> None:
    call = asyncio.create_task(processes.call(hostile.never_ends, NEVER_ENDS))
    turns = 0
    while not call.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert turns > 10
    with pytest.raises(LimitExceeded):
        await call


async def test_a_process_that_keeps_much_memory_is_replaced(processes: Processes) -> None:
    first = await processes.call(hostile.process_id)
    assert await processes.call(hostile.keeps_memory, 128 * MIB) == 128 * MIB
    assert await processes.call(hostile.keeps_memory, 0) == 0
    assert await processes.call(hostile.process_id) != first


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_process_that_is_killed_from_outside_is_no_fault_of_the_input(
    processes: Processes, number: signal.Signals
) -> None:
    with pytest.raises(ProcessLost, match=f"hostile:ends_by ended with {number.name}"):
        await processes.call(hostile.ends_by, number)
    assert await processes.call(hostile.squared, 3) == 9


async def test_a_bug_of_ours_is_no_fault_of_the_input(
    processes: Processes, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ProcessLost, match="ended with status 1"):
        await processes.call(hostile.has_a_bug)
    assert "KeyError: 'a bug'" in capfd.readouterr().err
    assert await processes.call(hostile.squared, 3) == 9


async def test_a_process_that_ends_between_two_calls_is_replaced(processes: Processes) -> None:
    first = await processes.call(hostile.process_id)
    os.kill(first, signal.SIGKILL)
    await asyncio.to_thread(until_gone, first)
    assert await processes.call(hostile.process_id) != first


async def test_a_python_that_cannot_be_started_is_no_fault_of_the_input(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ProcessLost, match="could be started"):
        await processes.call(hostile.squared, 3)


async def test_cancelling_a_call_ends_its_process_and_no_other_call(
    processes: Processes, tmp_path: Path
) -> None:
    first = await processes.call(hostile.process_id)
    begun = tmp_path / "begun"
    call = asyncio.create_task(processes.call(hostile.writes_and_sleeps, str(begun)))
    waiting = asyncio.create_task(processes.call(hostile.squared, 3))
    never = asyncio.create_task(processes.call(hostile.squared, 4))
    await asyncio.to_thread(until_there, begun)
    never.cancel()
    call.cancel()
    assert await waiting == 9
    await asyncio.wait({call, never})
    assert call.cancelled()
    assert never.cancelled()
    await asyncio.to_thread(until_gone, first)


async def test_what_a_function_prints_or_reads_does_not_disturb_the_messages(processes: Processes) -> None:
    assert await processes.call(hostile.prints_and_reads) == ""
    assert await processes.call(hostile.squared, 3) == 9


async def test_large_arguments_arrive_whole(processes: Processes) -> None:
    file = File(path="a", content=os.urandom(MIB // 2))
    assert (
        await processes.call(hostile.with_content, File(path="a", content=bytes(32 * MIB)), file.content)
        == file
    )


WORKER = """
import asyncio, sys
from tests.workers.isolation import hostile
from workers.isolation import calls

async def main():
    print(*await asyncio.gather(calls.call(hostile.sleeps, 1.0), calls.call(hostile.sleeps, 1.0)), flush=True)
    busy = asyncio.create_task(calls.call(hostile.never_ends, "a" * 64, cpu_s=3600))
    await asyncio.sleep(0.1 if "--end" in sys.argv else 3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("ends", ["killed", "by itself"])
def test_processes_end_with_the_worker_whatever_they_do(ends: str) -> None:
    arguments = ["--end"] if ends == "by itself" else []
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, *arguments], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    ) as worker:
        assert worker.stdout is not None
        ids = {int(word) for word in worker.stdout.readline().split()}
        if ends == "killed":
            worker.kill()
    assert len(ids) == 2
    for process in ids:
        until_gone(process)


def until_gone(process: int) -> None:
    """Returns when `process` has ended; the test's own limit of time ends a test whose process stays."""
    while True:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.02)


def until_there(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)
