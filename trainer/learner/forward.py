"""Runs micro-batches through the model on Megatron's schedule, and computes log-probs of whole samples.
Every rank makes the same calls in the same order: all of them are collective.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, distributed

from trainer.batching.batch import Sample
from trainer.batching.packing import MicroBatch, deal, pack, unpack
from trainer.learner import backend
from trainer.learner.architecture import Architecture, forward_flops
from trainer.learner.attention import Positions
from trainer.learner.logprobs import Head
from trainer.learner.routing import Routing

Logprobs = list[npt.NDArray[np.float32]]
"""One array of T per sample, in nats, aligned with its tokens; those that are not trained have 0."""

Likelihoods = tuple[Logprobs, list[npt.NDArray[np.bool_]]]
"""The same, and one array of T per sample that says which of these tokens greedy decoding gives."""

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, Any]]
"""A function from this rank's hidden states of a micro-batch to the loss summed over all positions, the number of tokens in that sum, and
a report.
"""


class Forward:
    """Runs one model."""

    def __init__(
        self,
        wrapped: DistributedDataParallel,
        head: Head,
        positions: Positions,
        routing: Routing,
        architecture: Architecture,
        *,
        max_tokens: int,
    ) -> None:
        self._wrapped = wrapped
        self._head = head
        self._positions = positions
        self._routing = routing
        self._architecture = architecture
        self._max_tokens = max_tokens

    @property
    def reports(self) -> bool:
        """Whether this rank's copy of a result counts, because all tensor- and context-parallel ranks compute the same result."""
        return (
            parallel_state.is_pipeline_last_stage()
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )

    def share(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """The micro-batches of this data-parallel rank, with the routing that this rank replays. Collective."""
        microbatches = pack(samples, max_tokens=self._max_tokens)
        num_ranks = parallel_state.get_data_parallel_world_size()
        hands = deal(microbatches, num_ranks=num_ranks, cost=self._flops)
        return self._routing.hand(samples, hands)

    def run(
        self, microbatches: list[MicroBatch], prepare: Callable[[MicroBatch], LossFunction], *, train: bool
    ) -> list[Any]:
        """Runs the schedule, with the backward pass if `train`. Returns each micro-batch's report on the last pipeline stage."""

        def forward(source: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, LossFunction]:
            microbatch = next(source)
            self._routing.begin(microbatch, train=train)
            inputs_1L = self._positions.mine(microbatch.inputs_P)[None]
            hidden_L1E = model(inputs_1L, None, None, packed_seq_params=self._positions.packing(microbatch))
            return hidden_L1E, prepare(microbatch)

        with backend.device_scope(), contextlib.nullcontext() if train else torch.no_grad():
            return get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(microbatches),
                model=[self._wrapped],
                num_microbatches=len(microbatches),
                seq_length=self._max_tokens,
                micro_batch_size=1,
                forward_only=not train,
            )

    def token_logprobs(
        self,
        hidden_L1E: Tensor,
        microbatch: MicroBatch,
        temperature: float,
        *,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of the trained targets, and entropies at their positions, float32 of P; 0 at the other positions."""
        rows = self._trained_rows(microbatch)
        logprobs_R, entropies_R, _ = self._of_rows(
            hidden_L1E, microbatch, rows, temperature, entropy_gradient=entropy_gradient
        )
        return self._spread(logprobs_R, microbatch, rows), self._spread(entropies_R, microbatch, rows)

    def _trained_rows(self, microbatch: MicroBatch) -> npt.NDArray[np.int64]:
        """The trained positions among those that this rank works on."""
        return np.flatnonzero(microbatch.trained_P[self._positions.span(microbatch.num_positions)])

    def _of_rows(
        self,
        hidden_L1E: Tensor,
        microbatch: MicroBatch,
        rows: npt.NDArray[np.int64],
        temperature: float,
        *,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropies and margins at these positions: logprobs.py."""
        targets = microbatch.targets_P[self._positions.span(microbatch.num_positions)][rows]
        return self._head.logprobs(
            hidden_L1E, to_device(rows), to_device(targets), temperature, entropy_gradient=entropy_gradient
        )

    def _spread(self, values_R: Tensor, microbatch: MicroBatch, rows: npt.NDArray[np.int64]) -> Tensor:
        """Values at these positions as float32 of P, on every context-parallel rank; 0 at the other positions."""
        span = self._positions.span(microbatch.num_positions)
        zeros_L = torch.zeros(span.stop - span.start, device=values_R.device)
        return self._positions.joined(
            zeros_L.index_copy(0, to_device(rows), values_R), num_positions=microbatch.num_positions
        )

    def logprobs(self, samples: Sequence[Sample], temperature: float) -> Logprobs:
        """Log-probs of the trained tokens of each sample under the present weights, on every rank."""
        if not samples:
            return []
        mine = self.share(samples)
        prepare = functools.partial(self._prepare_logprobs, temperature=temperature)
        return self.gathered(samples, mine, self.run(mine, prepare, train=False))

    def likelihoods(self, samples: Sequence[Sample]) -> Likelihoods:
        """Log-probs at temperature 1 of the trained tokens of each sample under the present weights, and which of them greedy decoding
        gives, on every rank.
        """
        mine = self.share(samples)
        found = self.run(mine, self._prepare_likelihoods, train=False)
        logprobs = self.gathered(samples, mine, [logprobs_P for logprobs_P, _ in found])
        likeliest = self.gathered(samples, mine, [likeliest_P for _, likeliest_P in found])
        return logprobs, [values_T.astype(np.bool_) for values_T in likeliest]

    def gathered(
        self, samples: Sequence[Sample], mine: Sequence[MicroBatch], values: Sequence[Tensor]
    ) -> list[npt.NDArray[np.float32]]:
        """Joins values at each position of this rank's micro-batches into one array of T per sample, on every rank."""
        flat = torch.zeros(sum(sample.num_tokens for sample in samples), device=backend.device())
        if self.reports:
            unpacked = unpack(mine, [value.cpu().numpy() for value in values], samples)
            flat.copy_(torch.from_numpy(np.concatenate(unpacked)))
        distributed.all_reduce(flat)
        ends = np.cumsum([sample.num_tokens for sample in samples])[:-1]
        return np.split(flat.cpu().numpy(), ends)

    def _prepare_logprobs(self, microbatch: MicroBatch, *, temperature: float) -> LossFunction:
        def report(hidden_L1E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logprobs_P, _ = self.token_logprobs(hidden_L1E, microbatch, temperature)
            return logprobs_P.sum(), torch.zeros((), dtype=torch.int, device=hidden_L1E.device), logprobs_P

        return report

    def _prepare_likelihoods(self, microbatch: MicroBatch) -> LossFunction:
        def report(hidden_L1E: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
            rows = self._trained_rows(microbatch)
            logprobs_R, _, margins_R = self._of_rows(hidden_L1E, microbatch, rows, 1.0)
            logprobs_P = self._spread(logprobs_R, microbatch, rows)
            likeliest_P = self._spread((margins_R == 0).float(), microbatch, rows)
            none = torch.zeros((), dtype=torch.int, device=hidden_L1E.device)
            return logprobs_P.sum(), none, (logprobs_P, likeliest_P)

        return report

    def _flops(self, microbatch: MicroBatch) -> int:
        lengths = np.diff(microbatch.boundaries).tolist()
        return forward_flops(self._architecture, lengths, num_head_positions=microbatch.num_trained_tokens)


def to_device(array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).to(backend.device())
