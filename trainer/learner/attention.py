"""Attention inside each sample of a packed micro-batch. Replaces Megatron's own, which rejects packed input without
TransformerEngine.

On a GPU in half precision, one variable-length flash kernel runs over the whole pack; otherwise scaled-dot-product attention
runs sample by sample. Either way a token attends to its own sample only, up to itself.

Shape suffixes: P positions of the micro-batch, H heads of this rank, D width of a head, S samples.
"""

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn


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
        assert config.context_parallel_size == 1, "context parallelism would split a sample"
        assert config.attention_dropout == 0.0
        assert config.kv_channels is not None
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query_PHD: Tensor,
        key_PHD: Tensor,
        value_PHD: Tensor,
        attention_mask: None,
        packed_seq_params: PackedSeqParams,
        **_unused: Any,
    ) -> Tensor:
        """Attended values, heads side by side: P x (H * D). Keys and values may have fewer heads."""
        if query_PHD.is_cuda and query_PHD.dtype in (torch.bfloat16, torch.float16):
            attended_PHD = self._flash(query_PHD, key_PHD, value_PHD, packed_seq_params)
        else:
            attended_PHD = self._sample_by_sample(query_PHD, key_PHD, value_PHD, packed_seq_params)
        return attended_PHD.reshape(query_PHD.shape[0], -1)

    def _flash(
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

    def _sample_by_sample(
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
