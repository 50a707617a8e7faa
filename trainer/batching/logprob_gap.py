"""The log-prob gap: how far learner and engine disagree about the same token under the same weights.

Every trained token was sampled with a log-prob that the engine reported. The learner recomputes it under the weight version
that sampled it; the difference left is due to kernels, precision, and bugs. A large gap means that the off-policy correction
starts from wrong log-probs.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.batching.batch import Batch, Sample

Recompute = Callable[[int, Sequence[Sample], float], list[npt.NDArray[np.float32]]]
"""(version, samples, temperature) → log-probs in nats under that version's weights, one array of T per sample."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Absolute differences in nats, over the tokens whose weights are still held; None if there are none."""

    max: float | None
    mean: float | None
    num_tokens: int
    num_unmeasured: int  # tokens sampled by versions no longer held


def measure_gap(batch: Batch, versions_held: Collection[int], recompute: Recompute) -> Gap:
    """Compare every trained token under the weights that sampled it: one forward pass per version still held."""
    sampled_by = {int(v) for sample in batch.samples for v in np.unique(sample.versions_T[sample.trained_T])}
    differences: list[npt.NDArray[np.float32]] = []
    for version in sorted(sampled_by.intersection(versions_held)):
        samples = [sample for sample in batch.samples if (sample.versions_T == version).any()]
        recomputed = recompute(version, samples, batch.temperature)
        for sample, logprobs_T in zip(samples, recomputed, strict=True):
            chosen = sample.trained_T & (sample.versions_T == version)
            differences.append(np.abs(logprobs_T[chosen] - sample.behaviour_logprobs_T[chosen]))
    if not differences:
        return Gap(max=None, mean=None, num_tokens=0, num_unmeasured=batch.num_trained_tokens)
    gaps = np.concatenate(differences)
    return Gap(
        max=float(gaps.max()),
        mean=float(gaps.mean()),
        num_tokens=len(gaps),
        num_unmeasured=batch.num_trained_tokens - len(gaps),
    )
