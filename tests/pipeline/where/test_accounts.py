"""The tables of each role: exact, of journals made for it, and summing up to the wall."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.journal.rows import EnginePause, StepRow
from pipeline.request import Claim
from pipeline.where.accounts import (
    ENGINE_IDLE,
    EVALUATION,
    NO_ROLLOUTS,
    NO_SAMPLES,
    NO_SECONDS,
    NO_START,
    NO_STEPS,
    NOT_KEPT,
    OLD,
    PAUSED_FOR_WEIGHTS,
    TRAINING,
    UNSETTLED,
    Span,
    TrainerWindow,
    engines_account,
    parts_of,
    pause_spans,
    percentile,
    rollout_waits,
    slots_account,
    spans_of,
    trainer_account,
)
from tests.pipeline import samples
from tests.pipeline.where.made import end, episode, fleet, start, step

STEPS = [
    step(1, 130.0, wait_s=8.0, forward_s=5.0, backward_s=4.0, optimizer_s=1.0, other_s=2.0),
    step(2, 150.0, wait_s=16.0, audit_s=1.0, export_s=1.0, engines_s=0.5, checkpoint_s=0.5, evaluation_s=1.0),
]


def test_the_trainers_time_is_its_starts_its_steps_and_what_followed_them() -> None:
    found = trainer_account(
        [start(110.0, other=10.0)], STEPS, [end(170.0, evaluation=15.0, wait=3.0, train=2.0)]
    )
    assert found.wall_s == 170.0 - 100.0 == sum(found.parts_s.values())
    assert {name: seconds for name, seconds in found.parts_s.items() if seconds} == {
        "start": 10.0,
        "waiting for groups": 8.0 + 16.0 + 3.0,
        "forward": 5.0,
        "backward": 4.0,
        "optimizer": 1.0,
        "audit": 1.0,
        "export": 1.0,
        "engines": 0.5,
        "checkpoint": 0.5,
        "evaluation": 16.0,
        "other": 4.0,
    }
    assert found.unknown == ()


def test_steps_that_a_resume_discarded_are_time_that_no_row_accounts_for() -> None:
    found = trainer_account([start(110.0, other=10.0), start(300.0, other=20.0)], STEPS, [])
    assert found.wall_s == 300.0 - 100.0
    assert found.parts_s[NOT_KEPT] == 200.0 - 30.0 - sum(row.wall_s for row in STEPS)
    assert found.parts_s["start"] == 30.0


def test_an_older_journal_says_what_is_not_known_of_the_trainer() -> None:
    found = trainer_account([], STEPS, [end(170.0)])
    assert (found.wall_s, found.unknown) == (40.0, (NO_START,))
    nothing = trainer_account([], [step(1, 130.0)], [])
    assert (nothing.wall_s, nothing.unknown) == (0.0, (NO_STEPS,))


def test_slots_are_what_claims_did_and_why_there_were_none() -> None:
    rows = [episode("a"), episode("b", purpose="eval", fate="evaluated")]
    sampled = [
        fleet(span_s=10.0, slots=6, running=5, closed_by="lag"),
        fleet(span_s=5.0, slots=6, running=2, paused=3, closed_by=""),
    ]
    found = slots_account(rows, sampled)
    assert found.wall_s == 90.0 == sum(found.parts_s.values())
    assert (found.parts_s["generate"], found.parts_s["grade"]) == (6.0, 12.0)
    assert found.parts_s["idle: admission is closed by the lag"] == 10.0
    assert found.parts_s["idle: the worker is paused"] == 15.0
    assert found.parts_s["idle: between claims"] == 5.0
    assert found.parts_s[UNSETTLED] == 90.0 - 2 * 28.0 - 30.0
    assert found.unknown == ()


@given(
    st.lists(
        st.tuples(st.floats(0.1, 60), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=9
    ),
    st.integers(0, 9),
)
def test_the_parts_of_slots_sum_up_whatever_samples_missed(
    sampled: list[tuple[float, int, int, int]], num_rows: int
) -> None:
    rows = [episode(str(number)) for number in range(num_rows)]
    fleets = [
        fleet(span_s=span_s, slots=running + idle + paused, running=running, paused=paused, closed_by="lag")
        for span_s, running, idle, paused in sampled
    ]
    found = slots_account(rows, fleets)
    assert sum(found.parts_s.values()) == pytest.approx(found.wall_s)
    assert min(found.parts_s.values(), default=0.0) >= -1e-9
    claimed_s, sampled_s = 28.0 * num_rows, sum(row.span_s * row.slots for row in fleets)
    assert found.wall_s == pytest.approx(max(claimed_s, sampled_s))


def test_an_older_journal_says_what_is_not_known_of_slots() -> None:
    found = slots_account([episode("a", seconds=None)], [])
    assert (found.wall_s, found.unknown) == (0.0, (NO_SAMPLES, NO_SECONDS))


def test_an_engine_is_paused_or_generates_for_training_or_for_an_evaluation_or_is_idle() -> None:
    spans = [
        Span("one", "training", 90.0, 110.0),
        Span("one", "training", 105.0, 120.0),
        Span("one", "evaluation", 115.0, 130.0),
        *pause_spans([EnginePause(engine="one", began_at=118.0, ended_at=122.0)]),
        Span("two", "evaluation", 150.0, 400.0),
    ]
    found = engines_account(spans, ["three"], TrainerWindow(100.0, 200.0))
    assert found.parts_s == {
        TRAINING: 18.0,
        EVALUATION: 8.0 + 50.0,
        PAUSED_FOR_WEIGHTS: 4.0,
        ENGINE_IDLE: 70.0 + 50.0 + 100.0,
    }
    assert found.wall_s == 300.0


def test_without_kept_rollouts_only_the_pauses_of_engines_are_known() -> None:
    pauses = pause_spans([EnginePause(engine="one", began_at=110.0, ended_at=115.0)])
    found = engines_account(pauses, ["one"], TrainerWindow(100.0, 200.0))
    assert found.parts_s == {PAUSED_FOR_WEIGHTS: 5.0, "not known": 95.0}
    assert found.unknown == (NO_ROLLOUTS,)


def test_an_engine_works_at_the_end_of_the_time_that_the_policy_was_asked() -> None:
    turn = samples.turn(asked_at=50.0, generate_s=10.0, engine_wait_s=4.0, engine="one")
    claim = Claim(request=samples.request(), attempt=1, worker="host/1", claimed_at=49.0)
    played = samples.trajectory(claim, turns=(turn, samples.turn(asked_at=0.0)))
    assert list(spans_of(played)) == [Span("one", "training", 54.0, 60.0)]


def test_a_rollouts_life_is_cut_into_what_it_waited_for() -> None:
    life = parts_of(episode("a"), taken_at=170.0)
    assert life == {
        "queue": 1.0,
        "container open": 1.0,
        "waiting for the engine": 2.0,
        "generate": 3.0,
        "command": 4.0,
        "container close": 5.0,
        "grade": 6.0,
        "other": 7.0,
        "delivery": 1.0,
        "waiting for the group": 15.0,
        "waiting for judgements": 5.0,
        "waiting for the step": 20.0,
        "step": 30.0,
    }
    assert sum(life.values()) == 100.0, "from its request to its row"


def test_a_clock_that_is_behind_makes_no_wait_negative() -> None:
    life = parts_of(episode("a", claimed_at=99.0), taken_at=170.0)
    assert (life["queue"], life["delivery"]) == (0.0, 3.0)


def rows_of(*ids: str) -> list[StepRow]:
    return [step(1, 200.0, *ids, began_at=170.0)]


def test_rollouts_are_summed_up_by_their_median_their_ninetieth_percentile_and_their_share() -> None:
    lives = [episode(str(number), enqueued_at=101.0 - 10.0 * number) for number in range(10)]
    found = rollout_waits([*lives, episode("z", fate="zero_variance")], rows_of(*map(str, range(10))))
    queue = found.waits["queue"]
    assert (found.num_rollouts, queue.p50_s, queue.p90_s) == (10, 40.0, 80.0)
    assert sum(one.share for one in found.waits.values()) == pytest.approx(1.0)
    assert queue.share == pytest.approx(450.0 / (450.0 + 10 * 99.0))
    assert percentile([], 0.5) == 0.0


def test_an_older_journal_says_what_is_not_known_of_rollouts() -> None:
    found = rollout_waits([episode("a", seconds=None)], rows_of("a"))
    assert {name: one.p50_s for name, one in found.waits.items()} == {
        "queue": 1.0,
        "on its worker": 28.0,
        "until it was settled": 71.0,
    }
    assert found.unknown == (OLD,)
    assert rollout_waits([], []).unknown == ()
