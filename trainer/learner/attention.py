"""Attention inside each sample of a packed micro-batch, and which positions of a micro-batch a rank works on. Replaces Megatron's own
attention, which rejects packed input without TransformerEngine.

On a GPU in half precision, one variable-length flash kernel runs over the whole pack; otherwise scaled-dot-product attention
runs sample by sample. Either way a token attends to its own sample only, up to itself.

Positions are rotary, plain or stretched by YaRN or as in Llama 3.1, as transformers does. Megatron's own embedding, for packed input,
waits for the device twice per layer and sample, and keeps two arrays per layer for the backward pass. Here the angles are computed once per
micro-batch.

The context-parallel ranks of a group take consecutive parts of equal size of a micro-batch; with sequence parallelism Megatron divides each
part again among the tensor-parallel ranks. Padding positions are appended so that all parts are equally large. They form a sample of their
own, and are dropped when the parts are joined.

With context parallelism, an all-to-all gives each rank all positions of a part of its heads, the rank computes attention, and an all-to-all
returns the result (Ulysses, arXiv 2309.14509). A sample may be on several ranks, and the load is even whatever the lengths of the samples.

Shape suffixes: L positions of this rank, P positions of the micro-batch (as many without context parallelism), H heads of this
rank, D width of a head.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from trainer.batching.packing import MicroBatch
from trainer.learner import backend
from trainer.learner.architecture import Architecture, Llama3Rope, Yarn
from trainer.learner.config import LearnerConfig

QUERIES_AT_ONCE = 256
"""The number of positions whose logits are in memory at the same time where a sample's attention has a window or sinks and no kernel."""


class Rotary:
    """The frequencies of one model."""

    def __init__(self, architecture: Architecture) -> None:
        width, theta = architecture.rotary_width or architecture.head_width, architecture.rope_theta
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        self._frequencies = 1.0 / theta**exponents
        self._magnitude = 1.0
        self._query_scaling = architecture.query_scaling
        match architecture.rope_scaling:
            case Yarn() as yarn:
                self._frequencies = _yarn(self._frequencies, yarn, width=width, theta=theta)
                self._magnitude = yarn.magnitude
            case Llama3Rope() as rope:
                self._frequencies = _llama3(self._frequencies, rope)
            case None:
                pass

    def angles(self, positions_L: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each position, fp32 of L x 1 x D; of the dimensions that are rotated, where not all are."""
        frequencies = self._frequencies.to(positions_L.device)
        half = positions_L.float()[:, None, None] * frequencies
        whole = torch.cat([half, half], dim=-1)
        return whole.cos() * self._magnitude, whole.sin() * self._magnitude

    def query_scales(self, positions_L: Tensor) -> Tensor | None:
        """The factor of the queries of each position, fp32 of L x 1 x 1; None if the model has none."""
        scaling = self._query_scaling
        if scaling is None:
            return None
        wraps = torch.floor(positions_L / scaling.original_positions)
        return (1 + scaling.beta * torch.log(1 + wraps))[:, None, None]


def rotated(vectors_LHD: Tensor, cosines_L1D: Tensor, sines_L1D: Tensor) -> Tensor:
    """Each vector rotated by the angles of its position, in as many of its first dimensions as there are angles. The computation is in
    fp32, as in engines, and rounds once.
    """
    width = cosines_L1D.shape[-1]
    wide = vectors_LHD[..., :width].float()
    left, right = wide.chunk(2, dim=-1)
    turned = (wide * cosines_L1D + torch.cat([-right, left], dim=-1) * sines_L1D).to(vectors_LHD.dtype)
    return turned if width == vectors_LHD.shape[-1] else torch.cat([turned, vectors_LHD[..., width:]], dim=-1)


def _yarn(frequencies: Tensor, yarn: Yarn, *, width: int, theta: float) -> Tensor:
    """YaRN: the factor slows down slow dimensions, leaves fast ones unchanged, and is mixed in between."""

    def dimension_of(num_turns: float) -> float:
        """The dimension that makes this number of turns over the original length."""
        return width * math.log(yarn.original_positions / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(yarn.beta_fast), dimension_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    dimensions = torch.arange(width // 2, dtype=torch.float32)
    slow = ((dimensions - low) / (high - low if high > low else 0.001)).clamp(0, 1)
    return frequencies / yarn.factor * slow + frequencies * (1 - slow)


def _llama3(frequencies: Tensor, rope: Llama3Rope) -> Tensor:
    """Llama 3.1: wavelengths beyond the original positions are stretched by the factor, short ones are left unchanged, and between
    them the two are mixed.
    """
    wavelengths = 2 * math.pi / frequencies
    longest, shortest = (
        rope.original_positions / factor for factor in (rope.low_freq_factor, rope.high_freq_factor)
    )
    kept = (rope.original_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1 - kept) * frequencies / rope.factor + kept * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, mixed)
    return torch.where(wavelengths < shortest, frequencies, stretched)


@dataclass
class Packing(PackedSeqParams):
    """The limits of the samples in a micro-batch, and the angles of this rank's positions and the factors of its queries."""

    cosines_L1D: Tensor | None = None
    sines_L1D: Tensor | None = None
    query_scales_L11: Tensor | None = None

    @cached_property
    def boundaries(self) -> list[int]:
        """The first position of each sample, and the number of positions, on the host; the device is waited for once."""
        return self.cu_seqlens_q.tolist()


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
        self.window: int | None = None
        self.sinks: nn.Parameter | None = None  # one for each head of this tensor-parallel rank
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
        """Returns the attended values, with heads side by side: L x (H * D). Keys and values may have fewer heads."""
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

    def _sinks(self) -> Tensor | None:
        """Those of the heads that this rank attends with: with context parallelism, a part of the heads of the tensor-parallel rank."""
        if self.sinks is None:
            return None
        return self.sinks.chunk(self._parts)[parallel_state.get_context_parallel_rank()]

    def flash(
        self, query_PHD: Tensor, key_PHD: Tensor, value_PHD: Tensor, packing: PackedSeqParams
    ) -> Tensor:
        # Any distance back, or what is within the window; none ahead.
        window = (-1 if self.window is None else self.window - 1, 0)
        sinks_H = self._sinks()
        if sinks_H is not None:
            return _SinkAttention.apply(query_PHD, key_PHD, value_PHD, sinks_H, packing, self.scale, window)
        attended_PHD = varlen_attn(
            query_PHD,
            key_PHD,
            value_PHD,
            packing.cu_seqlens_q,
            packing.cu_seqlens_kv,
            packing.max_seqlen_q,
            packing.max_seqlen_kv,
            scale=self.scale,
            window_size=window,
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
            self._attend_sample(query_HPD[:, start:stop], key_HPD[:, start:stop], value_HPD[:, start:stop])
            for start, stop in pairwise(boundaries)
        ]
        return torch.cat(attended, dim=1).transpose(0, 1)

    def _attend_sample(self, query_HTD: Tensor, key_HTD: Tensor, value_HTD: Tensor) -> Tensor:
        """Attention within one sample of T positions. With a window or sinks it is computed for `QUERIES_AT_ONCE` positions at a time, each
        of which is computed again in the backward pass, so that no array has T x T numbers.
        """
        num_positions = query_HTD.size(1)
        if self.sinks is None and (self.window is None or self.window >= num_positions):
            return _scaled_dot_product(query_HTD, key_HTD, value_HTD, scale=self.scale)
        if num_positions <= QUERIES_AT_ONCE:
            return self._attend_queries(query_HTD, key_HTD, value_HTD, 0)
        attended = []
        for start in range(0, num_positions, QUERIES_AT_ONCE):
            stop = min(start + QUERIES_AT_ONCE, num_positions)
            first = 0 if self.window is None else max(0, start + 1 - self.window)
            keys, values, queries = key_HTD[:, first:stop], value_HTD[:, first:stop], query_HTD[:, start:stop]
            attended.append(
                checkpoint(
                    self._attend_queries,
                    queries,
                    keys,
                    values,
                    start - first,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
        return torch.cat(attended, dim=1)

    def _attend_queries(self, query_HQD: Tensor, key_HKD: Tensor, value_HKD: Tensor, offset: int) -> Tensor:
        """Attention of Q consecutive positions of a sample to K; the first query has the position of the key number `offset`."""
        num_queries, num_keys, sinks_H = query_HQD.size(1), key_HKD.size(1), self._sinks()
        mask_QK = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query_HQD.device).tril(offset)
        if self.window is not None:
            mask_QK = mask_QK.triu(offset + 1 - self.window)
        if sinks_H is None:
            return _scaled_dot_product(query_HQD, key_HKD, value_HKD, scale=self.scale, mask_QK=mask_QK)
        copies = query_HQD.size(0) // key_HKD.size(0)
        key_HKD, value_HKD = (x.repeat_interleave(copies, 0) for x in (key_HKD, value_HKD))
        logits_HQK = (query_HQD @ key_HKD.transpose(1, 2) * self.scale).masked_fill(~mask_QK, -torch.inf)
        column_HQ1 = sinks_H[:, None, None].expand(-1, num_queries, 1).to(logits_HQK.dtype)
        weights_HQK = torch.cat([logits_HQK, column_HQ1], dim=-1).softmax(-1)[..., :-1]
        return weights_HQK @ value_HKD


def _scaled_dot_product(
    query_HQD: Tensor, key_HKD: Tensor, value_HKD: Tensor, *, scale: float, mask_QK: Tensor | None = None
) -> Tensor:
    """torch's attention, causal where no mask says otherwise."""
    return F.scaled_dot_product_attention(
        query_HQD[None],
        key_HKD[None],
        value_HKD[None],
        attn_mask=mask_QK,
        is_causal=mask_QK is None,
        scale=scale,
        enable_gqa=query_HQD.size(0) != key_HKD.size(0),
    )[0]


class _SinkAttention(torch.autograd.Function):
    """Flash attention in which each head has one more logit, its sink, that takes part in the softmax and has no value (gpt-oss).

    With the output o and the log-sum-exp l of the other logits, and l' = log(exp(l) + exp(sink)), the output is o' = exp(l - l') o. The
    kernel's backward pass uses the log-sum-exp only for the probabilities exp(logit - l), and the output only for its product with the
    gradient g; with l' and o' in their place it therefore gives the gradients of queries, keys and values with the sink. The gradient of
    the sink is the sum over positions of -exp(sink - l') g o'.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_PHD: Tensor,
        key_PHD: Tensor,
        value_PHD: Tensor,
        sinks_H: Tensor,
        packing: PackedSeqParams,
        scale: float,
        window: tuple[int, int],
    ) -> Tensor:
        ctx.lengths = (
            packing.cu_seqlens_q,
            packing.cu_seqlens_kv,
            packing.max_seqlen_q,
            packing.max_seqlen_kv,
        )
        ctx.options = {"scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
        attended_PHD, sums_HP, rng_state, unused, _ = _flash_forward(
            query_PHD, key_PHD, value_PHD, *ctx.lengths, 0.0, True, return_debug_mask=False, **ctx.options
        )
        with_sink_HP = torch.logaddexp(sums_HP, sinks_H.float()[:, None])
        kept_PH1 = (sums_HP - with_sink_HP).exp().T[..., None]
        attended_PHD = (attended_PHD * kept_PH1).to(query_PHD.dtype)
        ctx.save_for_backward(
            query_PHD, key_PHD, value_PHD, sinks_H, attended_PHD, with_sink_HP, rng_state, unused
        )
        return attended_PHD

    @staticmethod
    def backward(ctx: Any, gradient_PHD: Tensor) -> tuple[Tensor | None, ...]:
        query_PHD, key_PHD, value_PHD, sinks_H, attended_PHD, sums_HP, rng_state, unused = ctx.saved_tensors
        of_qkv = _flash_backward(
            gradient_PHD.contiguous(),
            query_PHD,
            key_PHD,
            value_PHD,
            attended_PHD,
            sums_HP,
            *ctx.lengths,
            0.0,
            True,
            rng_state,
            unused,
            **ctx.options,
        )
        products_HP = (gradient_PHD.float() * attended_PHD.float()).sum(-1).T
        of_sinks_H = -((sinks_H.float()[:, None] - sums_HP).exp() * products_HP).sum(1)
        return *of_qkv, of_sinks_H.to(sinks_H.dtype), None, None, None


_flash_forward = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


class RotaryAttention(PackedAttention):
    """Attention after rotating queries and keys by their positions. Megatron is configured not to rotate them."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *args: Any,
        architecture: Architecture,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        layer = layer_number - 1
        self._is_rotary = layer not in architecture.unrotated_layers
        self.window = architecture.window if layer in architecture.windowed_layers else None
        if architecture.sinks:
            num_heads = architecture.num_heads // config.tensor_model_parallel_size
            self.sinks = nn.Parameter(torch.empty(num_heads))
            set_tensor_model_parallel_attributes(self.sinks, is_parallel=True, dim=0, stride=1)

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
        if self._is_rotary:
            query_LHD, key_LHD = (rotated(x, cosines_L1D, sines_L1D) for x in (query_LHD, key_LHD))
        if packed_seq_params.query_scales_L11 is not None:
            query_LHD = query_LHD * packed_seq_params.query_scales_L11.to(query_LHD.dtype)
        return super().forward(query_LHD, key_LHD, value_LHD, attention_mask, packed_seq_params)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The sinks in checkpoints that other layouts can read."""
        assert metadata is not None, "given by checkpoint.py"
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"sinks": 0},
            sharded_offsets,
            tp_group=backend.tensor_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


class OutputGatedAttention(SelfAttention):
    """Megatron's attention with a gate on its result. Megatron's own gate is compiled, which takes a compiler and a minute on a CPU."""

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.reshape(x.shape).sigmoid()


class Positions:
    """Divides and joins arrays over the positions of a micro-batch."""

    def __init__(self, config: LearnerConfig, rotary: Rotary) -> None:
        self._parts = config.context_parallel
        self._multiple = self._parts * (config.tensor_parallel if config.sequence_parallel else 1)
        self._rotary = rotary

    def span(self, num_positions: int) -> slice:
        """This context-parallel rank's slice, which may reach beyond the last position."""
        part = self._padded(num_positions) // self._parts
        start = part * parallel_state.get_context_parallel_rank()
        return slice(start, start + part)

    @property
    def smallest_part(self) -> int:
        """The index of this rank's part among the parts of one micro-batch, over all context-parallel and sequence-parallel ranks."""
        of_tensor = self._multiple // self._parts
        in_part = parallel_state.get_tensor_model_parallel_rank() if of_tensor > 1 else 0
        return parallel_state.get_context_parallel_rank() * of_tensor + in_part

    def smallest_part_size(self, num_positions: int) -> int:
        """The number of positions in each of those parts, including the appended ones."""
        return self._padded(num_positions) // self._multiple

    def mine(self, array_P: npt.NDArray[Any]) -> Tensor:
        """This rank's part, on its device; appended positions have 0."""
        padded = np.zeros((self._padded(len(array_P)), *array_P.shape[1:]), array_P.dtype)
        padded[: len(array_P)] = array_P
        return torch.from_numpy(padded[self.span(len(array_P))]).to(backend.device())

    def joined(self, values_L: Tensor, *, num_positions: int) -> Tensor:
        """The values of all parts, on each of their ranks.

        Each rank computes the same loss from them, so the gradient of its own part is its part of the gradient.
        """
        values_P = gather_from_sequence_parallel_region(
            values_L, tensor_parallel_output_grad=False, group=backend.context_parallel_group()
        )
        return values_P[:num_positions]

    def packing(self, microbatch: MicroBatch) -> Packing:
        """The data about the micro-batch that attention needs."""
        boundaries, padded = microbatch.boundaries, self._padded(microbatch.num_positions)
        if padded > microbatch.num_positions:
            boundaries = np.append(boundaries, np.int32(padded))
        longest = int(np.diff(boundaries).max())
        on_device = torch.from_numpy(boundaries).to(backend.device())
        positions_L = self.mine(microbatch.positions_P)
        cosines_L1D, sines_L1D = self._rotary.angles(positions_L)
        return Packing(
            qkv_format="thd",
            cu_seqlens_q=on_device,
            cu_seqlens_kv=on_device,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            cosines_L1D=cosines_L1D,
            sines_L1D=sines_L1D,
            query_scales_L11=self._rotary.query_scales(positions_L),
        )

    def _padded(self, num_positions: int) -> int:
        return -(-num_positions // self._multiple) * self._multiple
