"""The log-prob gap: how far learner and engine disagree about the same token under the same weights.

Every trained token was sampled with a log-prob that the engine reported. The learner recomputes it under the weight version
that sampled it; the difference left is due to kernels, precision, and bugs. A large gap means that the off-policy correction
starts from wrong log-probs. Shape suffixes: T tokens of one sample, N measured tokens of all samples.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from trainer.batching.batch import Batch, Sample

V = TypeVar("V", np.int32, np.float32)

Recompute = Callable[[int, Sequence[Sample], float], list[npt.NDArray[np.float32]]]
"""(version, samples, temperature) → log-probs in nats under that version's weights, one array of T per sample."""


@dataclass(frozen=True, slots=True)
class Gap:
    """One difference for each token whose weights are still held. `max` and `mean` are absolute; None if there is no token."""

    differences_N: npt.NDArray[np.float32]  # nats, learner minus engine
    versions_N: npt.NDArray[np.int32]  # the weights that sampled the token
    samples_N: npt.NDArray[np.int32]  # place of its sample in the batch
    positions_N: npt.NDArray[np.int32]  # tokens before it in its sample
    num_unmeasured: int  # tokens sampled by versions no longer held
    num_positions: int  # that the learner computed for it, all versions together

    @property
    def num_tokens(self) -> int:
        return len(self.differences_N)

    @property
    def max(self) -> float | None:
        return float(np.abs(self.differences_N).max()) if self.num_tokens else None

    @property
    def mean(self) -> float | None:
        return float(np.abs(self.differences_N).mean()) if self.num_tokens else None


def measure_gap(batch: Batch, versions_held: Collection[int], recompute: Recompute) -> Gap:
    """Compare every trained token under the weights that sampled it: one forward pass per version still held."""
    sampled_by = {int(v) for sample in batch.samples for v in np.unique(sample.versions_T[sample.trained_T])}
    differences: list[npt.NDArray[np.float32]] = []
    versions: list[npt.NDArray[np.int32]] = []
    places: list[npt.NDArray[np.int32]] = []
    positions: list[npt.NDArray[np.int32]] = []
    num_positions = 0
    for version in sorted(sampled_by.intersection(versions_held)):
        chosen = [n for n, sample in enumerate(batch.samples) if (sample.versions_T == version).any()]
        samples = [batch.samples[n] for n in chosen]
        recomputed = recompute(version, samples, batch.temperature)
        num_positions += sum(sample.num_tokens - 1 for sample in samples)
        for number, sample, logprobs_T in zip(chosen, samples, recomputed, strict=True):
            measured = np.flatnonzero(sample.trained_T & (sample.versions_T == version)).astype(np.int32)
            differences.append(logprobs_T[measured] - sample.behaviour_logprobs_T[measured])
            versions.append(sample.versions_T[measured])
            places.append(np.full(len(measured), number, np.int32))
            positions.append(measured)
    return Gap(
        differences_N=_joined(differences, np.float32),
        versions_N=_joined(versions, np.int32),
        samples_N=_joined(places, np.int32),
        positions_N=_joined(positions, np.int32),
        num_unmeasured=batch.num_trained_tokens - sum(map(len, differences)),
        num_positions=num_positions,
    )


def _joined(parts: Sequence[npt.NDArray[V]], dtype: type[V]) -> npt.NDArray[V]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
