"""The experts of a mixture in one product against a product for each: `python -m benchmarks.experts [--json] [--short]`.

Forward and backward pass of the experts alone, on rows that are already sorted by expert. A learner on a GPU in bf16 takes the one product;
on a CPU, where torch has a loop in place of the kernel, it takes a product for each, and the comparison says what that costs. Outputs must
agree, or the comparison would be of different work.
"""

import asyncio
import sys
import time
import warnings
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from benchmarks.report import Comparison, compared, main, p50, shuffled
from trainer.learner.experts import GroupedProducts, LoopedProducts, Products, has_grouped_products

GROUPED, LOOPED = "one product", "a product for each expert"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of one process, and the rows of one micro-batch that come to them."""

    name: str
    num_experts: int
    width: int
    inner_width: int
    num_rows: int
    num_rounds: int


SMALL = Shape(
    name="64 experts of 512 x 128, 4,096 rows",
    **{"num_experts": 64, "width": 512, "inner_width": 128, "num_rows": 4096, "num_rounds": 12},
)
SHARE_OF_30B = Shape(
    name="8 experts of Qwen3-30B-A3B, 1,024 rows",
    **{"num_experts": 8, "width": 2048, "inner_width": 768, "num_rows": 1024, "num_rounds": 6},
)
SHORT = msgspec.structs.replace(SMALL, num_experts=8, num_rows=128, num_rounds=1)


def passes(form: Products, rows: Tensor, first: list[Tensor], second: list[Tensor]) -> Tensor:
    """The results of a forward pass, after the backward pass of their sum."""
    for one in (rows, *first, *second):
        one.grad = None
    gates, ups = form.by_weights(rows, first).chunk(2, dim=1)
    results = form.by_weights(torch.nn.functional.silu(gates) * ups, second)
    results.float().sum().backward()
    return results.detach()


def measure(shape: Shape) -> dict[str, list[list[float]]]:
    """Rows per second of CPU, or on a GPU of its time, of each form in each round, in random order. Raises RuntimeError if the results
    differ.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = (
        torch.bfloat16
        if has_grouped_products(torch.empty(0, device=device, dtype=torch.bfloat16))
        else torch.float32
    )

    def made(*sizes: int) -> Tensor:
        return (torch.randn(*sizes, device=device) / sizes[-1] ** 0.5).to(dtype).requires_grad_()

    rows = made(shape.num_rows, shape.width)
    first = [made(2 * shape.inner_width, shape.width) for _ in range(shape.num_experts)]
    second = [made(shape.width, shape.inner_width) for _ in range(shape.num_experts)]
    chosen = torch.randint(0, shape.num_experts, (shape.num_rows,), device=device)
    counts = chosen.bincount(minlength=shape.num_experts)
    forms: dict[str, Callable[[], Products]] = {
        GROUPED: lambda: GroupedProducts(counts, shape.num_rows),
        LOOPED: lambda: LoopedProducts(counts.tolist()),
    }
    found: dict[str, list[list[float]]] = {name: [] for name in forms}
    for number in range(shape.num_rounds + 1):
        results: dict[str, Tensor] = {}
        for name in shuffled(forms):
            began = _now_s()
            results[name] = passes(forms[name](), rows, first, second)
            took_s = _now_s() - began
            if number:  # the first round warms up
                found[name].append([shape.num_rows / took_s])
        difference = float((results[GROUPED] - results[LOOPED]).abs().max() / results[LOOPED].abs().max())
        if difference > TOLERANCE[dtype]:
            raise RuntimeError(f"{shape.name}: results differ by {difference:.1e} of the largest")
    return found


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


async def experts(short: bool) -> list[Comparison]:
    torch.set_num_threads(1)
    rows: list[Comparison] = []
    for shape in (SHORT,) if short else (SMALL, SHARE_OF_30B):
        found = await asyncio.to_thread(measure, shape)
        unit = f"rows per second of {'a GPU' if torch.cuda.is_available() else 'CPU'}, {shape.name}"
        rows.append(compared("experts", found[GROUPED], found[LOOPED], p50, rival_name=LOOPED, unit=unit))
    return rows


if __name__ == "__main__":
    sys.exit(main("experts", __doc__, experts))
