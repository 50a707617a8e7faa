"""How long the learner pauses when a checkpoint begins: `python -m benchmarks.checkpoints [--json] [--short]`.

A random model in bfloat16 with the distributed optimizer, 14 bytes for each parameter, alone in its process. The rivals: copying the same
tensors to memory that is there already and nothing else, and writing the whole checkpoint while the learner waits. Each checkpoint but the
first uses the memory of the one before. --short takes a small model.
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.learner_methods import LearnerRun, make_batch, write_model
from benchmarks.report import Comparison, compared, main, p50
from trainer.learner.config import LearnerConfig, LossConfig

NUM_ROUNDS = 5
LARGE: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
SMALL = LARGE | {"vocab_size": 512, "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 2}


async def benchmark(short: bool) -> list[Comparison]:
    with tempfile.TemporaryDirectory(prefix="swerve-checkpoints-") as temporary:
        model = Path(temporary) / "model"
        write_model(model, SMALL if short else LARGE)
        return await asyncio.to_thread(measured, model, Path(temporary) / "checkpoint")


def measured(model: Path, directory: Path) -> list[Comparison]:
    config = LearnerConfig(
        lr=1e-6,
        micro_batch_tokens=64,
        dtype="bf16",
        distributed_optimizer=True,
        loss=LossConfig(kind="reinforce"),
    )
    run = LearnerRun(config, model)
    run.step(make_batch(2, 32, 512, step=1))
    first, *later = [run.save(directory) for _ in range(1 + NUM_ROUNDS)]
    rivals = {
        "the same tensors copied": [[one.copy_s] for one in later],
        "the whole checkpoint": [[one.whole_s] for one in later],
    }
    ours = {"s, the first": [[first.begin_s]], "s, a later one": [[one.begin_s] for one in later]}
    return [
        compared("checkpoints", begun, took, p50, rival_name=rival, unit=unit)
        for unit, begun in ours.items()
        for rival, took in rivals.items()
    ]


if __name__ == "__main__":
    sys.exit(main("checkpoints", __doc__, benchmark))
