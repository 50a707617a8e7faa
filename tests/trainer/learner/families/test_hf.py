import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from benchmarks.small_models import (
    DELTA_NET,
    EXPERTS,
    GLM4_MOE,
    GPT_OSS,
    MINIMAX_M2,
    MINISTRAL3,
    QWEN3_NEXT,
    SEEING,
    write_model,
)
from tests.trainer.learner.tiny import (
    config,
    gradients,
    make_samples,
    read_export,
    read_reference,
    reference_logprobs,
    take_step,
)
from trainer.learner import backend, export, hf
from trainer.learner.attention import Packing, Rotary
from trainer.learner.config import LossConfig
from trainer.learner.families.registry import has_packed_weights, read_architecture
from trainer.learner.logprobs import output_weight
from trainer.learner.megatron import Learner
from trainer.learner.model import build_model
from trainer.learner.parameters import Parameter

DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, as 3.1 stretches": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "qwen2": {},
    "mistral": {"head_dim": 32, "sliding_window": None},
    "mistral, windows": {"sliding_window": 6},
    "ministral3": MINISTRAL3,
    "seed_oss": {"head_dim": 32, "pad_token_id": None},
    "seed_oss, without biases": {"head_dim": 16, "attention_bias": False, "pad_token_id": None},
    "smollm3, tied": {"num_hidden_layers": 5, "pad_token_id": None},
    "smollm3, with a list of layers": {
        "no_rope_layers": [0, 1],
        "tie_word_embeddings": False,
        "pad_token_id": None,
    },
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


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe, renormalised": EXPERTS | {"norm_topk_prob": True},
    "qwen3_moe, as the softmax gives them": EXPERTS | {"norm_topk_prob": False},
    "glm4_moe": GLM4_MOE,
    "glm4_moe, as Air": GLM4_MOE
    | {"use_qk_norm": False, "routed_scaling_factor": 1.0, "first_k_dense_replace": 2},
    "minimax_m2": MINIMAX_M2,
    "gpt_oss": GPT_OSS,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_moe": QWEN3_NEXT | SEEING,
    "qwen3_next, one value head for a key head": QWEN3_NEXT
    | {"linear_num_value_heads": 4, "norm_topk_prob": False, "layer_types": None},
}
LINEAR: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA_NET,
    "qwen3_5": SEEING,
    "qwen3_5_text, tied": DELTA_NET | {"tie_word_embeddings": True, "linear_conv_kernel_dim": 3},
}
"""Dense families whose chunks of linear attention are computed in another order than by transformers."""
FAMILIES = DENSE | MIXTURES | LINEAR
FAR_POSITION = 32_000


@pytest.fixture(scope="module", params=FAMILIES)
def model_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(request.param, tmp_path_factory)


@pytest.fixture(scope="module", params=DENSE)
def dense_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(request.param, tmp_path_factory)


def made(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), name.split(",")[0], **FAMILIES[name])


def logits_of(directory: Path, tokens: Tensor, *, first_position: int = 0) -> Tensor:
    """By our model, in one packed pass over one sample."""
    backend.lay_out(tensor_parallel=1, pipeline_parallel=1)
    architecture = read_architecture(directory)
    boundaries = torch.tensor([0, len(tokens)], dtype=torch.int32, device=backend.device())
    rotary, positions = (
        Rotary(architecture),
        torch.arange(len(tokens), device=backend.device()) + first_position,
    )
    cosines, sines = rotary.angles(positions)
    packing = Packing(
        "thd",
        boundaries,
        boundaries,
        max_seqlen_q=len(tokens),
        max_seqlen_kv=len(tokens),
        cosines_L1D=cosines,
        sines_L1D=sines,
        query_scales_L11=rotary.query_scales(positions),
    )
    with backend.device_scope(), torch.no_grad():
        model = build_model(architecture, config())
        hf.read_weights(model, architecture, directory)
        model.to(backend.device())
        hidden = model(tokens[None].to(backend.device()), None, None, packed_seq_params=packing)[:, 0]
        return (hidden @ output_weight(model).T).cpu()


def reference_logits(directory: Path, tokens: Tensor, *, first_position: int = 0) -> Tensor:
    positions = torch.arange(len(tokens))[None] + first_position
    with torch.no_grad():
        return read_reference(directory)(tokens[None], position_ids=positions).logits[0]


@pytest.mark.cpu_only
def test_logits_are_those_of_hugging_face_bit_for_bit(dense_directory: Path) -> None:
    tokens = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(logits_of(dense_directory, tokens), reference_logits(dense_directory, tokens))


@pytest.mark.parametrize("first_position", [0, FAR_POSITION])
def test_logits_are_those_of_hugging_face(model_directory: Path, first_position: int) -> None:
    tokens = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(1))
    expected = reference_logits(model_directory, tokens, first_position=first_position)
    found = logits_of(model_directory, tokens, first_position=first_position)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.cpu_only
def test_gates_of_gpt_oss_are_clamped_where_those_of_hugging_face_are(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "gpt_oss", **GPT_OSS)
    tensors = load_file(directory / "model.safetensors")
    widened = {name: one * 200 if "gate_up_proj" in name else one for name, one in tensors.items()}
    save_file(widened, directory / "model.safetensors", metadata={"format": "pt"})
    tokens = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(1))
    expected = reference_logits(directory, tokens)
    torch.testing.assert_close(logits_of(directory, tokens), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.cpu_only
def test_logits_at_far_positions_are_those_of_hugging_face_bit_for_bit(dense_directory: Path) -> None:
    tokens = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(1))
    far = {"first_position": FAR_POSITION}
    assert torch.equal(
        logits_of(dense_directory, tokens, **far), reference_logits(dense_directory, tokens, **far)
    )


def test_log_probs_and_every_gradient_are_those_of_hugging_face(model_directory: Path) -> None:
    samples, reference = make_samples(), read_reference(model_directory)
    learner = Learner(
        config(clip_grad=0.0, loss=LossConfig(kind="reinforce")), model_directory=model_directory
    )
    logprobs = learner.logprobs(samples, 1.0)
    take_step(learner, samples)
    loss = torch.zeros(())
    for sample, observed in zip(samples, logprobs, strict=True):
        expected, trained = reference_logprobs(reference, sample), torch.from_numpy(sample.trained_T[1:])
        torch.testing.assert_close(
            torch.from_numpy(observed[1:])[trained], expected[trained], rtol=0, atol=1e-5
        )
        loss -= (expected * torch.from_numpy(sample.advantages_T[1:]))[trained].sum()
    (loss / sum(int(sample.trained_T.sum()) for sample in samples)).backward()
    names = read_export(model_directory).keys()
    expected_gradients = {
        name: gradient
        for parameter, one in reference.named_parameters()
        if one.grad is not None
        for name, gradient in as_published(names, parameter, one.grad)
    }
    scale = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    architecture = learner._architecture
    table = hf.parameters(learner._model, architecture)
    # A tensor that holds all experts is joined from all of them.
    of_origins = defaultdict[tuple[str, ...], list[tuple[Parameter, Tensor]]](list)
    for name, gradient in gradients(learner).items():
        of_origins[table[name].origins].append((table[name], gradient))
    found = {}
    for origins, held in of_origins.items():
        parameter, gradient = held[0]
        pieces = torch.stack([one for _, one in held]) if parameter.is_of_all else gradient
        found |= zip(origins, hf.join(parameter, [pieces.cpu()], architecture), strict=True)
    assert found.keys() == expected_gradients.keys()
    for name, expected in expected_gradients.items():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-5 * scale)


def as_published(names: Collection[str], name: str, gradient: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Tensors by their `names` in files, where in most families each expert has its own; transformers stacks all experts of a layer. It
    names the tensors of a model that also sees as those of its language model, and MiniMax's as if it had an MLP.
    """
    gate, up, down = "gate_proj", "up_proj", "down_proj"
    if any(".block_sparse_moe." in one for one in names):
        name, gate, up, down = name.replace(".mlp.", ".block_sparse_moe."), "w1", "w3", "w2"
    for published in (name, name.replace("model.", "model.language_model.", 1)):
        if published in names:
            yield published, gradient
            return
    match name.rpartition(".experts."):
        case layer, ".experts.", "gate_up_proj":
            for expert, both in enumerate(gradient):
                for part, half in zip((gate, up), both.chunk(2), strict=True):
                    yield f"{layer}.experts.{expert}.{part}.weight", half
        case layer, ".experts.", "down_proj":
            for expert, one in enumerate(gradient):
                yield f"{layer}.experts.{expert}.{down}.weight", one


@pytest.mark.slow
def test_weights_come_back_bit_for_bit_from_a_checkpoint(model_directory: Path, tmp_path: Path) -> None:
    export.to_checkpoint(model_directory, tmp_path / "checkpoint", config())
    export.to_hugging_face(
        tmp_path / "checkpoint", tmp_path / "back", config(), model_directory=model_directory
    )
    before, after = read_export(model_directory), read_export(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("swapped", ["queries and keys", "strengths and decays"])
def test_swapped_weights_of_a_delta_net_would_be_noticed(tmp_path: Path, swapped: str) -> None:
    directory = write_model(tmp_path / "model", "qwen3_5_text", **DELTA_NET)
    shutil.copytree(directory, tmp_path / "swapped")
    tensors = load_file(directory / hf.SINGLE_FILE)
    mixed, strengths, decays = (
        f"model.layers.0.linear_attn.in_proj_{one}.weight" for one in ("qkv", "b", "a")
    )
    if swapped == "queries and keys":
        queries, keys, values = tensors[mixed].split([64, 64, 192])
        tensors[mixed] = torch.cat([keys, queries, values])
    else:
        tensors[strengths], tensors[decays] = tensors[decays], tensors[strengths]
    save_file(tensors, tmp_path / "swapped" / hf.SINGLE_FILE)
    tokens = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(1))
    difference = logits_of(tmp_path / "swapped", tokens) - reference_logits(directory, tokens)
    assert difference.abs().max() > 0.1


@pytest.mark.parametrize(
    "swapped", [("mlp.gate_proj", "mlp.up_proj"), ("self_attn.k_proj", "self_attn.v_proj")]
)
def test_swapped_weights_would_be_noticed(
    dense_directory: Path, tmp_path: Path, swapped: tuple[str, str]
) -> None:
    shutil.copytree(dense_directory, tmp_path / "swapped")
    tensors = load_file(dense_directory / hf.SINGLE_FILE)
    left, right = (f"model.layers.1.{name}.weight" for name in swapped)
    tensors[left], tensors[right] = tensors[right], tensors[left]
    save_file(tensors, tmp_path / "swapped" / hf.SINGLE_FILE)
    tokens = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(1))
    difference = logits_of(tmp_path / "swapped", tokens) - reference_logits(dense_directory, tokens)
    assert difference.abs().max() > 0.1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model.norm.weight": None}, "has no tensor model.norm.weight"),
        (
            {"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)},
            "model.norm.weight has numbers of type torch.float8_e4m3fn",
        ),
        (
            {"lm_head.weight": torch.ones(48, 64)},
            r"output_layer.weight \(64, 64\), and the weights have lm_head.weight \(48, 64\)",
        ),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_refused_by_name(
    qwen3: Path, tmp_path: Path, change: dict[str, Tensor | None], named: str
) -> None:
    shutil.copytree(qwen3, tmp_path / "changed")
    tensors = load_file(qwen3 / hf.SINGLE_FILE) | change
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        tmp_path / "changed" / hf.SINGLE_FILE,
    )
    with pytest.raises(ValueError, match=named):
        Learner(config(), model_directory=tmp_path / "changed")


def test_an_output_layer_of_its_own_is_refused_where_the_config_says_that_it_is_the_embedding(
    tied_llama: Path, tmp_path: Path
) -> None:
    shutil.copytree(tied_llama, tmp_path / "untied")
    tensors = load_file(tied_llama / hf.SINGLE_FILE)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, tmp_path / "untied" / hf.SINGLE_FILE)
    Learner(config(), model_directory=tmp_path / "untied")
    save_file(tensors | {"lm_head.weight": embedding + 1}, tmp_path / "untied" / hf.SINGLE_FILE)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        Learner(config(), model_directory=tmp_path / "untied")


def test_experts_in_four_bits_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "plain", "gpt_oss", **GPT_OSS)
    tensors, packed = load_file(directory / hf.SINGLE_FILE), dict[str, Tensor]()
    generator = torch.Generator().manual_seed(2)
    for name, tensor in list(tensors.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, num_inputs, num_outputs = tensor.shape
        shape = (experts, num_outputs, num_inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales).float().contiguous()
    save_file(tensors, directory / hf.SINGLE_FILE)
    shutil.copytree(directory, tmp_path / "packed")
    outside = {name: one for name, one in tensors.items() if f"{name}_blocks" not in packed}
    save_file(outside | packed, tmp_path / "packed" / hf.SINGLE_FILE)
    described = msgspec.json.decode((directory / "config.json").read_bytes())
    described["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "packed" / "config.json").write_bytes(msgspec.json.encode(described))
    Learner(config(), model_directory=tmp_path / "packed").export(tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / hf.SINGLE_FILE)
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], tensors[name]) for name in tensors)
    assert b"quantization_config" not in (tmp_path / "exported" / "config.json").read_bytes()


def test_weights_in_eight_bits_are_read_with_the_scale_of_each_block(tmp_path: Path) -> None:
    # Matrices of 192 have a block that is not full.
    directory = write_model(tmp_path / "plain", "minimax_m2", **MINIMAX_M2 | {"hidden_size": 192})
    tensors, packed = load_file(directory / hf.SINGLE_FILE), dict[str, Tensor]()
    generator = torch.Generator().manual_seed(2)
    for name, tensor in tensors.items():
        packed[name] = tensor
        if not name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight")):
            continue
        rows, columns = tensor.shape
        packed[name] = (tensor * 100).to(torch.float8_e4m3fn)
        scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) / 100
        packed[f"{name}_scale_inv"] = scales
        of_each = scales[torch.arange(rows)[:, None] // 128, torch.arange(columns) // 128]
        tensors[name] = packed[name].float() * of_each
    save_file(packed, directory / hf.SINGLE_FILE)
    described = msgspec.json.decode((directory / "config.json").read_bytes())
    described["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_bytes(msgspec.json.encode(described))
    Learner(config(), model_directory=directory).export(tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / hf.SINGLE_FILE)
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], tensors[name]) for name in tensors)
    assert not has_packed_weights(tmp_path / "exported")


def test_scales_of_other_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scales of shape \(3, 1\) instead of \(2, 1\)"):
        hf.from_fp8(torch.zeros(192, 64).to(torch.float8_e4m3fn), torch.ones(3, 1))


@pytest.mark.parametrize(
    "tensor", [torch.zeros(128, 64), torch.zeros(2, 128, 64).to(torch.float8_e4m3fn)], ids=["plain", "of all"]
)
def test_scales_of_what_is_no_matrix_in_eight_bits_are_refused(tensor: Tensor) -> None:
    with pytest.raises(ValueError, match="has scales, which are read for matrices"):
        hf.from_fp8(tensor, torch.ones(1, 1))


def test_packed_weights_of_which_the_config_says_nothing_are_refused(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", "minimax_m2", **MINIMAX_M2)
    tensors, name = load_file(directory / hf.SINGLE_FILE), "model.layers.0.self_attn.o_proj.weight"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    save_file(tensors, directory / hf.SINGLE_FILE)
    with pytest.raises(ValueError, match=r"config\.json has no quantization_config"):
        Learner(config(), model_directory=directory)


def test_no_table_of_an_exported_config_says_that_weights_are_packed(tmp_path: Path) -> None:
    packed = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    described = packed | {"text_config": packed | {"model_type": "qwen3_5_text"}}
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "source" / "config.json").write_bytes(msgspec.json.encode(described))
    export.copy_description(tmp_path / "source", tmp_path / "target", torch.bfloat16)
    assert not has_packed_weights(tmp_path / "target")


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
