"""One rank of a learner of two, started by torchrun: runs every case of a plan and leaves what it saw in a
directory.

All cases share the two processes, for starting them is most of the cost.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import distributed

from tests.trainer.learner.tiny import (
    config,
    infinite,
    make_batch,
    make_samples,
    of_two_versions,
    routed,
    train,
)
from trainer.batching.batch import Batch
from trainer.feed import Feed
from trainer.learner import backend
from trainer.learner.config import LearnerConfig, LoraConfig, NotFinite, StepMetrics
from trainer.learner.logprobs import head_logprobs
from trainer.learner.lora import gather_adapters
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


class Reported(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says of steps that both ranks must say the same of, by layout."""

    steps: dict[str, StepMetrics]  # of a batch of two versions
    # what was not finite: the loss of one micro-batch, and the gradient of a weight that only the last rank holds
    broken: dict[str, list[str]]
    next_steps: dict[str, list[tuple[float, float]]]  # loss and gradient norm after those


REPORTED_LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "pipeline": {"pipeline_parallel": 2},
    "tensor": {"tensor_parallel": 2},
    "context": {"context_parallel": 2},
}


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


def report(model_directory: Path, results: Path) -> None:
    """Leaves `reported-<rank>.json`."""
    reported = Reported(steps={}, broken={}, next_steps={})
    for name, changes in REPORTED_LAYOUTS.items():
        step = Learner(config(**changes), model_directory=model_directory).step(of_two_versions())
        assert isinstance(step, StepMetrics)
        reported.steps[name] = step
        learner, samples = Learner(config(**changes), model_directory=model_directory), make_samples()
        outcomes = [learner.step(make_batch((*samples[:-1], infinite(samples[-1]))))]
        if "pipeline_parallel" in changes:
            outcomes.append(with_a_broken_gradient_on_the_last_rank(learner))
        assert all(isinstance(one, NotFinite) for one in outcomes), outcomes
        reported.broken[name] = [one.what for one in outcomes]
        reported.next_steps[name] = train(learner, 1)
    (results / f"reported-{distributed.get_rank()}.json").write_bytes(msgspec.json.encode(reported))


def with_a_broken_gradient_on_the_last_rank(learner: Learner) -> StepMetrics | NotFinite:
    """The loss is finite on both ranks, and so is every gradient of the first."""
    weight = learner._model.get_parameter("decoder.layers.0.mlp.linear_fc2.weight")
    is_last = distributed.get_rank() == distributed.get_world_size() - 1
    handle = weight.register_hook(lambda gradient: gradient * np.inf if is_last else gradient)
    try:
        return learner.step(make_batch(make_samples()))
    finally:
        handle.remove()


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
    logprobs, entropies, _ = head_logprobs(
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


def gather(model_directory: Path, results: Path) -> None:
    """Leaves what rank 0 received, and the bytes of each adapter that it has then."""
    options = config(pipeline_parallel=2, dtype="bf16", lora=LoraConfig(rank=4, alpha=8))
    learner = Learner(options, model_directory=model_directory)
    with counted_bytes("recv") as received:
        tensors = gather_adapters(learner._model, learner._architecture)
    if distributed.get_rank() == 0:
        sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
        (results / "gathered.json").write_bytes(msgspec.json.encode((received, sizes)))


DISPATCHED_TOKENS = (33, 33)
"""The samples of a step whose way to the experts is counted: one for each rank."""


def dispatched(model_directory: Path, results: Path) -> None:
    """Leaves `dispatched-<rank>.json`: the bytes that a step brings to this rank's experts, and back to its tokens, by `recompute`."""
    counts: dict[str, int] = {}
    for recompute in ("none", "selective", "full"):
        options = config(expert_parallel=2, micro_batch_tokens=40, recompute=recompute)
        learner = Learner(options, model_directory=model_directory)
        with counted_bytes("all_to_all_single") as received:
            learner.step(make_batch(make_samples(DISPATCHED_TOKENS)))
        counts[recompute] = sum(received)
    (results / f"dispatched-{distributed.get_rank()}.json").write_bytes(msgspec.json.encode(counts))


WITH_EXPERTS = "data, experts replayed"
FED = ("data", WITH_EXPERTS, "pipeline, experts replayed")


def fed(case: Case, results: Path) -> None:
    """The same learner on both ranks, but only rank 0 knows what is to be done, and has what engines reported."""
    name = f"fed, {case.name}"
    options = msgspec.structs.replace(case.config, snapshots_kept=1)
    feed = Feed(Learner(options, model_directory=Path(case.model_directory)))
    feed.learner.gpu_use.sample(0.25 * (distributed.get_rank() + 1))
    if distributed.get_rank() != 0:
        with counted_bytes("recv") as received:
            feed.follow()
        (results / f"{name}-received.json").write_bytes(msgspec.json.encode(sum(received)))
        return

    def batch(seed: int) -> Batch:
        samples = make_samples(seed=seed)
        if options.routing_replay:
            samples = routed(samples, feed.learner._architecture, seed=seed)
        return make_batch(samples, step=seed)

    samples = batch(0).samples
    feed.call("snapshot", 0)
    before = feed.call("logprobs", samples, 1.0)
    steps = [feed.call("step", batch(step)) for step in (1, 2)]
    feed.call("begin_save", results / f"{name}-checkpoint", b"cursor")
    feed.call("export", results / name)
    steps.append(feed.call("step", batch(3)))
    feed.call("finish_save")
    remembered = feed.call("logprobs_under", 0, samples, 1.0)
    seen: dict[str, Any] = {
        "losses": [(metrics.loss, metrics.grad_norm) for metrics in steps],
        "extra": feed.call("restore", results / f"{name}-checkpoint").decode(),
        "steps": feed.learner.steps,
        "gpu_use": feed.call("take_gpu_use"),
        "remembered": all(
            np.array_equal(left, right) for left, right in zip(before, remembered, strict=True)
        ),
    }
    feed.stop()
    (results / f"{name}.json").write_bytes(msgspec.json.encode(seen))


@contextlib.contextmanager
def counted_bytes(name: str) -> Iterator[list[int]]:
    """The bytes of each tensor that this rank gives to `torch.distributed`'s function of that name."""
    real, counts = getattr(distributed, name), []

    def counted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        counts.append(tensor.nbytes)
        return real(tensor, *arguments, **options)

    setattr(distributed, name, counted)
    try:
        yield counts
    finally:
        setattr(distributed, name, real)


def main() -> None:
    plan, results = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    backend.join(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    cases = msgspec.json.decode(plan.read_bytes(), type=list[Case])
    for case in cases:
        run(case, results)
    report(Path(cases[0].model_directory), results)
    gather(Path(cases[0].model_directory), results)
    split_gradient(results)
    for case in cases:
        if case.name == WITH_EXPERTS:
            dispatched(Path(case.model_directory), results)
        if case.name in FED:
            fed(case, results)
    backend.leave()


if __name__ == "__main__":
    main()
