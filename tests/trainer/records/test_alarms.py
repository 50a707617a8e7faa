"""Each alarm begins once when its condition holds, is over once when it holds no longer, and chance does not begin it."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from pipeline.intervals import mean
from pipeline.journal.rows import EpisodeRow, EvaluationRow, Row, SignalMetrics, StepRow
from tests.trainer.records.test_console import JUDGED, row
from tests.trainer.records.test_sinks import evaluation
from trainer.recipe import AlarmsRecipe
from trainer.recipe.schema import AlarmKind
from trainer.records.alarms import Alarms, Storage

RECIPE = AlarmsRecipe(window_steps=4, lag_share=0.75)
MAX_LAG = 4

Change = tuple[AlarmKind, bool]  # what, and whether it is over


def alarms(recipe: AlarmsRecipe = RECIPE) -> Alarms:
    return Alarms(recipe, max_lag_versions=MAX_LAG)


def changes(watch: Alarms, rows: Iterable[Row]) -> list[Change]:
    return [(alarm.kind, alarm.is_over) for one in rows for alarm in watch.observe(one)]


def episode(step: int, outcome: str, reward: float | None = 0.0) -> EpisodeRow:
    return EpisodeRow(
        request_id=f"r{step}",
        group_id=f"g{step}",
        task_id="t",
        purpose="train",
        member=0,
        group_size=1,
        fate="trained",
        outcome=outcome,
        reward=reward,
    )


def success(step: int, is_bad: bool) -> list[Row]:
    return [row(step, 0.2 if is_bad else 0.7)]


def gap(step: int, is_bad: bool) -> list[Row]:
    return [replace(row(step, 0.5), logprob_gap_mean=0.2 if is_bad else 0.01)]


def lag(step: int, is_bad: bool) -> list[Row]:
    return [replace(row(step, 0.5), lag_mean=3.5 if is_bad else 1.0)]


def masked(step: int, is_bad: bool) -> list[Row]:
    """Of all tokens hardly any is masked; of the signal half is masked and a tenth vetoed."""
    signal = SignalMetrics(
        total=9.0,
        num_tokens=99.0,
        ess_share=1.0,
        masked_share=0.5 * is_bad,
        vetoed_share=0.1 * is_bad,
        behaviour_kl=0.0,
    )
    return [replace(row(step, 0.5), masked_share=0.01, signal=signal)]


def format_errors(step: int, is_bad: bool) -> list[Row]:
    return [episode(step, "exhausted:format_errors" if is_bad else "submitted"), row(step, 0.5)]


def trees(step: int, is_bad: bool) -> list[Row]:
    return [episode(step, "submitted:tree" if is_bad else "submitted"), row(step, 0.5)]


def entropy(step: int, is_bad: bool) -> list[Row]:
    return [replace(row(step, 0.5), entropy=0.01 if is_bad else 0.5)]


def judge(step: int, is_bad: bool) -> list[Row]:
    judging = replace(JUDGED, score_mean=0.8 if is_bad else 0.1)
    return [replace(row(step, 0.5 if is_bad else 0.6), judging=judging)]


BY_KIND: dict[AlarmKind, Callable[[int, bool], list[Row]]] = {
    "success_falls": success,
    "gap_grows": gap,
    "lag_saturates": lag,
    "signal_is_masked": masked,
    "format_errors_rise": format_errors,
    "trees_rise": trees,
    "entropy_collapses": entropy,
    "judge_is_gamed": judge,
}


def story(rows_of: Callable[[int, bool], list[Row]], *phases: tuple[int, bool]) -> list[Row]:
    """So many steps of each phase, which are bad or not."""
    bad = [is_bad for num_steps, is_bad in phases for _ in range(num_steps)]
    return [one for step, is_bad in enumerate(bad, 1) for one in rows_of(step, is_bad)]


@pytest.mark.parametrize("kind", BY_KIND)
def test_an_alarm_begins_once_is_over_once_and_begins_again_when_its_condition_returns(
    kind: AlarmKind,
) -> None:
    watch = alarms()
    rows = story(BY_KIND[kind], (12, False), (12, True), (12, False), (12, True))
    assert changes(watch, rows) == [(kind, False), (kind, True), (kind, False)]
    (firing,) = watch.firing
    assert firing.kind == kind


@pytest.mark.parametrize(
    ("kind", "off"),
    [
        ("success_falls", AlarmsRecipe(window_steps=4, success_drop=0)),
        ("gap_grows", AlarmsRecipe(window_steps=4, gap_growth=0)),
        ("lag_saturates", AlarmsRecipe(window_steps=4)),
        ("signal_is_masked", AlarmsRecipe(window_steps=4, masked_signal_share=0)),
        ("format_errors_rise", AlarmsRecipe(window_steps=4, format_error_rise=0)),
        ("trees_rise", AlarmsRecipe(window_steps=4, tree_rise=0)),
        ("entropy_collapses", AlarmsRecipe(window_steps=4, entropy_share=0)),
        ("judge_is_gamed", AlarmsRecipe(window_steps=4, judge_gaming=False)),
    ],
)
def test_an_alarm_without_a_limit_never_begins(kind: AlarmKind, off: AlarmsRecipe) -> None:
    assert changes(alarms(off), story(BY_KIND[kind], (12, False), (12, True))) == []


@pytest.mark.parametrize("kind", BY_KIND)
def test_a_resumed_run_decides_as_the_killed_one_would_have(kind: AlarmKind) -> None:
    rows = story(BY_KIND[kind], (12, False), (12, True), (12, False))
    watch = alarms()
    whole: list[list[Change]] = []
    written: list[list[Row]] = []  # the journal's rows after each row, alarms included
    for one in rows:
        found = watch.observe(one)
        whole.append([(alarm.kind, alarm.is_over) for alarm in found])
        written.append([one, *found])
    for cut in range(len(rows)):
        resumed = alarms()
        resumed.recall(one for some in written[:cut] for one in some)
        assert [changes(resumed, [one]) for one in rows[cut:]] == whole[cut:]


def test_an_alarm_that_a_resume_switches_off_is_forgotten() -> None:
    watch = alarms()
    begun = [alarm for one in story(success, (12, False), (12, True)) for alarm in watch.observe(one)]
    resumed = alarms(AlarmsRecipe(window_steps=4, success_drop=0))
    resumed.recall(begun)
    assert resumed.firing == ()


def test_success_that_varies_by_chance_alone_begins_no_alarm() -> None:
    draw = random.Random(0)
    watch = alarms(AlarmsRecipe())
    rewards = (sum(draw.random() < 0.5 for _ in range(16)) / 16 for _ in range(3000))
    assert changes(watch, (row(step, reward) for step, reward in enumerate(rewards, 1))) == []


@pytest.mark.parametrize(("window_steps", "is_on"), [(2, False), (4, False), (20, True)])
def test_windows_of_few_steps_need_a_larger_difference(window_steps: int, is_on: bool) -> None:
    watch = alarms(AlarmsRecipe(window_steps=window_steps))
    swing = [0.7 + 0.06 * (-1) ** step for step in range(2 * window_steps)]
    rows = [row(step, one) for step, one in enumerate([*swing, *(one - 0.3 for one in swing)], 1)]
    assert changes(watch, rows) == ([("success_falls", False)] if is_on else [])


def test_an_entropy_that_falls_slowly_as_success_grows_begins_no_alarm() -> None:
    steps = (replace(row(step, step / 200), entropy=0.5 - step / 500) for step in range(1, 200))
    assert changes(alarms(AlarmsRecipe()), steps) == []


def test_a_gap_below_the_floor_may_grow() -> None:
    steps = [replace(row(step, 0.5), logprob_gap_mean=1e-6 * 2**step) for step in range(1, 13)]
    assert changes(alarms(), steps) == []


def test_steps_without_a_measured_gap_are_no_evidence() -> None:
    unmeasured: list[StepRow] = [
        replace(row(step, 0.5), logprob_gap_mean=None, logprob_gap_max=None, num_gap_tokens=0)
        for step in range(1, 30)
    ]
    assert changes(alarms(), unmeasured) == []


def test_episodes_that_failed_for_the_infrastructure_are_no_format_errors_and_no_evidence() -> None:
    good = story(format_errors, (12, False))
    failed = [
        one for step in range(13, 40) for one in (episode(step, "failed:sandbox", None), row(step, 0.5))
    ]
    assert changes(alarms(), [*good, *failed]) == []


def test_held_out_success_is_compared_with_the_best_evaluation_of_the_same_tasks_and_sampling() -> None:
    watch = alarms()

    def solved(num_solved: int, num_tasks: int = 40, **fields: Any) -> EvaluationRow:
        rewards = {str(task): (float(task < num_solved),) for task in range(num_tasks)}
        found = mean(list(rewards.values()))
        assert found is not None
        made = evaluation("heldout_step_5", found.value, greedy=False, step=5)
        return replace(made, rewards=rewards, success_low=found.low, success_high=found.high, **fields)

    rows = [
        solved(36),
        solved(12, greedy=True),
        solved(12, tasks="verified"),
        solved(2, num_tasks=6),  # may be chance: these six had been solved, and four is not many
        solved(12, version=9),
        solved(32),
    ]
    found = [alarm for one in rows for alarm in watch.observe(one)]
    assert [(alarm.kind, alarm.subject, alarm.is_over) for alarm in found] == [
        ("success_falls", "held out", False),
        ("success_falls", "held out", True),
    ]
    assert found[0].text == (
        "success (held out) is 0.300 (0.181 to 0.454, 95 %) with weights v9; "
        "the best evaluation before had 0.900 (0.769 to 0.960, 95 %)"
    )


def test_disk_and_redis_begin_an_alarm_when_they_are_nearly_full_and_end_it_when_there_is_room() -> None:
    watch = alarms(AlarmsRecipe(disk_free_bytes=1000, redis_share=0.9))
    measured = [
        Storage(2000, 500, 1000),
        Storage(999, 500, 1000),
        Storage(998, 950, 1000),
        Storage(1001, None),  # not yet as much as ends it; Redis does not answer
        Storage(1250, 850, 1000),
        Storage(1250, 700, 1000),
        Storage(2000, 999, 0),  # of a Redis without a known limit, nothing is known
    ]
    found = [[(alarm.kind, alarm.is_over) for alarm in watch.observe_storage(one)] for one in measured]
    assert found == [
        [],
        [("disk_fills", False)],
        [("redis_fills", False)],
        [],
        [("disk_fills", True)],
        [("redis_fills", True)],
        [],
    ]


def test_a_policy_that_writes_nonsense_from_the_first_episode_is_an_alarm_without_any_step() -> None:
    watch, nonsense = alarms(), [episode(n, "exhausted:format_errors") for n in range(67)]
    assert changes(watch, nonsense[:19]) == [], "too few to say so"
    assert changes(watch, nonsense[19:]) == [("format_errors_prevail", False)]
    assert watch.firing[0].text.startswith("format errors ended 20 of the last 20 training episodes")
    better = [episode(n, "submitted") for n in range(6)]
    assert changes(watch, better) == [("format_errors_prevail", True)], "over at 14 of 20"
    off = AlarmsRecipe(format_error_share=0)
    assert changes(alarms(off), nonsense) == []
