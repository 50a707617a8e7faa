"""One rank of a learner of two, started by torchrun: writes and reads checkpoints, and leaves how much memory that took."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import distributed

from tests.trainer.learner.tiny import train
from trainer.learner import backend, snapshots
from trainer.learner.config import LearnerConfig
from trainer.learner.megatron import Learner


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    config: LearnerConfig
    model_directory: str


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of this process's memory, at their most, beyond those before."""

    first: int  # while a checkpoint was written
    second: int  # and the one after it
    read: int


def peak_bytes(action: Callable[[], object]) -> int:
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
    action()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def run(layout: Layout, results: Path) -> Peaks:
    snapshots._unused.clear()  # of the layout before
    learner = Learner(layout.config, model_directory=Path(layout.model_directory))
    train(learner, 1)
    directory = results / layout.name
    return Peaks(
        first=peak_bytes(lambda: learner.save(directory, b"")),
        second=peak_bytes(lambda: learner.save(directory, b"")),
        read=peak_bytes(lambda: learner.restore(directory)),
    )


def main() -> None:
    plan, results = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    backend.join(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    peaks = {
        layout.name: run(layout, results)
        for layout in msgspec.json.decode(plan.read_bytes(), type=list[Layout])
    }
    (results / f"rank-{distributed.get_rank()}.json").write_bytes(msgspec.json.encode(peaks))
    backend.leave()


if __name__ == "__main__":
    main()
