"""One rank of a learner of two, started by torchrun: runs every case of a plan and leaves what it saw in a
directory.

All cases share the two processes, for starting them is most of the cost.
"""

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import distributed

from tests.trainer.learner.tiny import make_batch, make_samples, train
from trainer.feed import Feed
from trainer.learner import backend
from trainer.learner.config import LearnerConfig
from trainer.learner.logprobs import vocab_parallel_logprobs
from trainer.learner.megatron import Learner


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Train a model under one layout, perhaps from a checkpoint."""

    name: str
    config: LearnerConfig
    model_directory: str
    resume_from: str | None = None
    num_steps: int = 4
    vocab_size: int = 64


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a case led to, beside its exported weights."""

    losses: list[tuple[float, float]]  # and gradient norms
    logprobs: list[list[float]]  # of the starting weights
    adam_steps: list[float]


def run(case: Case, results: Path) -> None:
    """Leaves `<name>.json`, the export `<name>`, and a checkpoint `<name>-checkpoint`."""
    learner = Learner(case.config, model_directory=Path(case.model_directory))
    if case.resume_from:
        assert learner.restore(Path(case.resume_from)) == b"one process"
    logprobs = learner.logprobs(make_samples(vocab_size=case.vocab_size), 0.8)
    losses = train(learner, case.num_steps, vocab_size=case.vocab_size)
    learner.export(results / case.name)
    learner.save(results / f"{case.name}-checkpoint", b"two processes")
    seen = Seen(
        losses=losses, logprobs=[values.tolist() for values in logprobs], adam_steps=learner.adam_steps()
    )
    if distributed.get_rank() == 0:
        (results / f"{case.name}.json").write_bytes(msgspec.json.encode(seen))


def split_gradient(results: Path) -> None:
    """Log-probs of logits whose columns two ranks share; leaves each rank's share of the gradient."""
    rank, data = distributed.get_rank(), gradient_case()
    shard = data["logits"].chunk(2, dim=1)[rank].clone().requires_grad_()
    logprobs, entropies = vocab_parallel_logprobs(
        shard, data["targets"], temperature=0.7, vocab_size=37, group=distributed.group.WORLD
    )
    (gradient,) = torch.autograd.grad((logprobs * data["weights"]).sum(), shard)
    np.savez(
        results / f"gradient-{rank}.npz", gradient=gradient, logprobs=logprobs.detach(), entropies=entropies
    )


def gradient_case() -> dict[str, torch.Tensor]:
    """Logits of 40 columns, three of them padding."""
    generator = torch.Generator().manual_seed(4)
    return {
        "logits": torch.randn(9, 40, generator=generator) * 3,
        "targets": torch.randint(0, 37, (9,), generator=generator),
        "weights": torch.randn(9, generator=generator),
    }


def fed(case: Case, results: Path) -> None:
    """The same learner on both ranks, but only rank 0 knows what is to be done."""
    options = msgspec.structs.replace(case.config, snapshots_kept=1)
    feed = Feed(Learner(options, model_directory=Path(case.model_directory)))
    if distributed.get_rank() != 0:
        feed.follow()
        return
    samples = make_samples()
    feed.snapshot(0)
    before = feed.logprobs(samples, 1.0)
    steps = [feed.step(make_batch(make_samples(seed=step), step=step)) for step in (1, 2)]
    feed.save(results / "fed-checkpoint", b"cursor")
    feed.export(results / "fed")
    steps.append(feed.step(make_batch(make_samples(seed=3), step=3)))
    remembered = feed.logprobs_under(0, samples, 1.0)
    seen: dict[str, Any] = {
        "losses": [(metrics.loss, metrics.grad_norm) for metrics in steps],
        "extra": feed.restore(results / "fed-checkpoint").decode(),
        "steps": feed.learner.steps,
        "remembered": all(
            np.array_equal(left, right) for left, right in zip(before, remembered, strict=True)
        ),
    }
    feed.stop()
    (results / "fed.json").write_bytes(msgspec.json.encode(seen))


def main() -> None:
    plan, results = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    backend.join(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    cases = msgspec.json.decode(plan.read_bytes(), type=list[Case])
    for case in cases:
        run(case, results)
    split_gradient(results)
    fed(cases[0], results)
    backend.leave()


if __name__ == "__main__":
    main()
