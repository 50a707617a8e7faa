"""Long runs: what is read before a reply, what is held in memory, and what the reply says meanwhile."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks import long_run
from infra.web import runs
from infra.web.runs import RunCatalogue, RunReader
from pipeline.journal.reading import last_row
from pipeline.journal.rows import StepRow
from tests.infra.web.example_run import NO_REDIS, Client, Serve, append, finished, read, settled, step
from tests.pipeline import samples
from tests.pipeline.journal_rows import made, write

MAX_RESIDENT_BYTES = 300 * 10**6
TABLE = f"/api/runs/{long_run.RUN}/rollouts"


@pytest.fixture(scope="module")
def long_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "long"
    long_run.write(directory)
    return directory


def peak_resident_bytes(process_id: int) -> int:
    status = Path(f"/proc/{process_id}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


async def whole(session: aiohttp.ClientSession | Client, path: str, **query: str | int) -> Any:
    """The reply once the run is read."""
    async with asyncio.timeout(120):
        while True:
            async with session.get(path, params=query) as response:
                shown = await response.json()
            if shown["reading"] is None:
                return shown
            await asyncio.sleep(0.2)


@pytest.mark.slow
async def test_all_pages_of_a_hundred_thousand_rollouts_fit_into_300_mb(long_dir: Path) -> None:
    words = ["-m", "infra.web", "--run-dir", str(long_dir), "--port", "0", "--redis", NO_REDIS]
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        async with aiohttp.ClientSession(address, raise_for_status=True) as session:
            query: dict[str, str | int] = {"task": "task-07", "reward": "1", "sort": "-num_turns"}
            shown = await whole(session, TABLE, **query, page_size=500)
            assert (shown["num_rollouts"], shown["total"]) == (long_run.NUM_ROLLOUTS, 2000)
            turns = [row["num_turns"] for row in shown["rows"]]
            assert turns == sorted(turns, reverse=True)
            newest = (await whole(session, TABLE))["rows"][0]
            last_step = 1 + (long_run.NUM_ROLLOUTS - 1) // long_run.ROLLOUTS_PER_STEP
            assert [newest[name] for name in ("fate", "is_stored", "step")] == ["", True, last_step]
            for page in ("series", "tasks", "represented", f"rollouts/{long_run.request_id(0)}"):
                await whole(session, f"/api/runs/{long_run.RUN}/{page}")
        assert peak_resident_bytes(process.pid) < MAX_RESIDENT_BYTES
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.slow
def test_a_request_reads_one_slice_of_a_run_however_long_it_is(long_dir: Path) -> None:
    run = RunCatalogue([long_dir]).runs([])[long_run.RUN]
    sizes = [run.reading.read_bytes if run.reading else 0]
    while not run.read_slice():
        assert run.reading is not None
        sizes.append(run.reading.read_bytes)
        if len(sizes) == 2:
            # Steps come first, so curves are there before the table is.
            assert run.journal.steps.rows
            assert len(run.rollouts.rows) < 0.1 * long_run.NUM_ROLLOUTS
    assert sizes == sorted(sizes)
    journal_bytes, _ = run.journal.progress
    # Bodies are passed over, so fewer bytes are read than there are.
    assert journal_bytes / runs.SLICE_BYTES < len(sizes) < run.rollouts.progress[1] / runs.SLICE_BYTES


async def test_a_reply_says_how_far_reading_is_and_ends_up_whole(
    serve: Serve, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "SLICE_BYTES", 100)
    append(run_dir, "episodes", *(settled(finished(f"r{n}", reward=0.0), "trained") for n in range(500)))
    client = await serve(run_dir)
    first = await read(client, f"/api/runs/{samples.RUN}/rollouts")
    assert 0 < first["reading"]["read_bytes"] < first["reading"]["total_bytes"]
    assert first["num_rollouts"] < 503
    assert (await whole(client, f"/api/runs/{samples.RUN}/rollouts"))["num_rollouts"] == 503


async def test_the_memory_of_a_run_that_nobody_looks_at_is_given_back(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MAX_ROWS", 3)
    other = tmp_path / "other"
    (other / "journal").mkdir(parents=True)
    append(other, "episodes", settled(finished("theirs", reward=0.0), "trained"))
    first, second = RunCatalogue([run_dir, other]).runs([]).values()
    reader = RunReader()
    await reader.catch_up(first)
    assert (len(first.rollouts.rows), first.reading) == (3, None)
    await reader.catch_up(second)
    assert (len(first.rollouts.rows), len(second.rollouts.rows)) == (0, 1)
    assert first.reading is not None  # a reply would say that there is more
    await reader.catch_up(first)
    assert (len(first.rollouts.rows), len(second.rollouts.rows)) == (3, 0)


async def test_a_step_that_is_read_before_its_episodes_is_theirs(serve: Serve, run_dir: Path) -> None:
    client = await serve(run_dir)
    late = finished("late", reward=1.0)
    append(run_dir, "steps", step(2, ["late"]))
    assert len((await read(client, f"/api/runs/{samples.RUN}/rollouts"))["rows"]) == 3
    append(run_dir, "episodes", settled(late, "trained"))
    rows = (await read(client, f"/api/runs/{samples.RUN}/rollouts", sort="request_id"))["rows"]
    assert [(row["request_id"], row["step"], row["lag"]) for row in rows][1:2] == [("late", 2, 1)]


@pytest.mark.parametrize("num_bytes", [0, 100, 64 * 1024, 600 * 1024])
def test_the_last_row_is_found_from_the_end_of_a_file(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "steps.jsonl"
    write(tmp_path, made(StepRow, step=1), made(StepRow, step=2, request_ids=["x" * num_bytes]))
    (tmp_path / "journal" / path.name).rename(path)
    with path.open("a") as file:
        file.write('not JSON\n{"step": 3, "torn')
    found = last_row(tmp_path, StepRow)
    assert found is not None
    assert found.step == 2
    path.write_text('{"step": 1')
    assert last_row(tmp_path, StepRow) is None
    assert last_row(tmp_path / "nosuch", StepRow) is None
