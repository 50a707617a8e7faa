"""One rank of a learner of four, started by torchrun: exports, keeps snapshots and writes checkpoints under several layouts, and
leaves what it counted in a directory.
"""

import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor, distributed

from tests.trainer.learner.tiny import make_samples, train
from trainer.learner import backend, export
from trainer.learner.config import LearnerConfig
from trainer.learner.megatron import Learner


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    config: LearnerConfig
    model_directory: str


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """By one rank."""

    exported: dict[str, int]  # bytes moved to this rank's host, by layout
    snapshots: dict[str, int]  # bytes that one version takes up on this rank's host
    parameters: dict[str, int]  # bytes of this rank's trained parameters
    # differences of log-probs: under a snapshot to those when it was taken, and of the present ones before and after
    past: dict[str, float]
    present: dict[str, float]
    # whether a run that is resumed from a checkpoint written beside its steps goes on bit for bit
    resumed: dict[str, bool]


def largest_gap(left: list[np.ndarray], right: list[np.ndarray]) -> float:
    return float(np.abs(np.concatenate(left) - np.concatenate(right)).max())


def export_counted(learner: Learner, directory: Path) -> int:
    """How many bytes this rank moved to its host."""
    moved, to_host = 0, export.to_host

    def counted(tensor: Tensor) -> Tensor:
        nonlocal moved
        moved += tensor.nbytes
        return to_host(tensor)

    export.to_host = counted
    try:
        learner.export(directory)
    finally:
        export.to_host = to_host
    return moved


def run(layout: Layout, results: Path, counted: Counted) -> None:
    name, samples = layout.name, make_samples()
    learner = Learner(layout.config, model_directory=Path(layout.model_directory))
    learner.snapshot(0)
    before = learner.logprobs(samples, 1.0)
    train(learner, 2)
    now = learner.logprobs(samples, 1.0)
    counted.past[name] = largest_gap(learner.logprobs_under(0, samples, 1.0), before)
    counted.present[name] = largest_gap(learner.logprobs(samples, 1.0), now)
    trained = [p for p in learner._model.parameters() if p.requires_grad]
    counted.parameters[name] = sum(p.nbytes for p in trained)
    counted.snapshots[name] = sum(p.nbytes for p in learner._snapshots._copies[0]._kept.values())
    counted.exported[name] = export_counted(learner, results / name)

    learner.begin_save(results / f"{name}-checkpoint", b"four")
    expected = train(learner, 3)
    learner.finish_save()
    again = Learner(layout.config, model_directory=Path(layout.model_directory))
    again.restore(results / f"{name}-checkpoint")
    counted.resumed[name] = train(again, 3) == expected


def main() -> None:
    plan, results = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    backend.join(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    counted = Counted(exported={}, snapshots={}, parameters={}, past={}, present={}, resumed={})
    for layout in msgspec.json.decode(plan.read_bytes(), type=list[Layout]):
        run(layout, results, counted)
    (results / f"rank-{distributed.get_rank()}.json").write_bytes(msgspec.json.encode(counted))
    backend.leave()


if __name__ == "__main__":
    main()
