"""Tiny random models in Hugging Face directories, and batches for them."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from trainer.batching.batch import Batch, Sample
from trainer.learner import backend
from trainer.learner.architecture import Architecture
from trainer.learner.config import LearnerConfig, StepMetrics
from trainer.learner.megatron import Learner

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # large enough for wrong weights to show
}
EXPERTS = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
"""What turns the shape of a dense model into that of a mixture of experts."""
MINISTRAL3 = {
    "head_dim": 32,
    "pad_token_id": None,  # transformers gives a pad token's embedding no gradient
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 8,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
GLM4_MOE = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "attention_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
MINIMAX_M2 = {
    "head_dim": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "rotary_dim": 16,
    "use_qk_norm": True,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
}
GPT_OSS = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "sliding_window": 6,
    "pad_token_id": None,
    "initializer_range": 0.1,  # with more, small differences of rounding grow within five steps
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 8,
    },
}
DELTA_NET = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "initializer_range": 0.05,  # with 0.2, fp32 and fp64 differ by 7e-5
    "pad_token_id": None,
}
QWEN3_NEXT = DELTA_NET | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
SEEING = DELTA_NET | {
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
    },
}
LENGTHS = (7, 33, 2, 20, 12, 28)


def write_model(directory: Path, family: str, **changes: Any) -> Path:
    """A random model of one family, its norms and biases random too, as Hugging Face saves it; with a vision tower if `changes` describe
    one.
    """
    torch.manual_seed(11)
    if "vision_config" in changes:
        tower = changes.pop("vision_config")
        described = AutoConfig.for_model(family, text_config=SHAPE | changes, vision_config=tower)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(described).float()
    else:
        described = AutoConfig.for_model(family, **(SHAPE | changes))
        model = AutoModelForCausalLM.from_config(described).float()
    # Norms whose factor is their weight plus 1
    centred = family.startswith(("qwen3_next", "qwen3_5"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                around_0 = name.endswith("bias") or (centred and "linear_attn" not in name)
                parameter.copy_(torch.randn_like(parameter) * 0.1 + (0.0 if around_0 else 1.0))
            if name.endswith("A_log"):  # from a memory of a hundred positions to none
                parameter.copy_(torch.linspace(-4, 1, len(parameter)))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(directory)
    if family == "qwen3_5_moe":
        _join_experts(directory / "model.safetensors")
    return directory


def _join_experts(path: Path) -> None:
    """The form in which Qwen3.5 is published, one tensor for all experts of a layer; transformers reads it, and saves one for each."""
    tensors = load_file(path)
    for layer in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        gates, ups, downs = (
            [tensors.pop(name) for name in _of_each(layer, part, tensors)] for part in ("gate", "up", "down")
        )
        tensors[f"{layer}.experts.gate_up_proj"] = torch.cat([torch.stack(gates), torch.stack(ups)], dim=1)
        tensors[f"{layer}.experts.down_proj"] = torch.stack(downs)
    save_file(tensors, path, metadata={"format": "pt"})


def _of_each(layer: str, part: str, names: Collection[str]) -> list[str]:
    found = (f"{layer}.experts.{expert}.{part}_proj.weight" for expert in range(len(names)))
    return [name for name in found if name in names]


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
