"""The log-prob gap: how far learner and engine disagree about the same token under the same weights.

Every trained token was drawn with a log-prob the engine reported. The learner recomputes it under the very
version that drew it; what remains is kernels, precision, and bugs. Large values mean that the off-policy
correction corrects the wrong thing.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.batching.batch import Batch, Sample

Recompute = Callable[[int, Sequence[Sample], float], list[npt.NDArray[np.float32]]]
"""(version, samples, temperature) → log-probs in nats under that version's weights, one array of T per
sample.
"""


@dataclass(frozen=True, slots=True)
class Gap:
    """Absolute differences in nats, over the tokens whose weights are still held."""

    max: float
    mean: float
    num_tokens: int
    num_unmeasured: int  # tokens drawn by versions no longer held


def measure_gap(batch: Batch, versions_held: Collection[int], recompute: Recompute) -> Gap:
    """One forward pass per version in the batch that is still held."""
    drawn = {int(v) for sample in batch.samples for v in np.unique(sample.versions_T[sample.trained_T])}
    differences = [np.zeros(0, np.float32)]
    for version in sorted(drawn.intersection(versions_held)):
        samples = [sample for sample in batch.samples if (sample.versions_T == version).any()]
        recomputed = recompute(version, samples, batch.temperature)
        for sample, logprobs_T in zip(samples, recomputed, strict=True):
            chosen = sample.trained_T & (sample.versions_T == version)
            differences.append(np.abs(logprobs_T[chosen] - sample.behaviour_logprobs_T[chosen]))
    gaps = np.concatenate(differences)
    return Gap(
        max=float(gaps.max(initial=0.0)),
        mean=float(gaps.mean()) if len(gaps) else 0.0,
        num_tokens=len(gaps),
        num_unmeasured=batch.num_trained_tokens - len(gaps),
    )
