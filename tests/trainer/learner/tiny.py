"""Batches for tiny random models, and what learners and transformers make of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainer.batching.batch import Batch, Sample
from trainer.learner import backend
from trainer.learner.architecture import Architecture
from trainer.learner.config import LearnerConfig, StepMetrics
from trainer.learner.megatron import Learner

LENGTHS = (7, 33, 2, 20, 12, 28)


def read_export(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, whichever rank wrote them."""
    return {
        name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()
    }


def read_reference(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def reference_logprobs(model: PreTrainedModel, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """By Hugging Face's own model, one sample by itself: log-probs of all tokens but the first."""
    tokens = torch.from_numpy(sample.tokens_T).long()[None]
    logprobs = torch.log_softmax(model(tokens).logits[0, :-1] / temperature, dim=-1)
    return logprobs.gather(1, tokens[0, 1:, None])[:, 0]


def config(**changes: Any) -> LearnerConfig:
    """Adam's eps is above the noise of fp32 sums, which it would otherwise blow up to whole steps."""
    return LearnerConfig(**({"lr": 2e-3, "eps": 1e-5, "dtype": "fp32", "micro_batch_tokens": 64} | changes))


def infinite(sample: Sample) -> Sample:
    """With an advantage that no loss is finite under."""
    return replace(sample, advantages_T=np.where(sample.trained_T, np.inf, 0).astype(np.float32))


def make_samples(
    lengths: tuple[int, ...] = LENGTHS, *, vocab_size: int = 64, seed: int = 0
) -> tuple[Sample, ...]:
    """Random tokens, two thirds of them trained, with the log-probs of a policy not far from uniform."""
    rng = np.random.default_rng(seed)
    samples = []
    for index, length in enumerate(lengths):
        trained = rng.random(length) < 0.67
        trained[0], trained[-1] = False, True
        samples.append(
            Sample(
                request_id=f"request-{index}",
                group_id=f"group-{index // 2}",
                branch=0,
                tokens_T=rng.integers(0, vocab_size, length, dtype=np.int32),
                trained_T=trained,
                behaviour_logprobs_T=np.where(trained, rng.normal(-4.2, 0.3, length), 0).astype(np.float32),
                advantages_T=np.where(trained, rng.normal(), 0).astype(np.float32),
                versions_T=np.where(trained, 0, -1).astype(np.int32),
            )
        )
    return tuple(samples)


def trained_throughout(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """The same with every token trained but the first, so that log-probs of all of them are computed."""
    return tuple(replace(one, trained_T=np.arange(one.num_tokens) > 0) for one in samples)


def routed(samples: tuple[Sample, ...], architecture: Architecture, *, seed: int = 0) -> tuple[Sample, ...]:
    """As if an engine had sent each token that was an input to experts chosen by chance."""
    assert architecture.experts is not None
    rng, made = np.random.default_rng(seed), []
    for sample in samples:
        shape = (sample.num_tokens - 1, architecture.num_layers, architecture.experts.count)
        chosen = rng.random(shape).argsort(axis=2)[:, :, : architecture.experts.per_token].astype(np.uint8)
        made.append(replace(sample, routing=chosen.ravel()))
    return tuple(made)


def make_batch(samples: tuple[Sample, ...], *, step: int = 1, temperature: float = 1.0) -> Batch:
    return Batch(
        step=step,
        samples=samples,
        temperature=temperature,
        num_trajectories=len(samples),
        request_ids=tuple(sample.request_id for sample in samples),
        lag_max=0,
        lag_mean=0.0,
    )


def of_two_versions() -> Batch:
    """Every other sample is sampled by version 3, the others by version 5, of which 3 is two behind."""
    samples = tuple(
        replace(one, versions_T=np.where(one.trained_T, 3 + 2 * (index % 2), -1).astype(np.int32))
        for index, one in enumerate(make_samples())
    )
    return replace(make_batch(samples), lags={3: 2, 5: 0})


def take_step(learner: Learner, samples: tuple[Sample, ...], *, step: int = 1) -> StepMetrics:
    metrics = learner.step(make_batch(samples, step=step))
    assert isinstance(metrics, StepMetrics)
    return metrics


def branched(samples: tuple[Sample, ...], *, offender: int) -> tuple[Sample, ...]:
    """The first three are branches of one trajectory; `offender` holds a token that the policy could not have sampled."""
    made = [replace(one, request_id="cut", branch=n) if n < 3 else one for n, one in enumerate(samples)]
    logprobs = np.where(made[offender].trained_T, made[offender].behaviour_logprobs_T, 0)
    logprobs[np.flatnonzero(made[offender].trained_T)[0]] = -40.0
    made[offender] = replace(made[offender], behaviour_logprobs_T=logprobs.astype(np.float32))
    return tuple(made)


def train(learner: Learner, num_steps: int, *, vocab_size: int = 64) -> list[tuple[float, float]]:
    """Loss and gradient norm of some steps, each on the batch of its number."""
    seen = []
    for _ in range(num_steps):
        step = learner.steps + 1
        samples = make_samples(vocab_size=vocab_size, seed=step)
        if learner.config.routing_replay:
            samples = routed(samples, learner._architecture, seed=step)
        metrics = take_step(learner, samples, step=step)
        seen.append((metrics.loss, metrics.grad_norm))
    return seen


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    """What the last update's gradient was, before clipping; as Megatron names and lays out the parameters."""
    return {name: p.main_grad.clone() for name, p in learner._model.named_parameters() if p.requires_grad}


def relative_difference(left: Learner, right: Learner) -> float:
    scale = max(float(gradient.abs().max()) for gradient in gradients(left).values())
    return largest_difference(gradients(left), gradients(right)) / scale


def assert_same_run(observed: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    """Bit for bit on a CPU; kernels on a GPU add up in whatever order they finish."""
    if backend.has_cuda():
        np.testing.assert_allclose(observed, expected, rtol=2e-3)
    else:
        assert observed == expected


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)
