"""The call of the GPU's attention kernel, checked on any machine: a reference that reads the kernel's documented arguments stands in its
place, and must attend as the CPU's path does.
"""

import inspect
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
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
    weights = hidden_logits(query, key, scale, window).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(query.size(1) // key.size(1), 1))


def hidden_logits(query: Tensor, key: Tensor, scale: float, window: tuple[int, int]) -> Tensor:
    repeats = query.size(1) // key.size(1)
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(repeats, 1)) * scale
    distance = torch.arange(len(query))[:, None] - torch.arange(len(key))[None]
    left, right = window
    hidden = (distance > left if left >= 0 else torch.zeros_like(distance, dtype=torch.bool)) | (
        -distance > right if right >= 0 else torch.zeros_like(distance, dtype=torch.bool)
    )
    return scores.masked_fill(hidden, -torch.inf)


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


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries_q: Tensor,
    boundaries_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    *,
    return_debug_mask: bool,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:
    """`aten::_flash_attention_forward` by its schema: the output, and the log-sum-exp of heads x positions."""
    assert torch.equal(boundaries_q, boundaries_k)
    assert max_q == max_k == max(LENGTHS)
    assert (dropout, is_causal, return_debug_mask) == (0.0, True, False)
    window = (window_size_left, window_size_right)
    logits = [
        hidden_logits(query[slice(*span)], key[slice(*span)], scale, window)
        for span in pairwise(boundaries_q.tolist())
    ]
    spread = value.repeat_interleave(query.size(1) // key.size(1), 1)
    attended = [
        torch.einsum("hqk,khd->qhd", one.softmax(-1), spread[slice(*span)])
        for one, span in zip(logits, pairwise(boundaries_q.tolist()), strict=True)
    ]
    empty = torch.empty(0)
    return torch.cat(attended), torch.cat([one.logsumexp(-1) for one in logits], dim=1), empty, empty, empty


def flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    sums: Tensor,
    boundaries_q: Tensor,
    boundaries_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:
    """`aten::_flash_attention_backward` as flash attention computes it, from output and log-sum-exp (arXiv 2307.08691, section 3)."""
    assert gradient.is_contiguous()
    repeats, window = query.size(1) // key.size(1), (window_size_left, window_size_right)
    of_query, of_key, of_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for start, stop in pairwise(boundaries_q.tolist()):
        rows = slice(start, stop)
        keys, values = (x[rows].repeat_interleave(repeats, 1) for x in (key, value))
        weights = (hidden_logits(query[rows], key[rows], scale, window) - sums[:, rows, None]).exp()
        product = (gradient[rows] * attended[rows]).sum(-1).T[..., None]
        of_logits = weights * (torch.einsum("qhd,khd->hqk", gradient[rows], values) - product)
        of_query[rows] = torch.einsum("hqk,khd->qhd", of_logits, keys) * scale
        per_head = torch.einsum("hqk,qhd->khd", of_logits, query[rows]) * scale
        of_key[rows] = per_head.unflatten(1, (-1, repeats)).sum(2)
        of_value[rows] = (
            torch.einsum("hqk,qhd->khd", weights, gradient[rows]).unflatten(1, (-1, repeats)).sum(2)
        )
    return of_query, of_key, of_value


@pytest.mark.parametrize("window", [None, 3])
def test_the_gpu_kernel_gives_outputs_and_gradients_with_sinks(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    monkeypatch.setattr(attention, "_flash_forward", flash_forward)
    monkeypatch.setattr(attention, "_flash_backward", flash_backward)
    monkeypatch.setattr(attention.parallel_state, "get_context_parallel_rank", lambda: 0)
    module, packing = packed_attention(2, 0.4), packed()
    torch.manual_seed(0)
    module.window, module.sinks = window, torch.nn.Parameter(torch.randn(4))
    query = torch.randn(sum(LENGTHS), 4, 8)
    key, value = (torch.randn(sum(LENGTHS), 2, 8) for _ in "kv")
    weights = torch.randn(sum(LENGTHS), 4, 8)
    outcomes = []
    for attend_all in (module.flash, module.sample_by_sample):
        inputs = [x.clone().requires_grad_() for x in (query, key, value)]
        attended = attend_all(*inputs, packing)
        of_inputs = torch.autograd.grad((attended * weights).sum(), [*inputs, module.sinks])
        outcomes.append((attended.detach(), *of_inputs))
    for on_gpu, on_cpu in zip(*outcomes, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 3, 20])
def test_the_gpu_kernel_is_called_with_the_window(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(attention, "varlen_attn", reference)
    module, packing = packed_attention(2, None), packed()
    torch.manual_seed(0)
    module.window = window
    query = torch.randn(sum(LENGTHS), 4, 8)
    key, value = (torch.randn(sum(LENGTHS), 2, 8) for _ in "kv")
    on_gpu, on_cpu = (one(query, key, value, packing) for one in (module.flash, module.sample_by_sample))
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 128])
def test_the_cpu_attends_over_a_sample_of_32000_positions_as_exact_arithmetic_does(
    monkeypatch: pytest.MonkeyPatch, window: int | None, has_sinks: bool
) -> None:
    """Outputs and gradients against the formula in fp64 at positions drawn by chance. A single array of 32,000 x 32,000 logits for each
    head would not fit in this process's limit of memory.
    """
    monkeypatch.setattr(attention.parallel_state, "get_context_parallel_rank", lambda: 0)
    num_positions, drawn = 32_000, [0, 127, 128, 1023, 1024, 4100, 20_000, 31_743, 31_999]
    module = packed_attention(2, None)
    torch.manual_seed(0)
    module.window = window
    module.sinks = torch.nn.Parameter(torch.randn(4)) if has_sinks else None
    inputs = [torch.randn(num_positions, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    weights = torch.randn(len(drawn), 4, 8)
    leaves = inputs if module.sinks is None else [*inputs, module.sinks]
    with limited_memory(more_bytes=6 << 30):
        attended = module.sample_by_sample(*inputs, packed((num_positions,)))[drawn]
        found = torch.autograd.grad((attended * weights).sum(), leaves)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = attended_exactly(exact_leaves, drawn, window)
    expected = torch.autograd.grad((exact * weights).sum(), exact_leaves)
    torch.testing.assert_close(attended.double(), exact, rtol=0, atol=1e-5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5)


@contextmanager
def limited_memory(more_bytes: int) -> Iterator[None]:
    """Lets this process have this much more address space than it has now."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def attended_exactly(leaves: list[Tensor], drawn: list[int], window: int | None) -> Tensor:
    """The attended values of the drawn positions of one sample, from queries, keys, values and, where they are given, sinks."""
    query, key, value, *sinks = leaves
    rows = []
    for position in drawn:
        seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
        keys, values = (x[seen].repeat_interleave(2, 1) for x in (key, value))
        logits = torch.einsum("hd,khd->hk", query[position], keys) / math.sqrt(query.size(2))
        if sinks:
            logits = torch.cat([logits, sinks[0][:, None]], dim=1)
        rows.append(torch.einsum("hk,khd->hd", logits.softmax(1)[:, : len(keys)], values))
    return torch.stack(rows)


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


def packed(lengths: tuple[int, ...] = LENGTHS) -> PackedSeqParams:
    boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
