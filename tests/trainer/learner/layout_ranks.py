"""One rank of a learner of four, started by torchrun: trains a model under every layout of a plan, and resumes in each."""

import os
import sys
from pathlib import Path

import msgspec
import torch
from torch import distributed

from tests.trainer.learner.tiny import make_samples, train
from trainer.learner import backend
from trainer.learner.config import LearnerConfig
from trainer.learner.megatron import Learner

NUM_STEPS_BEFORE, NUM_STEPS_AFTER = 2, 3
"""Optimizer steps before and after the checkpoint."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A model and how it is divided."""

    name: str
    config: LearnerConfig
    model_directory: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a layout led to, beside the weights after its first step."""

    logprobs: list[list[float]]  # of the starting weights
    likeliest: list[list[bool]]  # which tokens greedy decoding gives, under the same
    losses: list[tuple[float, float]]  # and gradient norms, of all steps
    resumed_losses: list[tuple[float, float]]  # of the steps after the checkpoint, by another learner
    num_ranks_resumed_exactly: int  # on which the other learner ended with the same weights, bit for bit


def run(layout: Layout, results: Path) -> None:
    """Leaves `<name>.json` and the weights after one step, `<name>`."""
    learner = Learner(layout.config, model_directory=Path(layout.model_directory))
    logprobs, (_, likeliest) = learner.logprobs(make_samples(), 0.8), learner.likelihoods(make_samples())
    losses = train(learner, 1)
    learner.export(results / layout.name)
    losses += train(learner, NUM_STEPS_BEFORE - 1)
    checkpoint = results / f"{layout.name}-checkpoint"
    learner.save(checkpoint, b"four processes")
    losses += train(learner, NUM_STEPS_AFTER)

    resumed = Learner(layout.config, model_directory=Path(layout.model_directory))
    assert resumed.restore(checkpoint) == b"four processes"
    resumed_losses = train(resumed, NUM_STEPS_AFTER)
    pairs = zip(learner._model.parameters(), resumed._model.parameters(), strict=True)
    exact = torch.tensor(int(all(torch.equal(left, right) for left, right in pairs)))
    distributed.all_reduce(exact)
    outcome = Outcome(
        logprobs=[values.tolist() for values in logprobs],
        likeliest=[values.tolist() for values in likeliest],
        losses=losses,
        resumed_losses=resumed_losses,
        num_ranks_resumed_exactly=int(exact),
    )
    if distributed.get_rank() == 0:
        (results / f"{layout.name}.json").write_bytes(msgspec.json.encode(outcome))


def main() -> None:
    plan, results = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    backend.join(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    for layout in msgspec.json.decode(plan.read_bytes(), type=list[Layout]):
        run(layout, results)
    backend.leave()
    sys.stdout.flush()
    os._exit(0)  # an orderly end of Python with torch takes a second of CPU time


if __name__ == "__main__":
    main()
