"""The kernels that only a GPU has, against plain arithmetic in fp32: variable-length attention, and products with another type of result.

Both sides get the same inputs, rounded to bf16. The reference computes attention in chunks of queries, so that it needs no array of
positions x positions. A deviation is the norm of the difference over the norm of the reference.

Shape suffixes: P positions of all samples, T positions of one sample, C queries of a chunk, H heads, D width of a head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from benchmarks.gpu_check.steps import DeviceKind, Findings
from trainer.learner import backend
from trainer.learner.architecture import Architecture
from trainer.learner.attention import PackedAttention
from trainer.learner.config import LearnerConfig
from trainer.learner.logprobs import _add_product, _scaled_logits
from trainer.learner.model import transformer_config

LENGTHS: dict[DeviceKind, tuple[int, ...]] = {"cuda": (32_000, 700, 1, 300), "cpu": (300, 70, 1, 30)}
CHUNK = 500  # queries
NUM_HEADS, NUM_KEY_HEADS, HEAD_WIDTH = 8, 2, 128
WINDOW = 128

OUTPUT_BOUND = 0.01
"""bf16 has eight bits: a rounded number is off by 0.17 % in the mean, and attention rounds twice. A wrong window is off by far more."""

GRADIENT_BOUND = 0.02
"""The backward pass computes the probabilities again, and rounds them and their gradients once more."""

PRODUCT_BOUND = 2e-5
"""Products of bf16 are exact in fp32, so only the order of the sum differs. A result that passed through bf16 is off by 1.7e-3."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    window: int | None = None
    has_sinks: bool = False


CASES = (
    Case("grouped heads"),
    Case(f"a window of {WINDOW}", WINDOW),
    Case("sinks", None, has_sinks=True),
    Case(f"sinks and a window of {WINDOW}", WINDOW, has_sinks=True),
)


def check(device: DeviceKind) -> Findings:
    found = Findings.none()
    backend.join()
    backend.lay_out(tensor_parallel=1, pipeline_parallel=1)
    lengths = LENGTHS[device]
    found.numbers["positions of the longest sample"] = max(lengths)
    for case in CASES:
        for name, deviation in attention_deviations(case, lengths).items():
            bound = OUTPUT_BOUND if name == "output" else GRADIENT_BOUND
            found.at_most(f"attention with {case.name}, {name}", deviation, bound)
    for name, deviation in product_deviations(rows=1024, width=4096 if device == "cuda" else 256).items():
        found.at_most(name, deviation, PRODUCT_BOUND)
    return found


def attention_deviations(case: Case, lengths: tuple[int, ...]) -> dict[str, float]:
    """How far the learner's attention in bf16 is from `reference`: its output, and each gradient."""
    generator = torch.Generator().manual_seed(len(lengths))
    num_positions = sum(lengths)
    query_PHD = _random((num_positions, NUM_HEADS, HEAD_WIDTH), generator).requires_grad_()
    key_PHD = _random((num_positions, NUM_KEY_HEADS, HEAD_WIDTH), generator).requires_grad_()
    # As in a layer, values are a view of what one matrix gives for queries, keys and values: no two positions are side by side.
    joint = _random((num_positions, NUM_KEY_HEADS, 3 * HEAD_WIDTH), generator).requires_grad_()
    value_PHD = joint[..., 2 * HEAD_WIDTH :]
    module, inputs = _attention(case), [query_PHD, key_PHD, value_PHD]
    if module.sinks is not None:
        with torch.no_grad():
            module.sinks.copy_(_random((NUM_HEADS,), generator))
        inputs.append(module.sinks)
    weights_PHD = _random(query_PHD.shape, generator)
    boundaries = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    with backend.device_scope():
        attended_PHD = module._attend(query_PHD, key_PHD, value_PHD, _packing(boundaries)).view_as(query_PHD)
    found = [attended_PHD, *torch.autograd.grad((attended_PHD * weights_PHD).sum(), inputs)]
    expected = reference(inputs, weights_PHD, boundaries.tolist(), module.scale, case.window)
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values", "gradient of sinks")
    return {name: _deviation(*pair) for name, *pair in zip(names, found, expected, strict=False)}


def reference(
    inputs: list[Tensor], weights_PHD: Tensor, boundaries: list[int], scale: float, window: int | None
) -> list[Tensor]:
    """Attention in fp32 of queries, keys and values, and of sinks if there is a fourth input: the output, and the gradients of its sum
    weighted with `weights_PHD`.
    """
    wide = [one.detach().float().requires_grad_() for one in inputs]
    attended_PHD = torch.zeros_like(wide[0])
    totals = [torch.zeros_like(one) for one in wide]
    for rows, keys in _chunks(boundaries, window):
        chunk_CHD = _attend_chunk(wide, rows, keys, scale, window)
        attended_PHD[rows] = chunk_CHD.detach()
        gradients = torch.autograd.grad((chunk_CHD * weights_PHD[rows].float()).sum(), wide)
        for total, gradient in zip(totals, gradients, strict=True):
            total.add_(gradient)
    return [attended_PHD, *totals]


def _chunks(boundaries: list[int], window: int | None) -> Iterator[tuple[slice, slice]]:
    """Queries, and the keys that they may attend to."""
    for first, end in pairwise(boundaries):
        for start in range(first, end, CHUNK):
            stop = min(start + CHUNK, end)
            yield slice(start, stop), slice(first if window is None else max(first, start - window), stop)


def _attend_chunk(wide: list[Tensor], rows: slice, keys: slice, scale: float, window: int | None) -> Tensor:
    query_CHD, copies = wide[0][rows], wide[0].size(1) // wide[1].size(1)
    key_THD, value_THD = (one[keys].repeat_interleave(copies, 1) for one in wide[1:3])
    logits_HCT = torch.einsum("chd,thd->hct", query_CHD, key_THD) * scale
    places = (torch.arange(span.start, span.stop, device=query_CHD.device) for span in (rows, keys))
    query_places, key_places = places
    back_CT = query_places[:, None] - key_places[None]
    hidden_CT = (back_CT < 0) if window is None else (back_CT < 0) | (back_CT >= window)
    logits_HCT = logits_HCT.masked_fill(hidden_CT, -torch.inf)
    if len(wide) == 4:
        column_HC1 = wide[3][:, None, None].expand(-1, logits_HCT.size(1), 1)
        logits_HCT = torch.cat([logits_HCT, column_HC1], dim=-1)
    weights_HCT = logits_HCT.softmax(-1)[..., : key_THD.size(0)]
    return torch.einsum("hct,thd->chd", weights_HCT, value_THD)


def product_deviations(*, rows: int, width: int) -> dict[str, float]:
    """How far products of bf16 whose result is in fp32 are from products of the same numbers in fp32."""
    generator = torch.Generator().manual_seed(rows)
    hidden_CE, weight_VE = (_random((size, width), generator) for size in (rows, 2 * rows))
    gradient_CV = _random((rows, 2 * rows), generator)
    total_VE = _random((2 * rows, width), generator).float()
    expected_VE = total_VE + gradient_CV.float().T @ hidden_CE.float()
    _add_product(total_VE, gradient_CV, hidden_CE)
    logits_CV = _scaled_logits(hidden_CE, weight_VE, 1.0, fp32_logits=True)
    return {
        "addmm of bf16 into fp32": _deviation(total_VE, expected_VE),
        "mm of bf16 with a result in fp32": _deviation(logits_CV, hidden_CE.float() @ weight_VE.float().T),
    }


def _attention(case: Case) -> PackedAttention:
    architecture = Architecture(
        family="qwen3",
        num_layers=1,
        width=NUM_HEADS * HEAD_WIDTH,
        mlp_width=64,
        num_heads=NUM_HEADS,
        num_key_value_heads=NUM_KEY_HEADS,
        head_width=HEAD_WIDTH,
        vocab_size=64,
        max_positions=65536,
        norm_eps=1e-6,
        rope_theta=1e6,
        tied=False,
    )
    shape = transformer_config(architecture, LearnerConfig(lr=1e-6, micro_batch_tokens=1024, dtype="bf16"))
    module = PackedAttention(shape, 1, AttnMaskType.causal, "self")
    module.window = case.window
    if case.has_sinks:
        module.sinks = nn.Parameter(torch.zeros(NUM_HEADS, dtype=torch.bfloat16, device=backend.device()))
    return module


def _packing(boundaries: npt.NDArray[np.int32]) -> PackedSeqParams:
    on_device, longest = torch.from_numpy(boundaries).to(backend.device()), int(np.diff(boundaries).max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=on_device,
        cu_seqlens_kv=on_device,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).bfloat16().to(backend.device())


def _deviation(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().float() - expected).norm() / expected.norm())
