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
        span = self._positions.span(microbatch.num_positions)
        rows = np.flatnonzero(microbatch.trained_P[span])
        rows_R, targets_R = to_device(rows), to_device(microbatch.targets_P[span][rows])
        values = self._head.logprobs(
            hidden_L1E, rows_R, targets_R, temperature, entropy_gradient=entropy_gradient
        )
        zeros_L = torch.zeros(span.stop - span.start, device=rows_R.device)
        logprobs_P, entropies_P = (
            self._positions.joined(
                zeros_L.index_copy(0, rows_R, values_R), num_positions=microbatch.num_positions
            )
            for values_R in values
        )
        return logprobs_P, entropies_P

    def logprobs(self, samples: Sequence[Sample], temperature: float) -> Logprobs:
        """Log-probs of the trained tokens of each sample under the present weights, on every rank."""
        if not samples:
            return []
        mine = self.share(samples)
        prepare = functools.partial(self._prepare_logprobs, temperature=temperature)
        return self.gathered(samples, mine, self.run(mine, prepare, train=False))

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

    def _flops(self, microbatch: MicroBatch) -> int:
        lengths = np.diff(microbatch.boundaries).tolist()
        return forward_flops(self._architecture, lengths, num_head_positions=microbatch.num_trained_tokens)


def to_device(array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).to(backend.device())
