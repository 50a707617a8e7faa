"""Which positions of a micro-batch a rank works on, when several work on the same micro-batch.

The context-parallel ranks of a group take consecutive parts of equal size; with sequence parallelism Megatron divides each part
again among the tensor-parallel ranks. So that all parts are equally large, positions are appended that stand for nothing. They
form a sample of their own, and are dropped when the parts are joined.

Shape suffixes: P positions of the micro-batch, L positions of this rank's part.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from trainer.batching.packing import MicroBatch
from trainer.learner import backend
from trainer.learner.attention import Packing
from trainer.learner.config import LearnerConfig
from trainer.learner.rotary import Rotary


class Positions:
    """Divides and joins arrays over the positions of a micro-batch."""

    def __init__(self, config: LearnerConfig, rotary: Rotary) -> None:
        self._parts = config.context_parallel
        self._multiple = self._parts * (config.tensor_parallel if config.sequence_parallel else 1)
        self._rotary = rotary

    def span(self, num_positions: int) -> slice:
        """This context-parallel rank's part, which may reach beyond the last position."""
        part = self._padded(num_positions) // self._parts
        start = part * parallel_state.get_context_parallel_rank()
        return slice(start, start + part)

    def mine(self, array_P: npt.NDArray[Any], *, fill: int = 0) -> Tensor:
        """This rank's part, on its device; appended positions have `fill`."""
        padded = np.full((self._padded(len(array_P)), *array_P.shape[1:]), fill, array_P.dtype)
        padded[: len(array_P)] = array_P
        return torch.from_numpy(padded[self.span(len(array_P))]).to(backend.device())

    def joined(self, values_L: Tensor, *, num_positions: int) -> Tensor:
        """The values of all parts, on each of their ranks.

        Each rank computes the same loss of them, so the gradient of its own part is its part of the gradient.
        """
        values_P = gather_from_sequence_parallel_region(
            values_L, tensor_parallel_output_grad=False, group=backend.context_parallel_group()
        )
        return values_P[:num_positions]

    def packing(self, microbatch: MicroBatch) -> Packing:
        """What attention has to know of the micro-batch."""
        boundaries, padded = microbatch.boundaries, self._padded(microbatch.num_positions)
        if padded > microbatch.num_positions:
            boundaries = np.append(boundaries, np.int32(padded))
        longest = int(np.diff(boundaries).max())
        on_device = torch.from_numpy(boundaries).to(backend.device())
        cosines_L1D, sines_L1D = self._rotary.angles(self.mine(microbatch.positions_P))
        return Packing(
            qkv_format="thd",
            cu_seqlens_q=on_device,
            cu_seqlens_kv=on_device,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            cosines_L1D=cosines_L1D,
            sines_L1D=sines_L1D,
        )

    def _padded(self, num_positions: int) -> int:
        return -(-num_positions // self._multiple) * self._multiple
