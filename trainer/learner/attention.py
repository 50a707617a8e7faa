"""Attention inside each sample of a packed micro-batch. Replaces Megatron's own, which rejects packed input without
TransformerEngine.

On a GPU in half precision, one variable-length flash kernel runs over the whole pack; otherwise scaled-dot-product attention
runs sample by sample. Either way a token attends to its own sample only, up to itself.

With context parallelism each rank of the group holds a part of the positions (Ulysses, arXiv 2309.14509): an all-to-all gives
it all positions of a part of its heads, it attends, and an all-to-all brings the result back. A sample may lie on several ranks,
and the load is even whatever the lengths of the samples.

Shape suffixes: L positions of this rank, P positions of the micro-batch (as many without context parallelism), H heads of this
rank, D width of a head.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp, all_to_all_sp2hp
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from trainer.learner import backend
from trainer.learner.rotary import rotated


@dataclass
class Packing(PackedSeqParams):
    """Where the samples of a micro-batch begin and end, and the angles of this rank's positions."""

    cosines_L1D: Tensor | None = None
    sines_L1D: Tensor | None = None


class PackedAttention(MegatronModule):
    """Megatron's core-attention interface over packed samples (`qkv_format="thd"`); causal, no dropout."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.attention_dropout == 0.0
        assert config.kv_channels is not None
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self._parts = config.context_parallel_size

    def forward(
        self,
        query_LHD: Tensor,
        key_LHD: Tensor,
        value_LHD: Tensor,
        attention_mask: None,
        packed_seq_params: PackedSeqParams,
        **_unused: Any,
    ) -> Tensor:
        """Attended values, heads side by side: L x (H * D). Keys and values may have fewer heads."""
        if self._parts == 1:
            return self._attend(query_LHD, key_LHD, value_LHD, packed_seq_params)
        # Each rank must get a head of the keys and values, so there may have to be several copies of each.
        copies = self._parts // math.gcd(self._parts, key_LHD.size(1))
        query_PHD, key_PHD, value_PHD = (
            self._all_positions(x)
            for x in (query_LHD, key_LHD.repeat_interleave(copies, 1), value_LHD.repeat_interleave(copies, 1))
        )
        attended_PHD = self._attend(query_PHD, key_PHD, value_PHD, packed_seq_params)
        return all_to_all_hp2sp(attended_PHD, group=backend.context_parallel_group())

    def _all_positions(self, vectors_LHD: Tensor) -> Tensor:
        """All positions of this rank's share of the heads."""
        _, num_heads, width = vectors_LHD.shape
        vectors_PHD = all_to_all_sp2hp(vectors_LHD.flatten(1), group=backend.context_parallel_group())
        return vectors_PHD.view(-1, num_heads // self._parts, width)

    def _attend(
        self, query_PHD: Tensor, key_PHD: Tensor, value_PHD: Tensor, packed_seq_params: PackedSeqParams
    ) -> Tensor:
        if query_PHD.is_cuda and query_PHD.dtype in (torch.bfloat16, torch.float16):
            attended_PHD = self.flash(query_PHD, key_PHD, value_PHD, packed_seq_params)
        else:
            attended_PHD = self.sample_by_sample(query_PHD, key_PHD, value_PHD, packed_seq_params)
        return attended_PHD.reshape(query_PHD.shape[0], -1)

    def flash(
        self, query_PHD: Tensor, key_PHD: Tensor, value_PHD: Tensor, packing: PackedSeqParams
    ) -> Tensor:
        attended_PHD = varlen_attn(
            query_PHD,
            key_PHD,
            value_PHD,
            packing.cu_seqlens_q,
            packing.cu_seqlens_kv,
            packing.max_seqlen_q,
            packing.max_seqlen_kv,
            scale=self.scale,
            window_size=(-1, 0),  # any distance back, none ahead
            enable_gqa=query_PHD.size(1) != key_PHD.size(1),
        )
        assert isinstance(attended_PHD, Tensor), "a tuple only where the log-sum-exp is returned too"
        return attended_PHD

    def sample_by_sample(
        self, query_PHD: Tensor, key_PHD: Tensor, value_PHD: Tensor, packing: PackedSeqParams
    ) -> Tensor:
        boundaries = packing.cu_seqlens_q.tolist()
        query_HPD, key_HPD, value_HPD = (x.transpose(0, 1) for x in (query_PHD, key_PHD, value_PHD))
        attended = [
            F.scaled_dot_product_attention(
                query_HPD[None, :, start:stop],
                key_HPD[None, :, start:stop],
                value_HPD[None, :, start:stop],
                is_causal=True,
                scale=self.scale,
                enable_gqa=query_PHD.size(1) != key_PHD.size(1),
            )
            for start, stop in pairwise(boundaries)
        ]
        return torch.cat(attended, dim=2)[0].transpose(0, 1)


class RotaryAttention(PackedAttention):
    """The same after turning queries and keys by their positions, which Megatron is told not to do."""

    def forward(
        self,
        query_LHD: Tensor,
        key_LHD: Tensor,
        value_LHD: Tensor,
        attention_mask: None,
        packed_seq_params: PackedSeqParams,
        **_unused: Any,
    ) -> Tensor:
        assert isinstance(packed_seq_params, Packing)
        cosines_L1D, sines_L1D = packed_seq_params.cosines_L1D, packed_seq_params.sines_L1D
        assert cosines_L1D is not None
        assert sines_L1D is not None
        query_LHD, key_LHD = (rotated(x, cosines_L1D, sines_L1D) for x in (query_LHD, key_LHD))
        return super().forward(query_LHD, key_LHD, value_LHD, attention_mask, packed_seq_params)
