"""The log-prob gap, over versions and prefixes."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tests.trainer.trajectories import head, sample
from trainer.batching.audit import measure_gap
from trainer.batching.batch import Batch, Sample


def batch(*samples: Sample) -> Batch:
    return Batch(
        step=1,
        samples=samples,
        temperature=1.0,
        num_trajectories=1,
        request_ids=("r",),
        lag_max=0,
        lag_mean=0,
    )


def off_by(version: int, samples: Sequence[Sample], temperature: float) -> list[npt.NDArray[np.float32]]:
    """A learner whose log-probs under version v are v tenths too high, absurd where nothing is trained."""
    assert temperature == 1.0
    return [
        np.where(s.trained_T, s.behaviour_logprobs_T + version / 10, 99).astype(np.float32) for s in samples
    ]


def test_each_token_is_compared_under_the_weights_that_drew_it() -> None:
    mixed = replace(sample(head(0, 0)), versions_T=np.array([-1, 1, 3], np.int32))
    gap = measure_gap(batch(mixed), (1, 2, 3), off_by)
    assert np.isclose(gap.max, 0.3)
    assert np.isclose(gap.mean, 0.2)
    assert (gap.num_tokens, gap.num_unmeasured) == (2, 0)


def test_tokens_of_versions_no_longer_held_are_counted_not_guessed() -> None:
    mixed = replace(sample(head(0, 0)), versions_T=np.array([-1, 1, 3], np.int32))
    gap = measure_gap(batch(mixed), (3,), off_by)
    assert (gap.num_tokens, gap.num_unmeasured) == (1, 1)


def test_a_gap_that_was_not_measured_is_no_number() -> None:
    gap = measure_gap(batch(sample(head(0, 0), version=3)), (), off_by)
    assert (gap.max, gap.mean, gap.num_tokens, gap.num_unmeasured) == (None, None, 0, 2)
