"""What the charts of a run show besides the numbers of its steps, held against what was worked out by hand."""

from pathlib import Path

import pytest

from infra.web.run_journal import RolloutRow, places_of_rollouts
from tests.infra.web.example_run import Serve, append, read, step
from tests.pipeline import samples
from tests.pipeline.journal_rows import made


def episode(*, enqueued: float, claimed: float, finished: float, settled: float) -> RolloutRow:
    return made(
        RolloutRow,
        request_id="one",
        enqueued_at=enqueued,
        claimed_at=claimed,
        finished_at=finished,
        at=settled,
    )


def test_rollouts_are_counted_where_they_are_for_as_long_as_they_are_there() -> None:
    base = 1.8e9
    one = episode(enqueued=base, claimed=base + 4, finished=base + 8, settled=base + 20)
    withdrawn = episode(enqueued=base, claimed=0.0, finished=0.0, settled=base + 10)
    first, second = places_of_rollouts([one, withdrawn], [base + 10, base + 20])
    assert first == pytest.approx({"queued": 1.4, "played": 0.4, "waiting for a step": 0.2})
    assert second == pytest.approx({"queued": 0.0, "played": 0.0, "waiting for a step": 1.0})


def test_a_journal_without_stamps_says_nothing_of_places() -> None:
    assert places_of_rollouts([episode(enqueued=0.0, claimed=0.0, finished=3.0, settled=4.0)], [5.0]) == [{}]


async def test_each_step_has_the_use_of_slots_and_why_admission_was_closed(
    serve: Serve, run_dir: Path
) -> None:
    used = {"slots": 8, "num_workers": 2, "paused": 0}
    append(
        run_dir,
        "fleet",
        {**used, "at": 1500.0, "span_s": 30.0, "running": 8, "closed_by": ""},
        {**used, "at": 1600.0, "span_s": 10.0, "running": 4, "closed_by": "lag"},
        {**used, "at": 9999.0, "span_s": 10.0, "running": 0, "closed_by": "end"},
    )
    shown = await read(await serve(run_dir), f"/api/runs/{samples.RUN}/series")
    assert shown["steps"][0]["slots"] == {"running": 7.0, "paused": 0.0, "idle": 1.0}
    assert shown["steps"][0]["admission"] == {"open": 0.75, "lag": 0.25}


async def test_resumes_and_engines_out_of_routing_are_marked(serve: Serve, run_dir: Path) -> None:
    append(run_dir, "starts", {"step": 0, "at": 900.0}, {"step": 1, "at": 2500.0})
    append(run_dir, "steps", step(2, []))
    out = [
        {"version": number, "step": 1, "quarantined": ["http://two"], "at": 2200.0 + number}
        for number in (1, 2)
    ]
    append(run_dir, "deliveries", *out)
    shown = await read(await serve(run_dir), f"/api/runs/{samples.RUN}/series")
    told = [(mark["kind"], mark["text"]) for mark in shown["marks"] if mark["kind"] in ("resumed", "outage")]
    assert told == [
        ("outage", "out of routing: http://two"),
        ("resumed", "a new process goes on from step 1"),
    ]
