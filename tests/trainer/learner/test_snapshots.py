"""Log-probs under past weights, and the gap measured under them."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.learner.tiny import config, make_batch, make_samples, train
from trainer.batching.audit import measure_gap
from trainer.batching.batch import Batch
from trainer.feed import Feed
from trainer.learner import backend, snapshots
from trainer.learner.forward import Logprobs
from trainer.learner.megatron import Learner
from trainer.loop.learner_thread import LearnerThread


def test_past_weights_answer_as_they_did_and_the_present_ones_stay(qwen3: Path) -> None:
    learner, samples = Learner(config(snapshots_kept=2), model_directory=qwen3), make_samples()
    recorded = {}
    for version in range(3):
        learner.snapshot(version)
        recorded[version] = learner.logprobs(samples, 1.0)
        train(learner, 1)
    present = learner.logprobs(samples, 1.0)
    assert learner.versions_held == (1, 2)
    for version in (1, 2):
        for expected, observed in zip(
            recorded[version], learner.logprobs_under(version, samples, 1.0), strict=True
        ):
            np.testing.assert_array_equal(observed, expected)
    np.testing.assert_array_equal(np.concatenate(learner.logprobs(samples, 1.0)), np.concatenate(present))
    with pytest.raises(KeyError):
        learner.logprobs_under(0, samples, 1.0)


def test_weights_that_a_snapshot_holds_are_not_copied_again_for_each_version_of_an_audit(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, samples = Learner(config(snapshots_kept=3), model_directory=qwen3), make_samples()
    for version in range(3):
        train(learner, 1)
        learner.snapshot(version)
    present = np.concatenate(learner.logprobs(samples, 1.0))
    monkeypatch.setattr(snapshots.DividedCopy, "__init__", None)  # calling it would be an error
    for version in (0, 1, 2):
        learner.logprobs_under(version, samples, 1.0)
    np.testing.assert_array_equal(np.concatenate(learner.logprobs(samples, 1.0)), present)


@pytest.mark.parametrize("change", ["step", "streamed step", "restore"])
def test_weights_that_have_changed_since_the_newest_snapshot_stay_through_an_audit(
    qwen3: Path, tmp_path: Path, change: str
) -> None:
    learner, samples = Learner(config(snapshots_kept=1), model_directory=qwen3), make_samples()
    train(learner, 1)
    learner.save(tmp_path / "checkpoint", b"")
    train(learner, 1)
    learner.snapshot(2)
    of_the_snapshot = np.concatenate(learner.logprobs(samples, 1.0))
    match change:
        case "step":
            train(learner, 1)
        case "streamed step":
            learner.accumulate(make_batch(samples))
            learner.apply(3)
        case "restore":
            learner.restore(tmp_path / "checkpoint")
    changed = np.concatenate(learner.logprobs(samples, 1.0))
    assert np.abs(changed - of_the_snapshot).max() > 1e-3
    past = np.concatenate(learner.logprobs_under(2, samples, 1.0))
    np.testing.assert_array_equal(past, of_the_snapshot)
    np.testing.assert_array_equal(np.concatenate(learner.logprobs(samples, 1.0)), changed)


def sampled_batch(feed: Feed) -> Batch:
    """Samples of three versions that the learner itself has sampled as an engine would, and trained since."""
    samples = make_samples()
    sampled_by: dict[int, Logprobs] = {}
    for version in range(3):
        feed.call("snapshot", version)
        sampled_by[version] = feed.call("logprobs", samples, 1.0)
        train(feed.learner, 1)
    answered = []
    # One version sampled the first half of each sample, the next version the second half.
    for index, one in enumerate(samples):
        versions = np.where(np.arange(one.num_tokens) < one.num_tokens // 2, index % 2, index % 2 + 1)
        logprobs = np.choose(versions, [sampled_by[version][index] for version in range(3)])
        answered.append(
            replace(
                one,
                versions_T=np.where(one.trained_T, versions, -1).astype(np.int32),
                behaviour_logprobs_T=np.where(one.trained_T, logprobs, 0).astype(np.float32),
            )
        )
    return make_batch(tuple(answered))


def test_the_gap_is_measured_under_the_weights_that_sampled_each_token(qwen3: Path) -> None:
    """The engine is simulated by the learner itself, so under the right weights there is no gap at all."""
    feed = Feed(Learner(config(snapshots_kept=3, lr=1e-2), model_directory=qwen3))
    batch = sampled_batch(feed)
    gap = measure_gap(batch, feed.learner.versions_held, partial(feed.call, "logprobs_under"))
    assert gap.max is not None
    assert gap.max <= (1e-3 if backend.has_cuda() else 0)
    assert gap.num_unmeasured == 0
    present = measure_gap(batch, (0, 1, 2), lambda _, *chosen: feed.call("logprobs", *chosen))
    assert present.mean is not None
    assert present.mean > 0.01, "the weights moved too little for this test to notice"


async def test_a_run_measures_the_gap_under_past_weights_too(qwen3: Path) -> None:
    feed = Feed(Learner(config(snapshots_kept=3, lr=1e-2), model_directory=qwen3))
    batch = sampled_batch(feed)
    with ThreadPoolExecutor(max_workers=1) as pool:
        gap = await LearnerThread(feed, pool).measure_gap(batch)
    assert gap.max is not None
    assert gap.max <= (1e-3 if backend.has_cuda() else 0)
    assert gap.num_positions > sum(sample.num_tokens - 1 for sample in batch.samples), "two versions each"
