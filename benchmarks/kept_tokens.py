"""What it costs to keep what a step did with each token: `python -m benchmarks.kept_tokens [--json] [--short]`.

Two of our learners take the same steps, in random order, one of which reports its tokens; then these are packed and written as the
trainer's thread does it. All times are CPU time of one process, so other work on the machine changes them little.
"""

import asyncio
import functools
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import learner_methods
from benchmarks.learner import SHORT, SMALL, Shape
from benchmarks.learner_methods import LearnerRun, StepBatch, batch_of
from benchmarks.report import Comparison, compared, main, p50, shuffled
from pipeline.rollout_store.record import TrainedHead
from trainer.batching.batch import num_tokens, trained_tokens
from trainer.records.rollout_writer import RolloutWriter


@dataclass(slots=True)
class Measured:
    """CPU seconds and bytes, by round."""

    plain_s: list[list[float]] = field(default_factory=list[list[float]])
    keeping_s: list[list[float]] = field(default_factory=list[list[float]])
    writing_s: list[list[float]] = field(default_factory=list[list[float]])
    bytes_per_token: list[float] = field(default_factory=list[float])


def measure(shape: Shape, root: Path) -> Measured:
    """A step of each in each round, after one that is not counted."""
    learner_methods.write_model(root / "model", shape.model)
    config = learner_methods.config(longest_tokens=shape.longest_tokens)
    plain = LearnerRun(config, root / "model")
    keeping = LearnerRun(config, root / "model", keep_tokens=True)
    writer = RolloutWriter(root / "rollouts", max_bytes=2**30)
    found = Measured()
    for number in range(shape.num_rounds + 1):
        batch = learner_methods.make_batch(
            shape.num_samples, shape.longest_tokens, shape.model["vocab_size"], step=number + 1
        )
        took_s = {run is keeping: _cpu_s(run, batch) for run in shuffled((plain, keeping))}
        writing_s, num_bytes = _written(writer, keeping, batch, root / "rollouts")
        if number:
            found.plain_s.append([took_s[False]])
            found.keeping_s.append([took_s[True]])
            found.writing_s.append([writing_s])
            found.bytes_per_token.append(num_bytes / batch.num_trained)
    writer.close()
    return found


def _cpu_s(run: LearnerRun, batch: StepBatch) -> float:
    began = time.process_time()
    run.step(batch)
    return time.process_time() - began


def _written(writer: RolloutWriter, run: LearnerRun, batch: StepBatch, directory: Path) -> tuple[float, int]:
    """The CPU seconds that it took, and the bytes on disk."""
    before = sum(path.stat().st_size for path in directory.iterdir())
    began = time.process_time()
    for name, tokens in trained_tokens(batch_of(batch), run.take_tokens(), version=0).items():
        head = TrainedHead(rollout_id=name, step=batch.step, version=0, num_tokens=num_tokens(tokens))
        writer.add_trained(head, tokens)
    took_s = time.process_time() - began
    return took_s, sum(path.stat().st_size for path in directory.iterdir()) - before


async def kept_tokens(short: bool) -> list[Comparison]:
    shape = SHORT if short else SMALL
    with tempfile.TemporaryDirectory() as directory:
        found = await asyncio.to_thread(measure, shape, Path(directory))
    step = f"ms of CPU of a step, {shape.name}"
    writing = "ms of CPU to pack and write the tokens of a step"
    of_step = functools.partial(compared, "kept_tokens", rival=found.plain_s, statistic=p50, scale=1000.0)
    return [
        of_step(found.keeping_s, rival_name="nothing kept", unit=step),
        of_step(found.writing_s, rival_name="the step", unit=writing),
        Comparison("kept_tokens", p50(found.bytes_per_token), 13.0, "unpacked", "bytes of a token on disk"),
    ]


if __name__ == "__main__":
    sys.exit(main("kept_tokens", __doc__, kept_tokens))
