"""Which checkpoint a run resumes from, whatever a crash left on disk."""

import os
import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from trainer.learner import directories
from trainer.learner.config import LearnerConfig
from trainer.loop.checkpoints import Checkpoints, DueCheckpoints
from trainer.loop.state import StepTimes
from trainer.recipe import BatchRecipe, CheckpointRecipe, Recipe, Rollout, TaskFiles


class Killed(Exception):
    """The process is no more."""


def written(checkpoints: Checkpoints, step: int, content: str = "") -> Path:
    place = checkpoints.place(step)
    with directories.atomic_directory(place) as partial:
        (partial / "content").write_text(content)
    return place


def test_only_a_completed_checkpoint_counts(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    first = written(checkpoints, 2)
    assert checkpoints.latest() is None, "a directory alone is not a checkpoint"
    checkpoints.complete(first)
    written(checkpoints, 4)
    assert checkpoints.latest() == first


@pytest.mark.parametrize("keep", range(1, 6))
def test_the_newest_checkpoints_are_kept_and_older_ones_removed(tmp_path: Path, keep: int) -> None:
    checkpoints = Checkpoints(tmp_path, keep=keep)
    for step in range(1, 9):
        checkpoints.complete(written(checkpoints, step))
        kept = sorted(path.name for path in tmp_path.glob("*step-*"))
        assert kept == [f"step-{one:08d}" for one in range(max(1, step - keep + 1), step + 1)]


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    directories.begin(checkpoints.place(4))
    checkpoints.complete(written(checkpoints, 3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000003"]


def test_a_second_checkpoint_of_a_step_takes_the_place_and_the_name_of_the_first(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.complete(written(checkpoints, 6, "first"))
    checkpoints.complete(written(checkpoints, 6, "second"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000006"]
    assert (tmp_path / "latest").read_text() == "step-00000006"
    assert (tmp_path / "step-00000006" / "content").read_text() == "second"


@pytest.mark.parametrize("num_calls", range(6))
def test_a_process_killed_while_it_replaces_a_checkpoint_leaves_one_that_can_be_resumed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    """Killed after so many of the calls that change names on disk."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.complete(written(checkpoints, 6, "first"))
    calls_left = num_calls

    def mortal(call: object) -> object:
        def counted(*arguments: object, **options: object) -> object:
            nonlocal calls_left
            if not calls_left:
                raise Killed
            calls_left -= 1
            assert callable(call)
            return call(*arguments, **options)

        return counted

    with monkeypatch.context() as patch:
        for where, name in ((Path, "rename"), (Path, "replace"), (shutil, "rmtree"), (os, "fsync")):
            patch.setattr(where, name, mortal(getattr(where, name)))
        try:
            checkpoints.complete(written(checkpoints, 6, "second"))
        except Killed:
            pass
        else:
            raise AssertionError("it was to be killed on the way")
    found = checkpoints.latest()
    assert found == tmp_path / "step-00000006"
    assert (found / "content").read_text() in ("first", "second")
    checkpoints.complete(written(checkpoints, 6, "third"))
    assert (found / "content").read_text() == "third"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000006"]


def test_a_pointer_to_a_vanished_checkpoint_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("step-00000009")
    with pytest.raises(ValueError, match="step-00000009, which is not there"):
        Checkpoints(tmp_path, keep=1).latest()


class CountingWriter:
    """Counts the checkpoints that are begun; each is whole at once."""

    is_written = has_something_to_acknowledge = False

    def __init__(self) -> None:
        self.num_begun = 0

    async def begin(self) -> None:
        self.num_begun += 1


class RoomyBudget:
    """Redis has room."""

    needs_checkpoint = False


async def test_a_checkpoint_that_an_evaluation_put_off_begins_after_the_next_step_that_may() -> None:
    writer = CountingWriter()
    recipe = Recipe(
        name="run",
        model="",
        num_steps=9,
        tasks=TaskFiles(train=""),
        rollout=Rollout(group_size=2, agent=""),
        batch=BatchRecipe(groups_per_step=1),
        learner=LearnerConfig(lr=1e-6, micro_batch_tokens=128),
        checkpoint=CheckpointRecipe(every_steps=4),
    )
    due = DueCheckpoints(cast(Any, writer), cast(Any, RoomyBudget()), StepTimes(), recipe)
    begun: list[int] = []
    for step, may_begin in ((3, True), (4, False), (5, False), (6, True), (7, True), (8, True), (9, True)):
        await due.after_step(step, may_begin=may_begin)
        begun.append(writer.num_begun)
    assert begun == [0, 0, 0, 1, 1, 2, 3]
