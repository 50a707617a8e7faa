"""One optimizer step with the settings of each recipe for GPUs, alone on one device."""

import gc
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.device import planned_bytes
from benchmarks.gpu_check.random_models import cut, published_config, tiny, write_random
from benchmarks.gpu_check.steps import DeviceKind, Findings
from benchmarks.learner_methods import batch_of, make_batch
from benchmarks.report import significant
from trainer.batching.batch import Batch
from trainer.learner import backend
from trainer.learner.architecture import Architecture
from trainer.learner.config import LearnerConfig, StepMetrics
from trainer.learner.families.registry import read_architecture
from trainer.learner.megatron import Learner
from trainer.plan.division import KNOWN
from trainer.recipe import Recipe, load_any_recipe

RECIPES = Path(__file__).parents[2] / "trainer" / "recipes"
GIB = 2**30
NUM_SAMPLES = 4
CPU_TOKENS = 128
USABLE_SHARE = 0.9  # of a GPU's memory, for the tensors of a plan


def check(device: DeviceKind) -> Findings:
    return take_steps(of_gpus(), device)


def of_gpus() -> dict[str, Recipe]:
    """The recipes that are shipped for GPUs, by their names."""
    recipes = {path.stem: load_any_recipe(path) for path in sorted(RECIPES.glob("*.toml"))}
    return {name: one for name, one in recipes.items() if isinstance(one, Recipe) and one.plan.gpus}


def take_steps(recipes: dict[str, Recipe], device: DeviceKind) -> Findings:
    """A step for each recipe. Recipes that share a model's shape share its weights."""
    found, too_large = Findings.none(), list[str]()
    backend.join()
    with tempfile.TemporaryDirectory(prefix="swerve-recipes-") as temporary:
        for name, recipe in recipes.items():
            config = alone(recipe.learner, device)
            keys = _keys(recipe, device)
            directory = Path(temporary) / f"{Path(recipe.model).name}-{recipe.learner.expert_parallel}"
            if not directory.exists():
                write_random(directory, keys)
            planned, usable = planned_bytes(config, directory), _usable_bytes(device)
            found.numbers[f"{name}, planned, GiB"] = round(planned / GIB, 2)
            if planned > usable:
                too_large.append(f"{name} needs {planned / GIB:.0f} GiB of {usable / GIB:.0f}")
                continue
            _free()
            try:
                found.faults += _step(found, name, config, directory, device)
            except Exception as error:
                found.faults.append(f"{name}: {type(error).__name__}: {error}"[:1000])
    if too_large:
        found.not_run = "; ".join(too_large)
    return found


def alone(learner: LearnerConfig, device: DeviceKind) -> LearnerConfig:
    """The recipe's settings for one process, and for a first step that changes something."""
    return msgspec.structs.replace(
        learner,
        tensor_parallel=1,
        pipeline_parallel=1,
        context_parallel=1,
        expert_parallel=1,
        sequence_parallel=False,
        warmup_steps=0,
        micro_batch_tokens=learner.micro_batch_tokens if device == "cuda" else CPU_TOKENS,
    )


def _keys(recipe: Recipe, device: DeviceKind) -> dict[str, Any]:
    published = published_config(KNOWN / Path(recipe.model).name)
    return cut(published, recipe.learner) if device == "cuda" else tiny(published)


def _usable_bytes(device: DeviceKind) -> float:
    return USABLE_SHARE * torch.cuda.mem_get_info()[1] if device == "cuda" else float("inf")


def _step(
    found: Findings, name: str, config: LearnerConfig, directory: Path, device: DeviceKind
) -> Sequence[str]:
    """The faults of one recipe's step."""
    learner, architecture = Learner(config, model_directory=directory), read_architecture(directory)
    batch, before = _batch(learner, architecture), _some_weights(learner)
    began = time.perf_counter()
    metrics = learner.step(batch)
    if not isinstance(metrics, StepMetrics):
        return [f"{name}: the {metrics.what} is not finite"]
    found.numbers[f"{name}, s"] = round(time.perf_counter() - began, 2)
    found.numbers[f"{name}, gradient norm"] = significant(metrics.grad_norm)
    if device == "cuda":
        found.numbers[f"{name}, at the peak, GiB"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
    faults = {
        "its gradient is 0 or not finite": not 0 < metrics.grad_norm < float("inf"),
        "its step changed no weight": torch.equal(before, _some_weights(learner)),
        "its step was not the first of every parameter": set(learner.adam_steps()) != {1.0},
    }
    return [f"{name}: {fault}" for fault, is_so in faults.items() if is_so]


def _some_weights(learner: Learner) -> Tensor:
    """The first thousand values of each trained parameter."""
    trained = (p.detach() for p in learner._model.parameters() if p.requires_grad)
    return torch.cat([one.flatten()[:1000].float().cpu() for one in trained])


def _batch(learner: Learner, architecture: Architecture) -> Batch:
    """Random tokens up to the recipe's longest, as if this policy had sampled them, with experts where the recipe replays those."""
    longest = min(learner.config.micro_batch_tokens, architecture.max_positions)
    batch = batch_of(make_batch(NUM_SAMPLES, longest, architecture.vocab_size, step=1))
    samples = batch.samples
    if learner.config.routing_replay:
        samples = tuple(replace(one, routing=_routing(one.num_tokens - 1, architecture)) for one in samples)
    logprobs = learner.logprobs(samples, batch.temperature)
    samples = tuple(
        replace(sample, behaviour_logprobs_T=np.where(sample.trained_T, values, 0).astype(np.float32))
        for sample, values in zip(samples, logprobs, strict=True)
    )
    return replace(batch, samples=samples)


def _routing(num_inputs: int, architecture: Architecture) -> npt.NDArray[np.uint8]:
    """Experts chosen by chance, as an engine reports them: of each input and layer those that it was sent to."""
    assert architecture.experts is not None
    scores = np.random.default_rng(0).random(
        (num_inputs, architecture.num_layers, architecture.experts.count), np.float32
    )
    return scores.argsort(axis=2)[:, :, : architecture.experts.per_token].astype(np.uint8).ravel()


def _free() -> None:
    """Give back what the learner before had."""
    gc.collect()
    if backend.has_cuda():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
