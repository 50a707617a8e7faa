"""How far admission may run ahead: what is decided from what, and that the promise about the lag holds meanwhile."""

from dataclasses import replace
from itertools import pairwise

import pytest
from msgspec.structs import replace as changed

from pipeline.journal.rows import LagMetrics, SignalMetrics, StalenessRow, StepRow
from tests.trainer.records.test_step_seconds import row
from trainer.recipe import AdmissionRecipe, StalenessRecipe
from trainer.report.__main__ import staleness_lines
from trainer.report.summary import staleness_report
from trainer.rollouts.admission import (
    MIN_SIGNAL_TOKENS,
    StalenessBounds,
    StalenessController,
    bounds_of,
    decide,
    pooled,
)

BOUNDS = StalenessBounds(
    least_versions=1,
    most_versions=6,
    min_ess_share=0.5,
    max_masked_share=0.2,
    max_behaviour_kl=0.1,
    patience_steps=5,
)


def tokens(lag: int, **fields: float) -> LagMetrics:
    """Many tokens of one lag, with nothing wrong but what `fields` say of their signal."""
    shares = {"ess_share": 1.0, "masked_share": 0.0, "vetoed_share": 0.0, "behaviour_kl": 0.0}
    signal = SignalMetrics(**({"total": 50.0, "num_tokens": 400.0} | shares | fields))
    return LagMetrics(lag=lag, num_tokens=10_000, **shares, signal=signal)


def healthy(*lags: int) -> list[LagMetrics]:
    return [tokens(lag) for lag in lags]


def test_the_limit_is_raised_by_one_once_its_own_tokens_are_useful() -> None:
    versions, reason = decide(2, healthy(0, 1, 2), BOUNDS, may_raise=True)
    assert versions == 3
    assert reason == "of 400 tokens with a signal at lag 2, they keep half of each bound"


@pytest.mark.parametrize(
    "evidence",
    [
        healthy(0, 1),
        [*healthy(0, 1), tokens(2, num_tokens=MIN_SIGNAL_TOKENS - 1)],
        [*healthy(0, 1), tokens(2, ess_share=0.7)],
        [*healthy(0, 1), tokens(2, masked_share=0.06, vetoed_share=0.06)],
        [*healthy(0, 1), tokens(2, behaviour_kl=0.06)],
        [*healthy(0, 1), changed(tokens(2), signal=None)],
        [],
    ],
    ids=["no such tokens", "too few", "small sample", "switched off", "divergence", "no signal", "nothing"],
)
def test_the_limit_stays_without_enough_tokens_that_are_well_within_the_bounds(
    evidence: list[LagMetrics],
) -> None:
    assert decide(2, evidence, BOUNDS, may_raise=True) == (2, "")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (
            {"ess_share": 0.4},
            "of 400 tokens with a signal at lag 3, the effective sample size is 0.40 of the signal",
        ),
        ({"masked_share": 0.15, "vetoed_share": 0.1}, "25% of the signal is masked or vetoed, above 20%"),
        ({"behaviour_kl": 0.2}, "the policy is 0.200 nats of the signal from the weights that sampled them"),
    ],
)
def test_the_limit_falls_below_the_first_lag_that_breaks_a_bound(
    fault: dict[str, float], reason: str
) -> None:
    versions, why = decide(5, [*healthy(0, 1, 2), tokens(3, **fault), *healthy(4, 5)], BOUNDS, may_raise=True)
    assert versions == 2
    assert reason in why


def test_shares_of_all_tokens_decide_nothing() -> None:
    plain = {"ess_share": 0.01, "masked_share": 0.9, "vetoed_share": 0.1, "behaviour_kl": 9.0}
    assert decide(2, [*healthy(0, 1), changed(tokens(2), **plain)], BOUNDS, may_raise=True)[0] == 3


def test_the_limit_never_leaves_its_bounds() -> None:
    assert decide(6, healthy(0, 6), BOUNDS, may_raise=True) == (6, "")
    assert decide(3, [tokens(1, ess_share=0.1)], BOUNDS, may_raise=True)[0] == 1
    assert decide(1, [tokens(1, ess_share=0.1)], BOUNDS, may_raise=True) == (1, "")
    narrow = replace(BOUNDS, least_versions=0)
    assert decide(3, [tokens(1, ess_share=0.1)], narrow, may_raise=True)[0] == 0


def test_a_fault_that_fresh_tokens_have_too_is_not_blamed_on_staleness() -> None:
    evidence = [tokens(0, behaviour_kl=0.3), tokens(4, behaviour_kl=0.4)]
    assert decide(4, evidence, BOUNDS, may_raise=True) == (4, "")


def test_what_was_enqueued_before_the_limit_fell_does_not_lower_it_again() -> None:
    assert decide(2, [*healthy(0, 1, 2), tokens(5, ess_share=0.1)], BOUNDS, may_raise=False) == (2, "")


def test_a_fixed_limit_is_the_largest_lag_and_no_evidence_moves_it() -> None:
    fixed = StalenessController(bounds_of(AdmissionRecipe(max_lag_versions=4)))
    assert (fixed.ahead_versions, fixed.sentence) == (4, "")
    assert fixed.observe(1, (tokens(1, ess_share=0.01),)) is None
    assert fixed.observe(2, tuple(healthy(0, 1, 2, 3, 4))) is None


def test_a_controlled_run_begins_at_the_lower_bound_and_stays_below_the_largest_lag() -> None:
    control = StalenessRecipe(least_versions=2)
    controller = StalenessController(
        bounds_of(AdmissionRecipe(max_lag_versions=3, staleness="controlled", control=control))
    )
    seen = [controller.ahead_versions]
    for step in range(1, 9):
        controller.observe(step, tuple(healthy(*range(controller.ahead_versions + 1))))
        seen.append(controller.ahead_versions)
    assert seen == [2, 3, 3, 3, 3, 3, 3, 3, 3]
    assert controller.sentence.startswith(
        "staleness is controlled: 3 versions ahead, of 2 to 3 (of 400 tokens"
    )


def world(limit: int, useful: int) -> tuple[LagMetrics, ...]:
    """What steps see where tokens more than `useful` versions late are of no use."""
    return tuple(tokens(lag, ess_share=1.0 if lag <= useful else 0.3) for lag in range(limit + 1))


def test_the_limit_comes_to_the_largest_useful_lag_and_tries_the_next_only_after_patience() -> None:
    controller = StalenessController(BOUNDS)
    changes: list[StalenessRow] = []
    for step in range(1, 60):
        change = controller.observe(step, world(controller.ahead_versions, useful=3))
        changes += [change] if change else []
    assert max(change.ahead_versions for change in changes) == 4
    lowered = [change for change in changes if change.ahead_versions < change.before]
    assert {change.ahead_versions for change in lowered} == {3}
    assert all(later.step - earlier.step > 5 for earlier, later in pairwise(lowered))
    assert controller.ahead_versions in (3, 4)


def test_a_resumed_controller_decides_as_the_one_that_was_killed() -> None:
    whole, first = StalenessController(BOUNDS), StalenessController(BOUNDS)
    changes: list[StalenessRow] = []
    rows: list[StepRow] = []
    for step in range(1, 30):
        by_lag = world(whole.ahead_versions, useful=2)
        expected = whole.observe(step, by_lag)
        resumed = StalenessController(BOUNDS, changes=changes, steps=rows)
        assert resumed.observe(step, by_lag) == expected == first.observe(step, by_lag)
        rows.append(changed(row(step), by_lag=by_lag))
        changes += [expected] if expected else []
        again = StalenessController(BOUNDS, changes=changes, steps=rows)
        assert (again.ahead_versions, again.sentence) == (whole.ahead_versions, whole.sentence)
    assert len(changes) > 2


def test_bounds_that_changed_at_a_resume_hold_at_once() -> None:
    changes = [StalenessRow(step=3, before=5, ahead_versions=6, reason="they were useful")]
    assert StalenessController(replace(BOUNDS, most_versions=2), changes=changes).ahead_versions == 2


def test_evidence_of_several_steps_is_the_mean_over_their_tokens() -> None:
    mean, other = pooled(
        [
            (changed(tokens(1), num_tokens=100, ess_share=1.0), tokens(2)),
            (changed(tokens(1), num_tokens=300, ess_share=0.6, behaviour_kl=0.4),),
        ]
    )
    assert (mean.lag, mean.num_tokens, other.lag) == (1, 400, 2)
    assert (mean.ess_share, mean.behaviour_kl) == (pytest.approx(0.7), pytest.approx(0.3))


def test_evidence_by_signal_is_the_mean_over_the_signal_of_several_steps_that_have_one() -> None:
    """Two steps of ten equal signals of 1, and of thirty of 2: 70 in all, and 130 of their squares."""
    steps = (
        (tokens(1, total=10.0, num_tokens=10.0, masked_share=0.7),),
        (tokens(1, total=60.0, num_tokens=30.0, ess_share=0.3),),
        (changed(tokens(1), signal=None),),
    )
    (mean,) = pooled(steps)
    assert mean.signal is not None
    assert (mean.num_tokens, mean.signal.total) == (30_000, 70.0)
    assert mean.signal.num_tokens == pytest.approx(70**2 / 130)
    assert mean.signal.masked_share == pytest.approx(0.1)
    assert mean.signal.ess_share == pytest.approx(0.4)
    (none,) = pooled(steps[2:])
    assert none.signal is None


def test_the_report_tells_lags_apart_and_how_often_the_limit_changed() -> None:
    stale = changed(tokens(1, masked_share=0.5), masked_share=0.25)
    steps = [changed(row(n), by_lag=(tokens(0), stale)) for n in (1, 2)]
    changes = [
        StalenessRow(step=1, before=1, ahead_versions=2, reason="useful"),
        StalenessRow(step=2, before=2, ahead_versions=1, reason="of no use"),
    ]
    lines = list(staleness_lines(staleness_report(steps, changes)))
    assert lines[2:4] == [
        "lag 1: 20,000 tokens, effective 1.000, masked 0.250, vetoed 0.000, KL 0.0e+00",
        "lag 1, by signal: 800 tokens, effective 1.000, masked 0.500, vetoed 0.000, KL 0.0e+00",
    ]
    assert lines[4] == (
        "controlled: raised 1 times, lowered 1 times; since step 2 admission may run 1 versions ahead: of no use"
    )
    assert list(staleness_lines(staleness_report([row(1)], []))) == [], "of older journals"
