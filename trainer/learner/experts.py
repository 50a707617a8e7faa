"""The experts of one process, and how rows are multiplied by the matrices of all of them. `dispatch.py` brings the rows.

On a GPU in bf16 the experts of a process are one product (torch's `grouped_mm`), whose groups are given by numbers on the GPU, so that the
host does not wait for them. Elsewhere each expert has a product of its own. Both give the same numbers, to rounding.

Each expert keeps its own parameters, by Megatron's names. A grouped product takes one tensor, so they are copied together for it, and once
more in the backward pass, rather than kept together: kept, they would be a second copy of all experts of all layers.

Shape suffixes: R rows, one for each choice of an expert by a position, E width of the model, G experts of this process.
"""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from trainer.learner.lora import SUFFIX, of_experts

ROW_BYTES = 16
"""Rows of the operands of a grouped product begin at multiples of this."""


class Products(Protocol):
    """Products of rows that are sorted by expert."""

    def by_weights(self, rows: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Each row times the matrix of its expert, of outputs x inputs."""
        ...

    def spread(self, biases: Sequence[Tensor], shares_R1: Tensor | None = None) -> Tensor:
        """The bias of its expert for each row, times the share of the row if there are any."""
        ...


def products(rows: Tensor, counts_G: Tensor, widths: Sequence[int]) -> Products:
    """The form in which this device multiplies such rows by matrices of these widths. `counts_G` are the rows of each expert."""
    is_aligned = all(width * rows.itemsize % ROW_BYTES == 0 for width in widths)
    if is_aligned and len(rows) and has_grouped_products(rows):
        return GroupedProducts(counts_G, len(rows))
    return LoopedProducts(counts_G.tolist())


def has_grouped_products(rows: Tensor) -> bool:
    """Whether the device has a kernel for them; where torch only has a loop of its own, it is no faster than ours."""
    return (
        rows.is_cuda
        and rows.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    )


class LoopedProducts:
    """One product for each expert."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts

    def by_weights(self, rows: Tensor, weights: Sequence[Tensor]) -> Tensor:
        parts = rows.split(self._counts)
        return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])

    def spread(self, biases: Sequence[Tensor], shares_R1: Tensor | None = None) -> Tensor:
        if shares_R1 is None:
            parts = [bias.expand(count, -1) for bias, count in zip(biases, self._counts, strict=True)]
        else:
            parts = [bias * part for bias, part in zip(biases, shares_R1.split(self._counts), strict=True)]
        return torch.cat(parts)


class GroupedProducts:
    """One product for all experts. The host does not learn how many rows each of them has."""

    def __init__(self, counts_G: Tensor, num_rows: int) -> None:
        self._ends_G = counts_G.cumsum(0, dtype=torch.int32)
        self._num_rows = num_rows

    def by_weights(self, rows: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return cast(Tensor, _Product.apply(rows, self._ends_G, *weights))

    def spread(self, biases: Sequence[Tensor], shares_R1: Tensor | None = None) -> Tensor:
        return cast(Tensor, _Spread.apply(shares_R1, self._ends_G, self._num_rows, *biases))


class _Product(torch.autograd.Function):
    """Its own backward pass, because torch's would keep the tensor into which the weights were copied."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends_G: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends_G, *weights)
        return F.grouped_mm(rows, torch.stack(weights).transpose(1, 2), offs=ends_G)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends_G, *weights = ctx.saved_tensors
        gradient, of_rows = gradient.contiguous(), None
        of_weights: Sequence[Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[0]:
            of_rows = F.grouped_mm(gradient, torch.stack(weights), offs=ends_G)
        if any(ctx.needs_input_grad[2:]):
            of_weights = F.grouped_mm(gradient.T, rows, offs=ends_G).unbind()
        return of_rows, None, *of_weights


class _Spread(torch.autograd.Function):
    """Its own backward pass, because torch's would add up the rows in the order in which a GPU's threads finish, and round each time."""

    @staticmethod
    def forward(ctx: Any, shares_R1: Tensor | None, ends_G: Tensor, num_rows: int, *biases: Tensor) -> Tensor:
        of_rows = torch.searchsorted(ends_G, torch.arange(num_rows, device=ends_G.device), right=True)
        ctx.save_for_backward(shares_R1, ends_G, of_rows, *biases)
        spread = torch.stack(biases).index_select(0, of_rows)
        return spread if shares_R1 is None else spread * shares_R1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        shares_R1, ends_G, of_rows, *biases = ctx.saved_tensors
        weighted, of_shares = gradient, None
        if shares_R1 is not None:
            weighted = (gradient * shares_R1).to(biases[0].dtype)
            of_shares = (gradient * torch.stack(biases).index_select(0, of_rows)).sum(1, keepdim=True)
        ones = weighted.new_ones(len(weighted), ROW_BYTES // weighted.itemsize)
        sums = F.grouped_mm(ones.T, weighted.contiguous(), offs=ends_G)
        return of_shares, None, None, *sums[:, 0].unbind()


class LocalExperts(SequentialMLP):
    """The experts of this process, with Megatron's parameters and their checkpoints."""

    def forward(self, rows_RE: Tensor, counts_G: Tensor, shares_R: Tensor) -> tuple[Tensor, None]:
        """The result of each row, times its share in the result of its position. Rows are sorted by expert."""
        config = self.config
        inner = config.moe_ffn_hidden_size
        assert inner is not None
        first, second = self._layers("linear_fc1"), self._layers("linear_fc2")
        adapters = [self._layers(name + SUFFIX) for name in ("linear_fc1", "linear_fc2")]
        form = products(
            rows_RE, counts_G, (config.hidden_size, inner, *(one[0].rank for one in adapters if one))
        )
        joint = form.by_weights(rows_RE, [layer.weight for layer in first])
        if adapters[0]:
            joint = joint + of_experts(rows_RE, adapters[0], form.by_weights)
        if config.add_bias_linear:
            joint = joint + form.spread([layer.bias for layer in first])
        shares = shares_R[:, None]
        weighted = (self._gated(joint) * shares).to(rows_RE.dtype)
        results = form.by_weights(weighted, [layer.weight for layer in second])
        if adapters[1]:
            results += of_experts(weighted, adapters[1], form.by_weights)
        if config.add_bias_linear:
            results += form.spread([layer.bias for layer in second], shares)
        return results, None

    def _layers(self, name: str) -> list[Any]:
        """The layer of that name of each expert; empty if they have none."""
        experts = cast(Any, self.local_experts)
        return [getattr(expert, name) for expert in experts] if hasattr(experts[0], name) else []

    def _gated(self, joint: Tensor) -> Tensor:
        gate, up = joint.chunk(2, dim=-1)
        limit = self.config.activation_func_clamp_value
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return self.config.activation_func(gate) * (up + self.config.glu_linear_offset)
