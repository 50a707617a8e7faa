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
from trainer.learner.logprobs import head_logprobs
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
    token_logprobs: dict[str, list[float]]  # of the last step, by request


def run(case: Case, results: Path) -> None:
    """Leaves `<name>.json`, the export `<name>`, and a checkpoint `<name>-checkpoint`."""
    learner = Learner(case.config, model_directory=Path(case.model_directory), keep_tokens=True)
    if case.resume_from:
        assert learner.restore(Path(case.resume_from)) == b"one process"
    logprobs = learner.logprobs(make_samples(vocab_size=case.vocab_size), 0.8)
    losses = train(learner, case.num_steps, vocab_size=case.vocab_size)
    learner.export(results / case.name)
    learner.save(results / f"{case.name}-checkpoint", b"two processes")
    seen = Seen(
        losses=losses,
        logprobs=[values.tolist() for values in logprobs],
        adam_steps=learner.adam_steps(),
        token_logprobs=token_logprobs(learner),
    )
    if distributed.get_rank() == 0:
        (results / f"{case.name}.json").write_bytes(msgspec.json.encode(seen))


def token_logprobs(learner: Learner) -> dict[str, list[float]]:
    return {one.request_id: one.logprobs_T.tolist() for one in learner.take_tokens()}


def split_gradient(results: Path) -> None:
    """A head whose columns two ranks share; leaves each rank's share of the gradients, for a vocabulary of 37 and one of 19."""
    rank, data = distributed.get_rank(), gradient_case()
    for vocab_size in (37, 19):
        shard = data["weight"].chunk(2)[rank].clone()
        seen = head_gradients(data | {"weight": shard, "targets": data["targets"] % vocab_size}, vocab_size)
        np.savez(results / f"gradient-{vocab_size}-{rank}.npz", **seen)


def head_gradients(data: dict[str, torch.Tensor], vocab_size: int) -> dict[str, np.ndarray]:
    """Log-probs, entropies and gradients of this rank's share of the head."""
    inputs = (data["hidden"].clone().requires_grad_(), data["weight"].clone().requires_grad_())
    logprobs, entropies = head_logprobs(
        *inputs,
        data["targets"],
        temperature=0.7,
        vocab_size=vocab_size,
        chunk_tokens=4,
        fp32_logits=False,
        entropy_gradient=True,
        group=distributed.group.WORLD,
    )
    loss = (logprobs * data["factors"] + entropies * data["entropy_factors"]).sum()
    of_hidden, of_weight = torch.autograd.grad(loss, inputs)
    seen = {"logprobs": logprobs, "entropies": entropies, "hidden": of_hidden, "weight": of_weight}
    return {name: value.detach().numpy() for name, value in seen.items()}


def gradient_case() -> dict[str, torch.Tensor]:
    """A head of 40 columns, some of them padding; of a vocabulary of 19 the second half holds none."""
    generator = torch.Generator().manual_seed(4)
    return {
        "hidden": torch.randn(9, 16, generator=generator),
        "weight": torch.randn(40, 16, generator=generator),
        "targets": torch.randint(0, 37, (9,), generator=generator),
        "factors": torch.randn(9, generator=generator),
        "entropy_factors": torch.randn(9, generator=generator),
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
    feed.begin_save(results / "fed-checkpoint", b"cursor")
    feed.export(results / "fed")
    steps.append(feed.step(make_batch(make_samples(seed=3), step=3)))
    feed.finish_save()
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
