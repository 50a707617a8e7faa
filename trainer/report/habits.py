"""Divides a change of held-out success into what the policy chose to do and how well it then did it.

Each episode belongs to one class, by the `HABITS` that it shows. With p the share of a class, s its success, and 0 and 1 for before and
after, the change is the sum over classes of

    (p1 - p0) (s0 + s1) / 2     by choice: other classes are chosen
    (s1 - s0) (p0 + p1) / 2     by skill: the same class succeeds more often

(Kitagawa, Journal of the American Statistical Association 50, 1955). Where a class is empty before or after, its success is taken to be
the same on both sides, so what it adds counts as choice. Commands are recognised as `pipeline/command_effects.py` says. The change has
the interval of paired tasks (`paired_difference`), its parts those of the t distribution with the delete-one jackknife over tasks (Efron
and Stein, Annals of Statistics 9, 1981).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import sqrt
from pathlib import Path
from statistics import fmean

import msgspec

from pipeline.command_effects import edits, effects_of, is_informed, last_verdict
from pipeline.intervals import Estimate, paired_difference, t_quantile
from pipeline.rollout_store.reading import DIRECTORY, RolloutStore
from pipeline.rollout_store.record import StoredHead
from pipeline.trajectory import Turn

BEFORE, AFTER = "heldout_before", "heldout_after"


def _reads_first(turns: Sequence[Turn]) -> bool:
    first = next((number for number, turn in enumerate(turns) if edits(turn)), None)
    return first is not None and is_informed(turns, first)


def _checks_last(turns: Sequence[Turn]) -> bool:
    return last_verdict(turns) is not None


def _starts_over(turns: Sequence[Turn]) -> bool:
    return any(effect.takes_back for turn in turns for effect in effects_of(turn))


HABITS: Mapping[str, Callable[[Sequence[Turn]], bool]] = {
    "reads the file before the first edit": _reads_first,
    "runs a check after the last change": _checks_last,
    "takes edits back": _starts_over,
}
"""The habits by name, each with a function that says whether an episode with these turns shows it."""


class Habit(msgspec.Struct, frozen=True, kw_only=True):
    """The episodes that show one habit. Success is None if there are none."""

    share_before: float
    share_after: float
    success_before: float | None
    success_after: float | None


class HabitReport(msgspec.Struct, frozen=True, kw_only=True):
    """The sampled episodes of the tasks that have a reward before and after."""

    num_tasks: int
    num_before: int  # episodes
    num_after: int
    change: Estimate
    by_choice: Estimate
    by_skill: Estimate
    habits: dict[str, Habit]

    @property
    def lines(self) -> Iterator[str]:
        """The report as text."""
        yield (
            f"change {self.change.cell('+')}: by choice {self.by_choice.cell('+')}, by skill {self.by_skill.cell('+')} points (95 %); "
            f"{self.num_before} and {self.num_after} episodes of {self.num_tasks} tasks"
        )
        for name, one in self.habits.items():
            yield (
                f"{name}: {one.share_before:.0%} -> {one.share_after:.0%} of the episodes; these succeed "
                f"{_percent(one.success_before)} -> {_percent(one.success_after)}"
            )


class Played(msgspec.Struct, frozen=True):
    """An episode's class and reward."""

    shown: tuple[bool, ...]  # in the order of HABITS
    reward: float


Sides = tuple[list[Played], list[Played]]
"""Episodes before and after."""


def habit_report(run_dir: Path, heldout_set: str = "") -> HabitReport | None:
    """The report on one held-out set of a run. None: fewer than two of its tasks have episodes before and after in the run's store.

    `heldout_set` is a name of `tasks.heldout_sets`; "" is `tasks.heldout`.
    """
    by_task = {task: sides for task, sides in _by_task(run_dir, heldout_set).items() if all(sides)}
    return _report(list(by_task.values())) if len(by_task) > 1 else None


def _by_task(run_dir: Path, heldout_set: str) -> Mapping[str, Sides]:
    """The sampled episodes with a reward, by task."""
    found: defaultdict[str, Sides] = defaultdict(lambda: ([], []))

    def side(head: StoredHead) -> int | None:
        # The group of an episode is named `evaluation[:set][:greedy]:place`.
        for number, name in enumerate((BEFORE, AFTER)):
            prefix = f"{name}:{heldout_set}:" if heldout_set else f"{name}:"
            if head.head.group_id.startswith(prefix) and head.head.group_id.removeprefix(prefix).isdecimal():
                return number
        return None

    store = RolloutStore(run_dir / DIRECTORY)
    for stored in store.rollouts(lambda head: side(head) is not None and head.head.reward is not None):
        number, played = side(stored.head), stored.rollout.trajectory
        if number is not None and played is not None and played.reward is not None:
            shown = tuple(shows(played.turns) for shows in HABITS.values())
            found[stored.head.head.task_id][number].append(Played(shown, played.reward.value))
    return found


def _report(tasks: Sequence[Sides]) -> HabitReport:
    by_choice, by_skill = whole = _parts(tasks)
    left_out = [_parts([*tasks[:number], *tasks[number + 1 :]]) for number in range(len(tasks))]
    before, after = _joined(tasks)
    return HabitReport(
        num_tasks=len(tasks),
        num_before=len(before),
        num_after=len(after),
        change=_change(sum(whole), tasks),
        by_choice=_interval(by_choice, [choice for choice, _ in left_out]),
        by_skill=_interval(by_skill, [skill for _, skill in left_out]),
        habits={name: _habit(number, before, after) for number, name in enumerate(HABITS)},
    )


def _change(value: float, tasks: Sequence[Sides]) -> Estimate:
    """The change with the interval that the report's table gives it."""
    before, after = (
        {str(number): [one.reward for one in sides[k]] for number, sides in enumerate(tasks)} for k in (0, 1)
    )
    paired = paired_difference(before, after)
    assert paired is not None
    return Estimate(value, paired.low, paired.high, paired.num_draws)


def _parts(tasks: Sequence[Sides]) -> tuple[float, float]:
    """By choice and by skill; they sum to the change of the mean reward over all episodes."""
    before, after = _joined(tasks)
    by_choice = by_skill = 0.0
    for shown in {one.shown for one in (*before, *after)}:
        (p0, s0), (p1, s1) = _class(shown, before), _class(shown, after)
        s0, s1 = (s1 if s0 is None else s0), (s0 if s1 is None else s1)
        assert s0 is not None
        assert s1 is not None
        by_choice += (p1 - p0) * (s0 + s1) / 2
        by_skill += (s1 - s0) * (p0 + p1) / 2
    return by_choice, by_skill


def _joined(tasks: Sequence[Sides]) -> Sides:
    before, after = zip(*tasks, strict=True)
    return [*chain(*before)], [*chain(*after)]


def _class(shown: tuple[bool, ...], episodes: Sequence[Played]) -> tuple[float, float | None]:
    """The share and the success of a class."""
    rewards = [one.reward for one in episodes if one.shown == shown]
    return len(rewards) / len(episodes), fmean(rewards) if rewards else None


def _habit(number: int, before: Sequence[Played], after: Sequence[Played]) -> Habit:
    shares: list[float] = []
    successes: list[float | None] = []
    for episodes in (before, after):
        rewards = [one.reward for one in episodes if one.shown[number]]
        shares.append(len(rewards) / len(episodes))
        successes.append(fmean(rewards) if rewards else None)
    return Habit(
        share_before=shares[0],
        share_after=shares[1],
        success_before=successes[0],
        success_after=successes[1],
    )


def _interval(value: float, left_out: Sequence[float]) -> Estimate:
    count, mean = len(left_out), fmean(left_out)
    error = sqrt((count - 1) / count * sum((one - mean) ** 2 for one in left_out))
    half = t_quantile(count - 1) * error
    return Estimate(value, max(-1.0, value - half), min(1.0, value + half), count)


def _percent(success: float | None) -> str:
    return "-" if success is None else f"{success:.0%}"
