"""What the charts of a run show besides the numbers of its steps, held against what was worked out by hand."""

import random
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


async def test_what_is_asked_for_of_later_steps_alone_is_what_the_whole_run_says_of_them(
    serve: Serve, run_dir: Path
) -> None:
    draw = random.Random(5)
    enqueued = [1000.0 * draw.uniform(2, 9) for _ in range(200)]
    rows = [
        {
            **{"request_id": f"r{number}", "group_id": f"g{number // 4}", "purpose": "train", "outcome": "submitted"},
            **{"fate": "trained", "reward": float(draw.random() < 0.5), "num_turns": draw.randrange(9)},
            **{"enqueued_at": at, "claimed_at": at + 300, "finished_at": at + 900, "at": at + 1500},
        }
        for number, at in enumerate(sorted(enqueued))
    ]
    append(run_dir, "episodes", *rows)
    append(run_dir, "fleet", *({"at": 500.0 * one, "span_s": 500.0, "slots": 8, "running": one % 8} for one in range(3, 20)))
    # A step can train what was settled long before it.
    append(run_dir, "steps", *(step(number, [f"r{20 * number - 40}"]) for number in range(2, 10)))
    client = await serve(run_dir)
    whole = (await read(client, f"/api/runs/{samples.RUN}/series"))["steps"]
    assert len(whole) == 9
    for after in range(9):
        late = (await read(client, f"/api/runs/{samples.RUN}/series", after=after))["steps"]
        assert [row["step"] for row in late] == [*range(after + 1, 10)]
        for one, same in zip(late, whole[after:], strict=True):
            assert one.pop("places") == pytest.approx(same["places"], abs=1e-6)
            assert one == {name: value for name, value in same.items() if name != "places"}


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
