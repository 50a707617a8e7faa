"""The call of the GPU's attention kernel, checked on any machine: a reference that reads the kernel's documented arguments stands in its
place, and must attend as the CPU's path does.
"""

import inspect
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tests.trainer.learner.tiny import config
from trainer.learner import attention
from trainer.learner.architecture import Architecture
from trainer.learner.attention import PackedAttention
from trainer.learner.model import transformer_config

LENGTHS = (5, 1, 9, 3)
DOCUMENTED = inspect.signature(varlen_attn)


def reference(*arguments: Any, **options: Any) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` by its documentation: sample by sample, scores in full, the window as a mask."""
    bound = DOCUMENTED.bind(*arguments, **options)
    bound.apply_defaults()
    of = bound.arguments
    query, key, value = of["query"], of["key"], of["value"]
    assert of["cu_seq_q"].dtype == of["cu_seq_k"].dtype == torch.int32
    assert of["enable_gqa"] == (query.size(1) != key.size(1))
    scale = 1 / math.sqrt(query.size(2)) if of["scale"] is None else of["scale"]
    spans_q, spans_k = (list(pairwise(of[name].tolist())) for name in ("cu_seq_q", "cu_seq_k"))
    assert max(stop - start for start, stop in spans_q) <= of["max_q"]
    assert max(stop - start for start, stop in spans_k) <= of["max_k"]
    attended = [
        attend(query[slice(*q)], key[slice(*k)], value[slice(*k)], scale, of["window_size"])
        for q, k in zip(spans_q, spans_k, strict=True)
    ]
    return torch.cat(attended)


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: tuple[int, int]) -> Tensor:
    """One sequence. A window of (left, right) hides keys further away; -1 is without limit."""
    repeats = query.size(1) // key.size(1)
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(repeats, 1)) * scale
    distance = torch.arange(len(query))[:, None] - torch.arange(len(key))[None]
    left, right = window
    hidden = (distance > left if left >= 0 else torch.zeros_like(distance, dtype=torch.bool)) | (
        -distance > right if right >= 0 else torch.zeros_like(distance, dtype=torch.bool)
    )
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(repeats, 1))


@pytest.mark.parametrize("num_key_value_heads", [4, 2])
@pytest.mark.parametrize("scale", [None, 0.4])
def test_the_gpu_kernel_is_called_so_that_it_attends_as_the_cpu_does(
    monkeypatch: pytest.MonkeyPatch, num_key_value_heads: int, scale: float | None
) -> None:
    """A call without causality, with another scale, or with wrong lengths would show here."""
    monkeypatch.setattr(attention, "varlen_attn", reference)
    module, packing = packed_attention(num_key_value_heads, scale), packed()
    torch.manual_seed(0)
    query = torch.randn(sum(LENGTHS), 4, 8)
    key, value = (torch.randn(sum(LENGTHS), num_key_value_heads, 8) for _ in "kv")
    on_gpu = module.flash(query, key, value, packing)
    on_cpu = module.sample_by_sample(query, key, value, packing)
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("broken", [{"window_size": (-1, -1)}, {"scale": None}, {"window_size": (3, 0)}])
def test_the_reference_tells_a_wrong_call_from_the_right_one(
    monkeypatch: pytest.MonkeyPatch, broken: dict[str, Any]
) -> None:
    monkeypatch.setattr(
        attention, "varlen_attn", lambda *given, **options: reference(*given, **options | broken)
    )
    module, packing = packed_attention(2, 0.4), packed()
    torch.manual_seed(0)
    query, key, value = torch.randn(18, 4, 8), torch.randn(18, 2, 8), torch.randn(18, 2, 8)
    wrong = module.flash(query, key, value, packing)
    assert not torch.allclose(wrong, module.sample_by_sample(query, key, value, packing), atol=1e-3)


def packed_attention(num_key_value_heads: int, scale: float | None) -> PackedAttention:
    shape = Architecture(
        family="qwen3",
        num_layers=1,
        width=32,
        mlp_width=64,
        num_heads=4,
        num_key_value_heads=num_key_value_heads,
        head_width=8,
        vocab_size=64,
        max_positions=64,
        norm_eps=1e-6,
        rope_theta=1e4,
        tied=False,
    )
    return PackedAttention(
        transformer_config(shape, config()), 1, AttnMaskType.causal, "self", softmax_scale=scale
    )


def packed() -> PackedSeqParams:
    boundaries = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
    )
