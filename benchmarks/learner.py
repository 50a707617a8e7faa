"""Optimizer steps against bare Megatron and plain transformers: `python -m benchmarks.learner [--json] [--short]`.

Each trains the same random model on the same batches with the same loss, in fp32 where there is no GPU, in a process of its own; one of
them runs at a time. The first losses must agree, or the comparison would be of different work. Trained is a third of the tokens, as in an
episode whose observations are longer than its replies.
"""

import asyncio
import contextlib
import resource
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import learner_methods
from benchmarks.child_process import child
from benchmarks.report import Comparison, compared, main, p50, shuffled

OURS = "ours"
METHODS = {
    OURS: learner_methods.ours,
    "bare Megatron": learner_methods.bare_megatron,
    "transformers": learner_methods.plain_transformers,
}
LOSS_TOLERANCE = 1e-3
MIB = 2**20


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A model, and the batch that it is trained on."""

    name: str
    model: dict[str, Any]  # of its config.json
    num_samples: int
    longest_tokens: int
    num_rounds: int


SMALL = Shape(
    name="8 layers of 256",
    model={
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    num_samples=16,
    longest_tokens=512,
    num_rounds=8,
)
SMOLLM2 = Shape(
    name="the shape of SmolLM2-135M",
    model={
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    num_samples=6,
    longest_tokens=512,
    num_rounds=4,
)
SHORT = msgspec.structs.replace(
    SMALL, model=SMALL.model | {"num_hidden_layers": 2}, num_samples=4, longest_tokens=64, num_rounds=1
)


@dataclass(slots=True)
class Measured:
    """What one method did, by round."""

    losses: list[float] = field(default_factory=list[float])
    tokens_per_s: list[list[float]] = field(default_factory=list[list[float]])
    outside_shares: list[float] = field(default_factory=list[float])  # of a step's time
    peak_bytes: int = 0


def train(parent: Connection, method: str, shape: bytes, directory: str) -> None:
    """Builds the learner in the child, then takes a step whenever one is requested; sends its loss, time and the memory's peak."""
    of = msgspec.msgpack.decode(shape, type=Shape)
    warnings.simplefilter("ignore")  # Megatron's, about optional packages
    before_bytes = _peak_bytes()
    step = METHODS[method](Path(directory), longest_tokens=of.longest_tokens)
    parent.send("ready")
    for number in iter(parent.recv, None):
        batch = learner_methods.make_batch(
            of.num_samples, of.longest_tokens, of.model["vocab_size"], step=number
        )
        taken, took_s = learner_methods.timed(step, batch)
        outside = 1 - taken.phases_s / took_s
        parent.send((taken.loss, batch.num_positions / took_s, outside, _peak_bytes() - before_bytes))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(shape: Shape) -> dict[str, Measured]:
    """Every method takes a step in each round, in random order, after one that is not counted."""
    found = {method: Measured() for method in METHODS}
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        learner_methods.write_model(Path(directory), shape.model)
        pipes = {}
        for method in METHODS:
            started = child(train, method, msgspec.msgpack.encode(shape), directory)
            pipes[method] = stack.enter_context(started)[1]
            pipes[method].recv()
        for number in range(shape.num_rounds + 1):
            for method in shuffled(METHODS):
                pipes[method].send(number + 1)
                loss, tokens_per_s, outside, peak_bytes = pipes[method].recv()
                found[method].losses.append(loss)
                found[method].peak_bytes = peak_bytes
                if number:
                    found[method].tokens_per_s.append([tokens_per_s])
                    found[method].outside_shares.append(outside)
    _check_same_work(found)
    return found


def _check_same_work(found: dict[str, Measured]) -> None:
    """Raises RuntimeError unless all methods saw the same losses."""
    for method, measured in found.items():
        for mine, other in zip(found[OURS].losses, measured.losses, strict=True):
            if abs(mine - other) > LOSS_TOLERANCE:
                raise RuntimeError(f"{method} has losses {measured.losses}, ours {found[OURS].losses}")


def comparisons(shape: Shape, found: dict[str, Measured]) -> Sequence[Comparison]:
    mine, rows = found[OURS], []
    for method in METHODS.keys() - {OURS}:
        rival, of = found[method], f"a step, {shape.name}"
        unit = f"tokens a second of {of}"
        rows.append(
            compared("learner", mine.tokens_per_s, rival.tokens_per_s, p50, rival_name=method, unit=unit)
        )
        sizes = mine.peak_bytes / MIB, rival.peak_bytes / MIB
        rows.append(Comparison("learner", *sizes, method, f"MiB of memory at the peak of {of}"))
    rest = f"% of the time of a step, {shape.name}, outside forward pass, backward pass and optimizer"
    rows.append(Comparison("learner", 100 * p50(mine.outside_shares), 100.0, "the whole step", rest))
    return sorted(rows, key=lambda row: (row.unit, row.rival_name))


async def learner(short: bool) -> list[Comparison]:
    rows: list[Comparison] = []
    for shape in (SHORT,) if short else (SMALL, SMOLLM2):
        rows += comparisons(shape, await asyncio.to_thread(measure, shape))
    return rows


if __name__ == "__main__":
    sys.exit(main("learner", __doc__, learner))
