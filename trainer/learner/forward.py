"""Micro-batches through the model on Megatron's schedule, and log-probs of whole samples.

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
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, distributed

from trainer.batching.batch import Sample
from trainer.batching.packing import MicroBatch, deal, pack, unpack
from trainer.learner import backend
from trainer.learner.logprobs import vocab_parallel_logprobs

Logprobs = list[npt.NDArray[np.float32]]
"""One array of T per sample, in nats, aligned with its tokens; the first token, predicted from nothing, has 0."""

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, Any]]
"""Logits of a micro-batch → its loss, the number of tokens that the loss is a sum over, and a report."""


class Forward:
    """Runs one model."""

    def __init__(self, wrapped: DistributedDataParallel, *, max_tokens: int, vocab_size: int) -> None:
        self._wrapped = wrapped
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size

    @property
    def reports(self) -> bool:
        """Whether this rank's copy of a result counts: all tensor-parallel ranks compute the same."""
        return (
            parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
        )

    def share(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """The micro-batches of this data-parallel rank."""
        microbatches = pack(samples, max_tokens=self._max_tokens)
        hands = deal(microbatches, num_ranks=parallel_state.get_data_parallel_world_size())
        return hands[parallel_state.get_data_parallel_rank()]

    def run(
        self, microbatches: list[MicroBatch], prepare: Callable[[MicroBatch], LossFunction], *, train: bool
    ) -> list[Any]:
        """Run the schedule, with the backward pass if `train`. On the last pipeline stage, each micro-batch's report."""

        def forward(source: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, LossFunction]:
            microbatch = next(source)
            inputs, positions = to_device(microbatch.inputs_P)[None], to_device(microbatch.positions_P)[None]
            logits_1PV = model(inputs, positions, None, packed_seq_params=_packing(microbatch))
            return logits_1PV, prepare(microbatch)

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
        self, logits_1PV: Tensor, microbatch: MicroBatch, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets and entropies, float32 of P."""
        return vocab_parallel_logprobs(
            logits_1PV[0],
            to_device(microbatch.targets_P),
            temperature=temperature,
            vocab_size=self._vocab_size,
            group=backend.tensor_parallel_group(),
        )

    def logprobs(self, samples: Sequence[Sample], temperature: float) -> Logprobs:
        """Log-probs of every token of each sample under the present weights, on every rank."""
        if not samples:
            return []
        mine = self.share(samples)
        prepare = functools.partial(self._prepare_logprobs, temperature=temperature)
        values = self.run(mine, prepare, train=False)
        flat = torch.zeros(sum(sample.num_tokens for sample in samples), device=backend.device())
        if self.reports:
            unpacked = unpack(mine, [value.cpu().numpy() for value in values], samples)
            flat.copy_(torch.from_numpy(np.concatenate(unpacked)))
        distributed.all_reduce(flat)
        ends = np.cumsum([sample.num_tokens for sample in samples])[:-1]
        return np.split(flat.cpu().numpy(), ends)

    def _prepare_logprobs(self, microbatch: MicroBatch, *, temperature: float) -> LossFunction:
        def report(logits_1PV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logprobs_P, _ = self.token_logprobs(logits_1PV, microbatch, temperature)
            return logprobs_P.sum(), torch.zeros((), dtype=torch.int, device=logits_1PV.device), logprobs_P

        return report


def to_device(array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).to(backend.device())


def _packing(microbatch: MicroBatch) -> PackedSeqParams:
    boundaries = to_device(microbatch.boundaries)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=microbatch.longest,
        max_seqlen_kv=microbatch.longest,
    )
