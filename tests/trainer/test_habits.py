"""The report's division of a change of success into what the policy chose to do and how well it did it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from pipeline.request import Claim
from pipeline.rollout_store.reading import DIRECTORY
from pipeline.trajectory import Turn
from tests.pipeline import samples
from tests.workers.judge.rollouts import SUBMISSION, ran, turn
from trainer.records.rollout_writer import RolloutWriter
from trainer.report.habits import HabitReport, habit_report

READ, EDIT = turn(ran("cat -n calc.py", "1\tx\n")), turn(ran("sed -i '1s|.*|y|' calc.py"))
CHECK = turn(ran('python3 -c "from calc import x; print(x)"', "True\n"))
TAKE_BACK = turn(ran("git checkout -q ."))
BLIND, READER = [EDIT, SUBMISSION], [READ, EDIT, SUBMISSION]

Episode = tuple[Sequence[Turn], float]


def stored(run_dir: Path, sides: Mapping[str, Sequence[Episode]]) -> None:
    """Stores episodes by the name of their evaluation; the n-th episode of each is of task n."""
    writer = RolloutWriter(run_dir / DIRECTORY, max_bytes=1024**3)
    for name, episodes in sides.items():
        for place, (turns, reward) in enumerate(episodes):
            request = samples.request(
                id=f"{name}:{place}",
                group_id=f"{name}:{place}",
                purpose="eval",
                task=replace(samples.TASK, id=f"test:{place}"),
            )
            claim = Claim(request=request, attempt=1, worker="host/1", claimed_at=1.0)
            writer.add_trajectory(
                samples.trajectory(claim, turns=tuple(turns), reward=samples.reward(value=reward))
            )
    writer.close()


def reported(run_dir: Path, before: Sequence[Episode], after: Sequence[Episode]) -> HabitReport:
    stored(run_dir, {"heldout_before": before, "heldout_after": after})
    found = habit_report(run_dir)
    assert found is not None
    return found


def half_right(turns: Sequence[Turn], number: int, num_right: int) -> list[Episode]:
    return [(turns, float(place < num_right)) for place in range(number)]


def test_a_change_of_habit_alone_counts_as_choice(tmp_path: Path) -> None:
    before = [*half_right(BLIND, 8, 2), *half_right(READER, 4, 3)]
    after = [*half_right(BLIND, 4, 1), *half_right(READER, 8, 6)]
    found = reported(tmp_path, before, after)
    assert found.change.value == pytest.approx(2 / 12)
    assert found.by_choice.value == pytest.approx(found.change.value)
    assert found.by_skill.value == pytest.approx(0)
    habit = found.habits["reads the file before the first edit"]
    assert (habit.share_before, habit.share_after) == (4 / 12, 8 / 12)
    assert (habit.success_before, habit.success_after) == (0.75, 0.75)


def test_the_same_habits_with_more_success_count_as_skill(tmp_path: Path) -> None:
    found = reported(tmp_path, half_right(READER, 10, 2), half_right(READER, 10, 9))
    assert (found.by_choice.value, found.by_skill.value) == pytest.approx((0, 0.7))
    assert found.by_skill.low < 0.7 < found.by_skill.high


def test_both_parts_sum_to_the_change(tmp_path: Path) -> None:
    before = [*half_right(BLIND, 7, 2), *half_right([READ, EDIT, CHECK, SUBMISSION], 3, 2)]
    after = [*half_right(READER, 4, 3), *half_right([READ, EDIT, CHECK, TAKE_BACK, SUBMISSION], 6, 2)]
    found = reported(tmp_path, before, after)
    assert found.by_choice.value + found.by_skill.value == pytest.approx(found.change.value)
    assert found.habits["runs a check after the last change"].share_after == 0
    assert found.habits["takes edits back"].share_after == 0.6


def test_a_class_that_is_new_counts_as_choice(tmp_path: Path) -> None:
    found = reported(tmp_path, half_right(BLIND, 10, 2), half_right(READER, 10, 9))
    assert (found.by_choice.value, found.by_skill.value) == pytest.approx((0.7, 0))


def test_greedy_episodes_and_other_sets_are_left_out(tmp_path: Path) -> None:
    sides = {
        "heldout_before": half_right(READER, 4, 1),
        "heldout_after": half_right(READER, 4, 2),
        "heldout_after:greedy": half_right(READER, 4, 4),
        "heldout_before:hard": half_right(READER, 4, 0),
        "heldout_after:hard": half_right(READER, 4, 3),
    }
    stored(tmp_path, sides)
    whole, hard = habit_report(tmp_path), habit_report(tmp_path, "hard")
    assert whole is not None
    assert hard is not None
    assert (whole.change.value, hard.change.value) == (0.25, 0.75)


def test_without_two_tasks_played_before_and_after_there_is_no_report(tmp_path: Path) -> None:
    stored(tmp_path, {"heldout_before": half_right(READER, 4, 1), "heldout_after": half_right(READER, 1, 1)})
    assert habit_report(tmp_path) is None
