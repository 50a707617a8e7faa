"""Which samples of a batch are audited, and how the log-prob gap is spread over versions, positions and kinds of tokens."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trainer.batching.batch import Batch
from trainer.batching.logprob_gap import Gap
from trainer.batching.token_kinds import KINDS, Decode, token_kinds
from trainer.records.audit_row import Drift

SHORTEST_SPAN = 256
"""Positions are told apart by powers of two from here on."""


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
    """By the number of tokens before the token: "0-255", "256-511", "512-1023", and so on."""
    spans_N = np.maximum(gap.positions_N // SHORTEST_SPAN, 1)
    return _by(
        gap, np.where(gap.positions_N < SHORTEST_SPAN, 0, np.log2(spans_N).astype(np.int32) + 1), _span
    )


def drift_by_kind(gap: Gap, batch: Batch, decode: Decode) -> dict[str, Drift]:
    """By what the tokens are part of. `batch` is what the gap was measured on."""
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
