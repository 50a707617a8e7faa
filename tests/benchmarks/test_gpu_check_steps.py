"""The steps of the check on GPUs, run on a CPU with small sizes: what is right holds, and what is wrong does not."""

import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu_check import kernels, learning, machine, random_models, recipes, serving, speed
from benchmarks.small_models import FAMILIES
from infra.local import commands
from pipeline.journal.rows import StepRow
from trainer.learner import backend
from trainer.learner.attention import PackedAttention
from trainer.learner.backend import CudaAsCpu
from trainer.learner.families.registry import FAMILIES as ALL_FAMILIES
from trainer.learner.families.registry import read_architecture
from trainer.learner.megatron import Learner
from trainer.learner.parameters import layer_parameters, outer_parameters
from trainer.plan.division import KNOWN
from trainer.recipe import load_recipe

pytestmark = pytest.mark.cpu_only

GPU_RECIPES = recipes.of_gpus()


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    torch.set_num_threads(1)
    backend.join()
    yield
    backend.leave()


def test_attention_and_products_are_those_of_plain_arithmetic() -> None:
    found = kernels.check("cpu")
    assert found.faults == []
    assert len(found.numbers) == 1 + 2 * 4 + 2 * 5 + 2


def test_attention_with_another_window_or_scale_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PackedAttention._attend_sample

    def wider(self: PackedAttention, *vectors: torch.Tensor) -> torch.Tensor:
        self.window = 129
        return attend(self, *vectors)

    monkeypatch.setattr(PackedAttention, "_attend_sample", wider)
    backend.lay_out(tensor_parallel=1, pipeline_parallel=1)
    off_by_one = kernels.attention_deviations(kernels.CASES[1], (300, 70))
    assert off_by_one["output"] > kernels.OUTPUT_BOUND
    assert min(off_by_one.values()) > kernels.GRADIENT_BOUND


def test_a_product_that_passed_through_half_precision_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(total: torch.Tensor, gradient: torch.Tensor, hidden: torch.Tensor) -> None:
        total.add_((gradient.T @ hidden).float())

    monkeypatch.setattr(kernels, "_add_product", rounded)
    found = kernels.product_deviations(rows=128, width=64)
    assert found["addmm of bf16 into fp32"] > 10 * kernels.PRODUCT_BOUND


def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "_compute_on_cpu", learning.write_computed)


# Quick: a learner that is wrong on a GPU is noticed.
def test_a_learner_that_computes_the_same_holds_and_another_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    families = {"llama": FAMILIES["llama"], "qwen3_moe": FAMILIES["qwen3_moe"]}
    assert learning.compared(families).faults == []
    compute = learning.compute

    def with_other_positions(directory: Path, dtype: str) -> learning.Computed:
        """A hundredth off in every log-prob and gradient."""
        computed = compute(directory, dtype)
        return learning.Computed(computed.logprobs_N * 1.01, computed.gradient * 1.01)

    def broken_on_this_device(directory: Path) -> None:
        learning.write_computed(directory)
        monkeypatch.setattr(learning, "compute", with_other_positions)

    monkeypatch.setattr(learning, "_compute_on_cpu", broken_on_this_device)
    faults = learning.compared({"llama": FAMILIES["llama"]}).faults
    assert len(faults) == 2
    assert all(fault.startswith("llama, fp32") for fault in faults)


def test_every_family_that_the_learner_trains_has_a_small_model() -> None:
    assert FAMILIES.keys() == ALL_FAMILIES.keys()


@pytest.mark.slow
def test_every_family_holds_against_a_process_without_a_gpu() -> None:
    found = learning.parity("cpu")
    assert found.faults == []
    assert len(found.numbers) == 4 * len(ALL_FAMILIES)


# Quick: the step of the check that compares a resume bit for bit.
def test_a_resume_goes_on_as_the_run_that_was_saved() -> None:
    assert learning.resume("cpu").faults == []


@pytest.mark.slow
def test_a_resume_that_loses_the_moments_of_the_optimizer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = Learner.restore

    def without_moments(self: Learner, directory: Path) -> bytes:
        extra = restore(self, directory)
        for part in self._optimizer.chained_optimizers:  # pyright: ignore[reportAttributeAccessIssue]
            for state in part.optimizer.state.values():
                state["exp_avg"].zero_()
        return extra

    monkeypatch.setattr(Learner, "restore", without_moments)
    faults = learning.resume("cpu").faults
    assert any("weights and optimizer" in fault for fault in faults)
    assert any("next losses" in fault for fault in faults)


@pytest.mark.slow
def test_every_recipe_for_gpus_takes_a_step() -> None:
    found = recipes.check("cpu")
    assert (found.faults, found.not_run) == ([], "")
    assert {name for name in found.numbers if name.endswith(", gradient norm")} == {
        f"{name}, gradient norm" for name in GPU_RECIPES
    }


# Quick: a recipe whose step learns nothing is named.
def test_a_recipe_that_learns_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name, recipe = next(iter(GPU_RECIPES.items()))
    still = msgspec.structs.replace(recipe, learner=msgspec.structs.replace(recipe.learner, lr=1e-30))
    assert recipes.take_steps({name: still}, "cpu").faults == [f"{name}: its step changed no weight"]
    monkeypatch.setattr(recipes, "_usable_bytes", lambda _device: 1.0)
    found = recipes.take_steps({name: recipe}, "cpu")
    assert found.faults == []
    assert found.not_run.startswith(f"{name} needs")


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_the_cut_model_of_a_recipe_is_one_that_the_learner_reads(name: str, tmp_path: Path) -> None:
    """At its full width, without weights: transformers gives each tensor the name by which the learner looks for it."""
    recipe = GPU_RECIPES[name]
    keys = random_models.cut(random_models.published_config(KNOWN / Path(recipe.model).name), recipe.learner)
    model_type = keys.pop("model_type")
    config = AutoConfig.for_model(model_type, **keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.save_pretrained(tmp_path)
    architecture = read_architecture(tmp_path)
    assert architecture.num_layers <= 4
    planned = recipes.planned_bytes(recipes.alone(recipe.learner, "cuda"), tmp_path)
    assert planned < recipes.USABLE_SHARE * 80e9, "a GPU of 80 GB holds it"
    if architecture.experts:
        assert architecture.experts.count >= architecture.experts.per_token
    held = sum(
        parameter.num_values(1)
        * (architecture.experts.count if parameter.is_expert and architecture.experts else 1)
        for layer in range(architecture.num_layers)
        for parameter in layer_parameters(architecture, layer)
    ) + sum(parameter.num_values(1) for parameter in outer_parameters(architecture).values())
    buffers = sum(one.numel() for name, one in model.named_buffers() if "correction" in name)
    assert held == sum(one.numel() for one in model.parameters()) + buffers


@pytest.mark.slow
def test_memory_and_speed_on_a_cpu_are_measured_and_have_no_verdict() -> None:
    for step in (speed.memory, speed.utilisation):
        found = step("cpu")
        assert found.faults == []
        assert found.not_run
        assert len(found.numbers) == 2


@pytest.mark.slow
def test_weights_arrive_at_a_receiver_as_they_were_sent() -> None:
    found = serving.publication("cpu")
    assert found.faults == []
    assert found.numbers["tensors that differ"] == 0
    assert found.numbers["by"] == "gloo"


@pytest.mark.slow
def test_an_engine_in_half_precision_is_as_near_to_the_learner_as_rounding_allows() -> None:
    found = serving.engine("cpu")
    assert found.faults == []
    assert found.numbers["tokens"] == serving.NUM_REPLIES["cpu"] * serving.REPLY_TOKENS["cpu"]


def step_row(step: int, **changes: Any) -> StepRow:
    zeros = dict.fromkeys(("version", "loss", "lr", "reward_mean", "num_trajectories"), 0)
    tokens = dict.fromkeys(("num_trained_tokens", "num_unique_sampled_tokens", "num_gap_tokens"), 100)
    gap = {"logprob_gap_max": 0.1, "logprob_gap_mean": 0.004}
    return StepRow(**zeros | tokens | gap | {"step": step, "grad_norm": 0.5, "request_ids": ()} | changes)


def test_a_run_holds_by_its_journal_alone() -> None:
    held = serving._judged([step_row(1), step_row(2, logprob_gap_mean=0.008)])
    assert held.faults == []
    assert held.numbers["log-prob gap, nats in the mean"] == pytest.approx(0.006)
    assert "1 of 2 steps" in serving._judged([step_row(1)]).faults[0]
    far = [step_row(1), step_row(2, logprob_gap_mean=0.4)]
    assert "log-prob gap, nats in the mean" in serving._judged(far).faults[0]
    still = [step_row(1), step_row(2, grad_norm=0.0)]
    assert serving._judged(still).faults == [
        "a step had no gradient, so the versions that were published are equal"
    ]
    unmeasured = [step_row(n, logprob_gap_max=None, num_gap_tokens=0) for n in (1, 2)]
    assert "no step was audited" in serving._judged(unmeasured).faults[0]


def test_the_command_of_the_short_run_is_understood() -> None:
    module, name, *words = serving._run_command("cuda")
    assert (module, name) == ("-m", "infra.local")
    parsed = commands.parse_arguments("", words)
    assert (parsed.device, parsed.dtype, parsed.fresh) == ("cuda", "bfloat16", True)
    settings = [word for word in parsed.passed_on if word != "--set"]
    recipe = load_recipe(parsed.recipe, settings)
    assert (recipe.num_steps, recipe.learner.dtype, recipe.audit.share) == (serving.NUM_STEPS, "bf16", 1.0)
    assert Path(recipe.model) == parsed.model == serving.SMOLLM2


def test_a_machine_without_shared_memory_disk_or_files_is_told_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(2**26, 0, 2**26))
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _which: (1024, 4096))
    faults = machine.check("cpu").faults
    assert len(faults) == 3
    assert "--shm-size=16g" in faults[0]
    assert "ulimit -n 65536" in faults[2]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What torch says of two H100s."""
    about = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85e9, major=9, minor=0)
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda _index: about,
        "mem_get_info": lambda _index: (int(0.99 * about.total_memory), int(about.total_memory)),
        "is_bf16_supported": lambda: about.major >= 8,
        "can_device_access_peer": lambda _one, _other: True,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(machine, "is_nccl_available", lambda: True)
    return about


def test_gpus_that_torch_sees_are_noted_with_their_name_in_a_plan(two_gpus: SimpleNamespace) -> None:
    with CudaAsCpu():
        found = machine.check("cuda")
    assert found.faults == []
    assert found.numbers["GPU 1 in a plan"] == "H100-80"
    assert found.numbers["pairs of GPUs with peer access"] == "2 of 2"
    assert found.numbers["NCCL"] == "2.28.9"


def test_a_gpu_that_is_too_old_is_a_fault(two_gpus: SimpleNamespace) -> None:
    two_gpus.major = 7
    with CudaAsCpu():
        faults = machine.check("cuda").faults
    assert "GPU 0 is older than Ampere: neither bf16 nor flash attention is computed there" in faults
    assert "torch says that this GPU has no bf16" in faults


def test_publication_with_one_gpu_says_that_it_needs_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(serving.NotRun, match="it needs two GPUs, and torch sees 1"):
        serving.publication("cuda")
