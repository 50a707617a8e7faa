"""The audit of log-probs: how far learner and engine disagree about the same token under the same weights.

Every trained token was sampled with a log-prob that the engine reported. The learner recomputes it under the weight version
that sampled it; the difference that is left, the gap, is due to kernels, precision, and bugs. A large gap means that the
off-policy correction starts from wrong log-probs. A share of a batch is drawn for the audit, and the gap is divided by
versions, positions and kinds of tokens. Shape suffixes: T tokens of one sample, N measured tokens of all samples.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.journal.rows import Drift
from trainer.batching.batch import Batch, Sample
from trainer.batching.samples import KINDS, Decode, token_kinds

V = TypeVar("V", np.int32, np.float32)

Recompute = Callable[[int, Sequence[Sample], float], list[npt.NDArray[np.float32]]]
"""(version, samples, temperature) → log-probs in nats under that version's weights, one array of T per sample."""


@dataclass(frozen=True, slots=True)
class Gap:
    """One difference for each token whose weights are still held. `max` and `mean` are of absolute values; None if there is no token."""

    differences_N: npt.NDArray[np.float32]  # nats, learner minus engine
    versions_N: npt.NDArray[np.int32]  # the weights that sampled the token
    samples_N: npt.NDArray[np.int32]  # index of its sample in the batch
    positions_N: npt.NDArray[np.int32]  # tokens before it in its sample
    num_unmeasured: int  # tokens sampled by versions no longer held
    num_positions: int  # positions that the learner computed for the audit, all versions together

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


SHORTEST_SPAN = 256
"""The first bound of the spans of positions, which double from here on."""


def drawn(batch: Batch, share: float, *, seed: int) -> Batch:
    """Whole samples in a random order, until they hold `share` of the trained tokens. At least one, unless the share is 0.

    The draw depends on seed, step and the set of samples, not on their order.
    """
    samples = sorted(
        (sample for sample in batch.samples if sample.num_trained_tokens),
        key=lambda sample: (sample.request_id, sample.branch),
    )
    wanted, held = share * batch.num_trained_tokens, 0
    chosen: list[int] = []
    for place in np.random.default_rng((seed, batch.step)).permutation(len(samples)):
        if held >= wanted:
            break
        chosen.append(int(place))
        held += samples[place].num_trained_tokens
    return replace(batch, samples=tuple(samples[place] for place in sorted(chosen)))


def drift_by_version(gap: Gap) -> dict[str, Drift]:
    return _by(gap, gap.versions_N, str)


def drift_by_position(gap: Gap) -> dict[str, Drift]:
    """The gap by the number of tokens before the token: "0-255", "256-511", "512-1023", and so on."""
    spans_N = np.maximum(gap.positions_N // SHORTEST_SPAN, 1)
    return _by(
        gap, np.where(gap.positions_N < SHORTEST_SPAN, 0, np.log2(spans_N).astype(np.int32) + 1), _span
    )


def drift_by_kind(gap: Gap, batch: Batch, decode: Decode) -> dict[str, Drift]:
    """The gap by the part of the reply that the tokens belong to. `batch` is the batch on which the gap was measured."""
    kinds_N = np.zeros(gap.num_tokens, np.int8)
    for place in np.unique(gap.samples_N):
        here = gap.samples_N == place
        kinds_N[here] = token_kinds(batch.samples[place], decode)[gap.positions_N[here]]
    return _by(gap, kinds_N, lambda number: KINDS[number])


def _by(gap: Gap, labels_N: npt.NDArray[np.integer], name: Callable[[int], str]) -> dict[str, Drift]:
    return {name(int(label)): _drift(gap.differences_N[labels_N == label]) for label in np.unique(labels_N)}


def _drift(differences_N: npt.NDArray[np.float32]) -> Drift:
    sizes_N = np.abs(differences_N)
    return Drift(
        num_tokens=len(differences_N),
        mean=float(sizes_N.mean()),
        max=float(sizes_N.max()),
        bias=float(differences_N.mean()),
    )


def _span(number: int) -> str:
    first = 0 if number == 0 else SHORTEST_SPAN * 2 ** (number - 1)
    return f"{first}-{SHORTEST_SPAN * 2**number - 1}"
