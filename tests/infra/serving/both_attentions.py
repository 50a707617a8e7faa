"""Computes random batches by SGLang's own attention for the CPU and by ours, and prints how far apart the outputs are, by case.

It needs torch and all of SGLang, so it runs in a process of its own, with the stand-ins of `infra/serving/cpu_shim`.
"""

import importlib
import json
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

NUM_SLOTS, CONTEXT, HEAD_SIZE = 1000, 128, 16
LENGTHS = {"even": [40, 64, 51, 64], "one long": [100, 3, 2, 5], "alone": [77]}
HEADS = {"grouped": (9, 3), "as many": (4, 4), "one key head": (8, 1)}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WINDOWS = {"all": None, "window": 16}


class Batch(NamedTuple):
    k_cache: Tensor
    v_cache: Tensor
    req_to_token: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor


def batch_of(lengths: list[int], num_key_heads: int, dtype: torch.dtype) -> Batch:
    """Random keys at scattered slots. Slot 0, which the table names behind the end of a request, holds no number."""
    keys, values = (torch.randn(NUM_SLOTS, num_key_heads, HEAD_SIZE).to(dtype) for _ in range(2))
    keys[0], values[0] = float("nan"), float("inf")
    table = torch.zeros(8, CONTEXT, dtype=torch.int32)
    rows = torch.randperm(8)[: len(lengths)]
    for row, length in zip(rows, lengths, strict=True):
        table[row, :length] = torch.randperm(NUM_SLOTS - 1)[:length].int() + 1
    return Batch(keys, values, table, rows, torch.tensor(lengths))


def differences(batch: Batch, num_heads: int, window: int | None) -> tuple[float, float]:
    """The largest of a decode step, and of prompts of which none, a part or all but a token is cached."""
    ours, theirs = object.__new__(type(OURS)), object.__new__(TorchNativeAttnBackend)
    dtype, num_key_heads = batch.k_cache.dtype, batch.k_cache.shape[1]
    options: dict[str, Any] = {
        "scaling": HEAD_SIZE**-0.5,
        "enable_gqa": num_heads != num_key_heads,
        "is_cross_attn": False,
        "sliding_window_size": window,
    }
    query = torch.randn(len(batch.seq_lens), num_heads, HEAD_SIZE).to(dtype)
    steps = [
        backend._run_sdpa_forward_decode(
            query, torch.empty_like(query), *batch, None, causal=False, **options
        )
        for backend in (ours, theirs)
    ]
    cached = torch.tensor([0, 1, 2, 4])[: len(batch.seq_lens)] * batch.seq_lens // 4
    cached = torch.minimum(cached, batch.seq_lens - 1)
    new = batch.seq_lens - cached
    query = torch.randn(int(new.sum()), num_heads, HEAD_SIZE).to(dtype)
    prompts = [
        backend._run_sdpa_forward_extend(
            query, torch.empty_like(query), *batch, cached, new, None, causal=True, **options
        )
        for backend in (ours, theirs)
    ]
    return apart(*steps), apart(*prompts)


def apart(first: Tensor, second: Tensor) -> float:
    return float((first.float() - second.float()).abs().max())


if __name__ == "__main__":
    torch.manual_seed(0)
    importlib.import_module("batched_attention")
    runner = type("Runner", (), {"device": "cpu", "req_to_token_pool": None, "token_to_kv_pool": None})
    OURS = ATTENTION_BACKENDS["torch_native"](runner)
    assert isinstance(OURS, TorchNativeAttnBackend)
    print(
        json.dumps(
            {
                f"{lengths}, {heads}, {dtype}, {window}": [
                    type(OURS).__name__,
                    *differences(
                        batch_of(LENGTHS[lengths], HEADS[heads][1], TYPES[dtype]),
                        HEADS[heads][0],
                        WINDOWS[window],
                    ),
                ]
                for lengths in LENGTHS
                for heads in HEADS
                for dtype in TYPES
                for window in WINDOWS
            }
        )
    )
