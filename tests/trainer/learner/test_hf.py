import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.trainer.learner.tiny import config, make_samples, read_reference, write_model
from trainer.learner import backend, export, hf
from trainer.learner.architecture import read_architecture
from trainer.learner.attention import Packing, Rotary
from trainer.learner.logprobs import output_weight
from trainer.learner.megatron import Learner
from trainer.learner.model import build_model

FAMILIES = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3, heads x head_dim != hidden": {"head_dim": 32},
    "qwen3, YaRN": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen3, YaRN with every key": {
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.4,
            "truncate": False,
        },
    },
    "qwen3, theta": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}


@pytest.fixture(scope="module", params=FAMILIES)
def model_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = request.param.split(",")[0]
    return write_model(tmp_path_factory.mktemp("model"), family, **FAMILIES[request.param])


def logits_of(directory: Path, tokens: Tensor) -> Tensor:
    """By our model, in one packed pass over one sample."""
    backend.lay_out(tensor_parallel=1, pipeline_parallel=1)
    architecture = read_architecture(directory)
    boundaries = torch.tensor([0, len(tokens)], dtype=torch.int32, device=backend.device())
    cosines, sines = Rotary(architecture).angles(torch.arange(len(tokens), device=backend.device()))
    packing = Packing(
        "thd",
        boundaries,
        boundaries,
        max_seqlen_q=len(tokens),
        max_seqlen_kv=len(tokens),
        cosines_L1D=cosines,
        sines_L1D=sines,
    )
    with backend.device_scope(), torch.no_grad():
        model = build_model(architecture, config())
        hf.read_weights(model, directory)
        model.to(backend.device())
        hidden = model(tokens[None].to(backend.device()), None, None, packed_seq_params=packing)[:, 0]
        return (hidden @ output_weight(model).T).cpu()


def reference_logits(directory: Path, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return read_reference(directory)(tokens[None]).logits[0]


@pytest.mark.cpu_only
def test_logits_are_those_of_hugging_face_bit_for_bit(model_directory: Path) -> None:
    tokens = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(logits_of(model_directory, tokens), reference_logits(model_directory, tokens))


def test_logits_are_those_of_hugging_face(model_directory: Path) -> None:
    tokens = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(1))
    expected = reference_logits(model_directory, tokens)
    torch.testing.assert_close(logits_of(model_directory, tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "swapped", [("mlp.gate_proj", "mlp.up_proj"), ("self_attn.k_proj", "self_attn.v_proj")]
)
def test_swapped_weights_would_be_noticed(
    model_directory: Path, tmp_path: Path, swapped: tuple[str, str]
) -> None:
    shutil.copytree(model_directory, tmp_path / "swapped")
    tensors = load_file(model_directory / hf.SINGLE_FILE)
    left, right = (f"model.layers.1.{name}.weight" for name in swapped)
    tensors[left], tensors[right] = tensors[right], tensors[left]
    save_file(tensors, tmp_path / "swapped" / hf.SINGLE_FILE)
    tokens = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(1))
    difference = logits_of(tmp_path / "swapped", tokens) - reference_logits(model_directory, tokens)
    assert difference.abs().max() > 0.1


def test_what_is_exported_untrained_is_what_was_read(model_directory: Path, tmp_path: Path) -> None:
    Learner(config(), model_directory=model_directory).export(tmp_path / "exported")
    before, after = (
        load_file(model_directory / hf.SINGLE_FILE),
        load_file(tmp_path / "exported" / hf.SINGLE_FILE),
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {path.name for path in (tmp_path / "exported").iterdir()} == {
        path.name for path in model_directory.iterdir()
    }
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]


def test_an_export_in_shards_reads_back(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "SHARD_BYTES", 20_000)
    Learner(config(), model_directory=model_directory).export(tmp_path / "sharded")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    before = load_file(model_directory / hf.SINGLE_FILE)
    after = hf.SafetensorsDirectory(tmp_path / "sharded")
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokens = torch.arange(20)
    assert torch.equal(
        reference_logits(model_directory, tokens), reference_logits(tmp_path / "sharded", tokens)
    )


def test_an_export_names_the_type_of_its_numbers(qwen3: Path, tmp_path: Path) -> None:
    Learner(config(dtype="bf16"), model_directory=qwen3).export(tmp_path / "half")
    assert load_file(tmp_path / "half" / hf.SINGLE_FILE)["model.norm.weight"].dtype == torch.bfloat16
    assert read_reference(tmp_path / "half").config.dtype == torch.float32
    assert msgspec.json.decode((tmp_path / "half" / "config.json").read_bytes())["dtype"] == "bfloat16"


def test_an_export_replaces_the_directory_that_was_there(qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "stale").touch()
    Learner(config(), model_directory=qwen3).export(tmp_path / "latest")
    assert not (tmp_path / "latest" / "stale").exists()
    assert Learner(config(), model_directory=tmp_path / "latest").logprobs(make_samples((5,)), 1.0)
