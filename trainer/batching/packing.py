"""Packs samples end to end into micro-batches of bounded size, and distributes these among the data-parallel ranks.

No sample is split, and no token of one sample sees another: the boundaries are part of the micro-batch. The layout depends on
the set of samples, not on the order in which they arrived. Plain numpy, no torch.

Shape suffixes: P positions of one micro-batch, S samples in it, T tokens of one sample. A position is a token that is fed and
the token to be predicted after it, so a sample of T tokens takes T - 1 positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.batching.batch import Sample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass. Arrays with suffix P describe the *target* at each position, except `inputs_P` and `positions_P`."""

    inputs_P: npt.NDArray[np.int64]
    positions_P: npt.NDArray[np.int64]  # position of the input in its own sample, from 0
    targets_P: npt.NDArray[np.int64]
    trained_P: npt.NDArray[np.bool_]
    behaviour_logprobs_P: npt.NDArray[np.float32]
    advantages_P: npt.NDArray[np.float32]
    versions_P: npt.NDArray[np.int32]  # version of the weights that sampled the target; -1 where not trained
    segments_P: npt.NDArray[np.int64]  # index of the sample within this micro-batch, from 0
    boundaries: npt.NDArray[np.int32]  # S + 1 offsets: 0, ..., P
    samples: tuple[int, ...]  # index of each in the sequence that was packed; empty for padding
    # Experts of the inputs that this rank works on, by the layers that it holds: trainer/learner/routing.py. None: not reported.
    routing: npt.NDArray[np.uint8] | None = None

    @property
    def num_positions(self) -> int:
        return len(self.inputs_P)

    @property
    def num_trained_tokens(self) -> int:
        return int(self.trained_P.sum())

    @property
    def longest(self) -> int:
        return int(np.diff(self.boundaries).max())


PADDING = MicroBatch(
    inputs_P=np.zeros(1, np.int64),
    positions_P=np.zeros(1, np.int64),
    targets_P=np.zeros(1, np.int64),
    trained_P=np.zeros(1, np.bool_),
    behaviour_logprobs_P=np.zeros(1, np.float32),
    advantages_P=np.zeros(1, np.float32),
    versions_P=np.full(1, -1, np.int32),
    segments_P=np.zeros(1, np.int64),
    boundaries=np.array([0, 1], np.int32),
    samples=(),
)
"""One position that trains nothing. A rank without work runs it, so that all ranks make the same number of passes."""


def pack(samples: Sequence[Sample], *, max_tokens: int) -> list[MicroBatch]:
    """Fills micro-batches of at most `max_tokens` positions: each sample, the longest first, goes into the first one with room.
    Samples of fewer than two tokens predict nothing and are left out. Raises ValueError for a sample that cannot fit.
    """
    order = sorted(
        (index for index, sample in enumerate(samples) if sample.num_tokens > 1),
        key=lambda index: (-samples[index].num_tokens, samples[index].request_id, samples[index].branch),
    )
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        assert not samples[index].trained_T[0], (
            "a sample's first token has nothing before it to be predicted from"
        )
        num_positions = samples[index].num_tokens - 1
        if num_positions > max_tokens:
            raise ValueError(
                f"sample of {samples[index].num_tokens} tokens (request {samples[index].request_id}) does "
                f"not fit in learner.micro_batch_tokens = {max_tokens}: raise it to at least {num_positions} "
                "or lower the limits on tokens of a rollout"
            )
        place = next((i for i, free in enumerate(room) if free >= num_positions), None)
        if place is None:
            bins.append([])
            room.append(max_tokens)
            place = len(bins) - 1
        bins[place].append(index)
        room[place] -= num_positions
    return [_lay_out(samples, tuple(members)) for members in bins]


def deal(
    microbatches: Sequence[MicroBatch], *, num_ranks: int, cost: Callable[[MicroBatch], float]
) -> list[list[MicroBatch]]:
    """Give each data-parallel rank its micro-batches: the most expensive first, to the rank with the least cost so far.

    Full micro-batches have about as many positions each, but attention makes one long sample more expensive than many short ones.

    All ranks get the same number, at least one, filled up with `PADDING`, because every pass is collective.
    """
    hands: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for microbatch in sorted(microbatches, key=cost, reverse=True):
        rank = loads.index(min(loads))
        hands[rank].append(microbatch)
        loads[rank] += cost(microbatch)
    longest = max(1, *(len(hand) for hand in hands))
    return [hand + [PADDING] * (longest - len(hand)) for hand in hands]


def unpack(
    microbatches: Sequence[MicroBatch], values_P: Sequence[npt.NDArray[np.float32]], samples: Sequence[Sample]
) -> list[npt.NDArray[np.float32]]:
    """Converts values per position into one array of T per sample, aligned with its tokens; the first token gets 0."""
    unpacked = [np.zeros(sample.num_tokens, np.float32) for sample in samples]
    for microbatch, values in zip(microbatches, values_P, strict=True):
        for index, start, stop in zip(
            microbatch.samples, microbatch.boundaries, microbatch.boundaries[1:], strict=False
        ):
            unpacked[index][1:] = values[start:stop]
    return unpacked


def _lay_out(samples: Sequence[Sample], members: tuple[int, ...]) -> MicroBatch:
    chosen = [samples[index] for index in members]
    lengths = [sample.num_tokens - 1 for sample in chosen]
    return MicroBatch(
        inputs_P=np.concatenate([sample.tokens_T[:-1] for sample in chosen]).astype(np.int64),
        positions_P=np.concatenate([np.arange(length) for length in lengths]),
        targets_P=np.concatenate([sample.tokens_T[1:] for sample in chosen]).astype(np.int64),
        trained_P=np.concatenate([sample.trained_T[1:] for sample in chosen]),
        behaviour_logprobs_P=np.concatenate([sample.behaviour_logprobs_T[1:] for sample in chosen]),
        advantages_P=np.concatenate([sample.advantages_T[1:] for sample in chosen]),
        versions_P=np.concatenate([sample.versions_T[1:] for sample in chosen]),
        segments_P=np.repeat(np.arange(len(chosen)), lengths),
        boundaries=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        samples=members,
    )
