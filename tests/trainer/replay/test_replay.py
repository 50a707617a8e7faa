"""The kept rollouts of a real run through the learner again: the same numbers, or the same steps under another objective."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from redis.asyncio import Redis

from benchmarks.scripted_fleet import alternating, fleet
from pipeline.journal.reading import journal_of
from pipeline.journal.rows import StepRow
from pipeline.request import RolloutRequest
from tests.trainer.processes import recipe as recipe
from tests.trainer.processes import sets, start, steps
from trainer.learner import backend
from trainer.replay import main


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """As in the trainer's process, which the tests start with one thread."""
    torch.set_num_threads(1)
    yield
    backend.leave()


def verdict(request: RolloutRequest) -> float | None:
    """One member of a group has no reward, so that advantages are not those of whole groups."""
    return None if request.member == 3 and request.cursor % 2 else alternating(request)


def rewrite(run: Path, step: int, **changes: object) -> None:
    """Change the row of a step in the journal."""
    path = journal_of(run) / "steps.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row | changes if row["step"] == step else row for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def replayed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit status, and what was printed."""
    status = main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


@pytest.mark.slow
async def test_a_run_is_replayed_bit_for_bit_and_under_another_objective(
    recipe: Path, redis_url: str, redis: Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = recipe.parent / "run", recipe.parent / "out"
    async with fleet(redis_url, verdict):
        trainer = await start(
            redis_url, recipe, "--run-dir", run, *sets("learner.num_epochs=2", "learner.num_minibatches=2")
        )
        assert await trainer.ended() == 0, trainer.output
    await redis.flushdb()

    # From the starting weights, because no checkpoint is older; on the run's one thread, whatever this process had.
    torch.set_num_threads(2)
    status, shown, _ = replayed(capsys, run, "--steps", "..2")
    assert (status, shown.splitlines()[-1]) == (0, "2 of 2 steps are bit for bit those of the run")
    assert torch.get_num_threads() == 1
    # From the checkpoint of step 2, over step 3.
    status, shown, said = replayed(
        capsys, run, "--steps", "4", "--set", "learner.loss.kind=cispo", "--export", out
    )
    assert status == 0
    assert "taking steps 3 to 3 first" in said
    assert "B: learner.loss.kind: stream_grpo -> cispo" in shown
    assert shown.splitlines()[-1] == "A: 1 of 1 steps are bit for bit those of the run"
    assert (out / "config.json").exists()
    assert list(run.glob(".replay-*")) == []
    # The same step under both recipes: A is the run, B is not.
    status, shown, _ = replayed(capsys, run, "--steps", "3..4", "--set", "learner.loss.kind=cispo", "--json")
    found = [json.loads(line) for line in shown.splitlines()]
    losses = {(one["recipe"], one["step"]): one["metrics"]["loss"] for one in found}
    assert [losses["A", row.step] for row in steps(run)[2:]] == [row.loss for row in steps(run)[2:]]
    assert all(losses["A", step] != losses["B", step] for step in (3, 4))

    rewrite(run, 4, loss=0.125)
    status, shown, _ = replayed(capsys, run, "--steps", "3..")
    assert (status, shown.splitlines()[-1]) == (1, "1 of 2 steps are bit for bit those of the run")
    assert shown.splitlines()[2].split()[-1] == "loss"
    check_refusals(run, capsys)


def check_refusals(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[StepRow] = steps(run)
    for arguments, complaint in (
        (("--steps", "3..9"), "the run has taken the steps 1..4"),
        (("--steps", "x"), "write it as 10..20"),
        (("--set", "rollout.group_size=3"), "a replay cannot change rollout.group_size"),
        (("--set", "learner.loss.kind=stream_grpo"), "the run was like that already"),
    ):
        status, _, said = replayed(capsys, run, *arguments)
        assert status == 2
        assert complaint in said
    rewrite(run, 1, request_ids=[*rows[0].request_ids, "gone"])
    status, _, said = replayed(capsys, run, "--steps", "1")
    assert status == 2
    assert "step 1: the rollout gone is not kept" in said


def test_a_directory_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, said = replayed(capsys, tmp_path)
    assert status == 2
    assert "holds no run" in said
