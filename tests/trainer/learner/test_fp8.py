"""Weights in FP8 with a scale for each block: their numbers, the directories that have them, and what is lost."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.small_models import EXPERTS, write_model
from tests.trainer.learner.tiny import config, make_samples, read_export, take_step, trained_throughout
from trainer.learner import hf
from trainer.learner.families.registry import read_architecture
from trainer.learner.fp8 import to_fp8, write_fp8
from trainer.learner.megatron import Learner
from trainer.learner.precision import fp8_faults, scale_name, version_bytes
from trainer.plan.division import num_parameters

DENSE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 128}
MIXTURE = EXPERTS | {
    "hidden_size": 256,
    "head_dim": 128,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
SHAPES: dict[str, dict[str, Any]] = {"qwen3": DENSE, "qwen3_moe": MIXTURE}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small models in FP8, by family; beside each, named `plain`, the weights that it was made of."""
    made = dict[str, Path]()
    for family, shape in SHAPES.items():
        place = tmp_path_factory.mktemp(family)
        write_fp8(write_model(place / "plain", family, **shape), place / "fp8")
        made[family] = place / "fp8"
    return made


def step_of(scaled: Tensor) -> Tensor:
    """The distance between neighbours in E4M3 around numbers: 3 bits of mantissa, and 2**-9 below the least normal number, 2**-6."""
    return torch.exp2(torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-6))) - 3)


@pytest.mark.parametrize("shape", [(256, 384), (192, 320), (1, 5), (2048 + 40, 130)], ids=str)
def test_each_block_is_divided_by_its_largest_magnitude_over_448_and_rounded_to_the_nearest(
    shape: tuple[int, int],
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    matrix[:1, :1] = -7.0
    numbers, scales = to_fp8(matrix)
    assert (numbers.dtype, numbers.shape) == (torch.float8_e4m3fn, matrix.shape)
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    assert float(hf.from_fp8(numbers, scales)[0, 0]) == pytest.approx(-7.0)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = (slice(128 * row, 128 * (row + 1)), slice(128 * column, 128 * (column + 1)))
            block = matrix[place].float()
            assert scales[row, column] == block.abs().max() / 448
            scaled = block / scales[row, column]
            rounded = numbers[place].float()
            assert torch.equal(rounded, scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float())
            assert bool(((rounded - scaled).abs() <= step_of(scaled) / 2 * (1 + 1e-6)).all())


def test_a_block_of_zeros_stays_zero() -> None:
    numbers, scales = to_fp8(torch.zeros(128, 256))
    assert torch.equal(scales, torch.ones(1, 2))
    assert not numbers.float().any()


@pytest.mark.parametrize("family", SHAPES)
def test_transformers_reads_the_same_numbers(packed: dict[str, Path], family: str) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(packed[family], dtype=torch.float32).state_dict()
    ours = hf.SafetensorsDirectory(packed[family])
    for name in ("self_attn.q_proj.weight", "self_attn.o_proj.weight"):
        assert torch.equal(theirs[f"model.layers.1.{name}"], ours[f"model.layers.1.{name}"])
    if family == "qwen3":
        assert torch.equal(
            theirs["model.layers.0.mlp.up_proj.weight"], ours["model.layers.0.mlp.up_proj.weight"]
        )
        return
    gate_up = theirs["model.layers.0.mlp.experts.gate_up_proj"]
    for expert in range(8):
        name = f"model.layers.0.mlp.experts.{expert}"
        both = torch.cat([ours[f"{name}.gate_proj.weight"], ours[f"{name}.up_proj.weight"]])
        assert torch.equal(gate_up[expert], both)


@pytest.mark.parametrize("family", SHAPES)
def test_what_is_packed_is_the_projections_and_the_config_names_the_other_modules(
    packed: dict[str, Path], family: str
) -> None:
    plain, made = read_export(packed[family].with_name("plain")), read_export(packed[family])
    chosen = {name for name, tensor in made.items() if tensor.dtype == torch.float8_e4m3fn}
    assert chosen == {name for name in plain if name.endswith("_proj.weight")}
    assert made.keys() == plain.keys() | set(map(scale_name, chosen))
    for name in chosen:
        assert made[name].shape == plain[name].shape
        assert made[scale_name(name)].dtype == torch.float32
    for name in plain.keys() - chosen:
        assert torch.equal(made[name], plain[name])
    keys = msgspec.json.decode((packed[family] / "config.json").read_bytes())["quantization_config"]
    gates = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
    assert keys == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *(gates if family == "qwen3_moe" else ())],
    }


@pytest.mark.parametrize("family", SHAPES)
def test_an_untrained_version_has_the_names_types_and_packed_numbers_of_the_model(
    packed: dict[str, Path], family: str, tmp_path: Path
) -> None:
    base = read_export(packed[family])
    learner = Learner(config(dtype="bf16"), model_directory=packed[family], packs_exports=True)
    learner.export(tmp_path / "v0")
    first = read_export(tmp_path / "v0")
    assert {name: (one.dtype, one.shape) for name, one in first.items()} == {
        name: (
            one.dtype if one.dtype == torch.float8_e4m3fn or "_scale_inv" in name else torch.bfloat16,
            one.shape,
        )
        for name, one in base.items()
    }
    for name, tensor in base.items():
        if tensor.dtype == torch.float8_e4m3fn:
            assert torch.equal(first[name].view(torch.uint8), tensor.view(torch.uint8))
            torch.testing.assert_close(first[scale_name(name)], base[scale_name(name)], rtol=2**-8, atol=0)
    keys = [
        msgspec.json.decode((one / "config.json").read_bytes()) for one in (packed[family], tmp_path / "v0")
    ]
    assert keys[0]["quantization_config"] == keys[1]["quantization_config"]


def test_a_trained_version_is_the_packed_form_of_what_the_learner_has(
    packed: dict[str, Path], tmp_path: Path
) -> None:
    learner = Learner(config(dtype="bf16"), model_directory=packed["qwen3"], packs_exports=True)
    take_step(learner, make_samples())
    learner.save(tmp_path / "checkpoint", b"")
    learner.export(tmp_path / "version")
    whole = Learner(config(dtype="bf16"), model_directory=packed["qwen3"])
    whole.restore(tmp_path / "checkpoint")
    whole.export(tmp_path / "whole")
    version, exported = read_export(tmp_path / "version"), read_export(tmp_path / "whole")
    assert b"quantization_config" not in (tmp_path / "whole" / "config.json").read_bytes()
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    for name, tensor in exported.items():
        if name.endswith("_proj.weight"):
            numbers, scales = to_fp8(tensor)
            assert torch.equal(version[name].view(torch.uint8), numbers.view(torch.uint8))
            assert torch.equal(version[scale_name(name)], scales)
        else:
            assert torch.equal(version[name], tensor)


@pytest.mark.parametrize("family", SHAPES)
def test_the_bytes_that_a_plan_counts_are_those_of_the_files(
    packed: dict[str, Path], family: str, tmp_path: Path
) -> None:
    architecture = read_architecture(packed[family])
    Learner(config(dtype="bf16"), model_directory=packed[family], packs_exports=True).export(tmp_path / "v0")
    version = read_export(tmp_path / "v0")
    assert version_bytes(architecture, value_bytes=2, fp8_except=()) == sum(
        one.nbytes for one in version.values()
    )
    assert version_bytes(architecture, value_bytes=2) == 2 * num_parameters(architecture)
    left_out = ["model.layers.1", "lm_head"]
    expected = sum(
        one.nbytes if "layers.0." in name else 2 * one.numel()
        for name, one in version.items()
        if "_inv" not in name
    ) + sum(one.nbytes for name, one in version.items() if "layers.0." in name and "_inv" in name)
    assert version_bytes(architecture, value_bytes=2, fp8_except=left_out) == expected


def test_packed_weights_move_log_probs_more_than_bf16_does_and_not_without_bounds(tmp_path: Path) -> None:
    """The rounding of weights alone; engines round what they multiply them with, too."""
    plain = write_model(tmp_path / "plain", "qwen3", **DENSE | {"initializer_range": 0.02})
    write_fp8(plain, tmp_path / "fp8")
    samples = trained_throughout(make_samples())

    def logprobs(directory: Path, **changes: Any) -> np.ndarray:
        return np.concatenate(Learner(config(**changes), model_directory=directory).logprobs(samples, 1.0))

    exact = logprobs(plain)
    of_bf16, of_fp8 = (
        np.abs(one - exact) for one in (logprobs(plain, dtype="bf16"), logprobs(tmp_path / "fp8"))
    )
    for name, gap in (("bf16", of_bf16), ("FP8", of_fp8)):
        print(f"{name}: {gap.size} tokens, mean {gap.mean():.2e}, largest {gap.max():.2e} nats")
    assert of_bf16.mean() < of_fp8.mean() < 0.1
    assert of_fp8.max() < 0.5


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", DENSE, "SGLang's loader of llama takes no scales of blocks"),
        (
            "qwen3",
            DENSE | {"hidden_size": 192},
            "self_attn.q_proj has 192 inputs, which is no multiple of 128",
        ),
        ("qwen3", DENSE | {"head_dim": 32}, "self_attn.k_proj has 64 outputs, which is no multiple of 128"),
        (
            "qwen3_moe",
            MIXTURE | {"moe_intermediate_size": 96},
            "mlp.experts.{expert}.down_proj has 96 inputs",
        ),
    ],
    ids=["family", "inputs", "heads", "experts"],
)
def test_models_that_engines_cannot_serve_in_eight_bits_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], words: str
) -> None:
    plain = write_model(tmp_path / "plain", family, **changes)
    with pytest.raises(ValueError, match=r"weights\.precision") as refused:
        write_fp8(plain, tmp_path / "fp8")
    assert words in str(refused.value)
    assert 'set weights.precision = "learner"' in str(refused.value)
    assert not (tmp_path / "fp8").exists()


def test_each_gpu_of_an_engine_must_have_whole_blocks(packed: dict[str, Path]) -> None:
    architecture = read_architecture(packed["qwen3"])
    assert not list(fp8_faults(architecture, engine_gpus=1))
    faults = list(fp8_faults(architecture, engine_gpus=2))
    assert [fault.split(": ")[1].split(",")[0] for fault in faults] == [
        "mlp.gate_proj has 192 outputs on each of the 2 GPUs of an engine",
        "mlp.up_proj has 192 outputs on each of the 2 GPUs of an engine",
        "mlp.down_proj has 192 inputs on each of the 2 GPUs of an engine",
    ]
    assert all("lower plan.engine_gpus" in fault for fault in faults)


def test_packed_weights_are_not_packed_again(packed: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has packed weights already"):
        write_fp8(packed["qwen3"], tmp_path / "again")


def test_shards_get_an_index_that_names_the_scales(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain", "qwen3", **DENSE)
    AutoModelForCausalLM.from_pretrained(plain).save_pretrained(plain, max_shard_size="1MB")
    (plain / hf.SINGLE_FILE).unlink(missing_ok=True)
    write_fp8(plain, tmp_path / "fp8")
    index = msgspec.json.decode((tmp_path / "fp8" / hf.INDEX_FILE).read_bytes())
    held = dict[str, str]()
    for path in (tmp_path / "fp8").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            held |= dict.fromkeys(file.keys(), path.name)
    assert len(set(held.values())) > 1
    assert index["weight_map"] == held
    Learner(config(), model_directory=tmp_path / "fp8")
