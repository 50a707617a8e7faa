"""`show` says what a step did with the tokens of a rollout, where the run keeps that."""

import asyncio
import json
import struct
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.journal.rows import EpisodeRow, StepRow
from pipeline.message import pack_float32s
from pipeline.request import Claim
from pipeline.rollout_store.record import REASONS, StoredRollout, TrainedHead, TrainedTokens, TrainedTurn
from pipeline.trajectory import head_of
from tests.pipeline import samples
from tests.pipeline.journal_rows import made, write
from trainer.records.rollout_writer import RolloutWriter

NO_REDIS = "redis://127.0.0.1:1/0"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a run whose step 7 trained the rollout `r`."""
    claim = Claim(request=samples.request(id="r"), attempt=1, worker="host/1", claimed_at=1.0)
    rollout = samples.trajectory(claim)
    turn = TrainedTurn(
        turn=0,
        logprobs=pack_float32s([-0.5, -0.75, -1.0]),
        advantages=pack_float32s([0.5, 0.5, 0.5]),
        weights=struct.pack("<3e", 1.0, 0.5, 1.5),
        reasons=bytes([0, REASONS.index("masked"), REASONS.index("masked")]),
    )
    writer = RolloutWriter(tmp_path / "rollouts", max_bytes=10**9)
    writer.add(head_of(rollout, 0), StoredRollout(trajectory=rollout))
    writer.add_trained(
        TrainedHead(rollout_id="r", step=7, version=6, num_tokens=3),
        TrainedTokens(step=7, version=6, turns=(turn,)),
    )
    writer.close()
    write(tmp_path, made(EpisodeRow, request_id="r", fate="trained", at=9.0))
    trained_by(tmp_path, step=7)
    return tmp_path


def trained_by(run_dir: Path, *, step: int) -> None:
    """The journal says that this step trained the rollout."""
    (run_dir / "journal" / "steps.jsonl").unlink(missing_ok=True)
    write(run_dir, made(StepRow, step=step, version=step - 1, at=9.0, request_ids=["r"]))


async def printed(capsys: pytest.CaptureFixture[str], run_dir: Path, *words: str) -> str:
    command = ["show", "r", "--run-dir", str(run_dir), "--redis", NO_REDIS, *words]
    assert await asyncio.to_thread(main, command) == 0
    return capsys.readouterr().out


async def test_each_turn_has_a_line(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = await printed(capsys, run_dir)
    assert "what step 7 did with its tokens, from weights v6" in shown
    assert (
        "turn 1  3 tokens, mean advantage +0.500, log-prob -0.750 (engine -0.583), weight 1.000, "
        "2 without a gradient: masked\n" in shown
    )


async def test_as_json_each_token_has_its_numbers(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(await printed(capsys, run_dir, "--json"))
    (turn,) = shown["trained"]["turns"]
    assert (turn["weights"], turn["reasons"]) == ([1.0, 0.5, 1.5], ["", "masked", "masked"])


async def test_a_step_that_a_resume_took_back_is_not_shown(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained_by(run_dir, step=8)
    assert "did with its tokens" not in await printed(capsys, run_dir)
    assert json.loads(await printed(capsys, run_dir, "--json"))["trained"] is None
