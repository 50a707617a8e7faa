"""What a step did with its tokens goes to the store of rollouts, of the rollouts that are kept, and no step waits for it."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from arq.connections import ArqRedis

from pipeline.message import unpack_float32s
from pipeline.rollout_store.reading import RolloutStore
from tests.pipeline.conftest import pool as pool
from tests.pipeline.samples import RUN
from tests.trainer.trajectories import trajectory, turn
from trainer.batching.batch import Batch, Sample, SampleTokens
from trainer.batching.samples import samples_of
from trainer.recipe import RolloutsRecipe
from trainer.rollouts import recording
from trainer.rollouts.recording import RolloutRecorder

NUM_GROUPS = 40


@pytest.fixture
def batch() -> Batch:
    """One rollout of each group."""
    (made,) = samples_of(trajectory(turn([5], [6, 7], kept=0)), vocab_size=64, max_tokens=64)
    drawn = tuple(
        replace(made, request_id=f"r{number}", group_id=f"g{number}") for number in range(NUM_GROUPS)
    )
    return Batch(
        step=4,
        samples=drawn,
        temperature=1.0,
        num_trajectories=NUM_GROUPS,
        request_ids=tuple(one.request_id for one in drawn),
        lag_max=0,
        lag_mean=0.0,
    )


def reported(sample: Sample) -> SampleTokens:
    logprobs_T = np.where(sample.trained_T, -2.0, 0.0).astype(np.float32)
    weights_T = np.where(sample.trained_T, 1e9, 0.0).astype(np.float32)
    return SampleTokens(sample.request_id, 0, logprobs_T, weights_T, np.zeros(3, np.uint8))


async def kept(pool: ArqRedis, run_dir: Path, batch: Batch, recipe: RolloutsRecipe) -> RolloutStore:
    """The store, after the tokens of `batch` were recorded."""
    with RolloutRecorder(pool, RUN, run_dir, recipe) as recorder:
        recorder.record_trained(batch, [reported(one) for one in batch.samples], version=3)
        await recorder.flush()
    return RolloutStore(run_dir / "rollouts")


async def test_the_tokens_of_each_turn_are_kept(pool: ArqRedis, tmp_path: Path, batch: Batch) -> None:
    found = (await kept(pool, tmp_path, batch, RolloutsRecipe(tokens=True))).trained(["r7"])["r7"]
    assert (found.step, found.version) == (4, 3)
    (of_turn,) = found.turns
    assert (of_turn.turn, [*unpack_float32s(of_turn.logprobs)]) == (0, [-2.0, -2.0])
    assert np.isfinite(np.frombuffer(of_turn.weights, "<f2")).all(), (
        "a weight beyond half precision is bounded"
    )


async def test_of_a_share_of_the_rollouts_the_same_share_of_tokens_is_kept(
    pool: ArqRedis, tmp_path: Path, batch: Batch
) -> None:
    store = await kept(pool, tmp_path, batch, RolloutsRecipe(keep=0.5, tokens=True))
    drawn = {one.request_id for one in batch.samples if recording.is_group_kept(RUN, one.group_id, 0.5)}
    assert store.trained(batch.request_ids).keys() == drawn
    assert 0 < len(drawn) < NUM_GROUPS


async def test_a_step_does_not_wait_for_the_disk(
    pool: ArqRedis,
    tmp_path: Path,
    batch: Batch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(recording, "MAX_WAITING_BYTES", -1)
    with caplog.at_level(logging.WARNING):
        store = await kept(pool, tmp_path, batch, RolloutsRecipe(tokens=True))
    assert store.trained(["r7"]) == {}
    assert "trained tokens of step 4 are not kept" in caplog.text
