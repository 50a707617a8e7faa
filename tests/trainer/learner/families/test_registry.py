"""What a model's config.json must say, and which layouts divide it."""

from pathlib import Path

import msgspec
import pytest

from tests.trainer.learner.tiny import config
from trainer.learner.architecture import layout_faults
from trainer.learner.families.registry import read_architecture
from trainer.learner.model import build_model

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MINIMAX = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "rotary_dim": 16,
    "use_qk_norm": True,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
}
GLM = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OSS = {"num_local_experts": 8, "num_experts_per_tok": 2, "attention_bias": True}
HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": None,
    "rope_parameters": None,
}
NEXT = HYBRID | {"num_experts": 8, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 64}},
            "factor",
        ),
        ({"rope_parameters": YARN | {"attention_factor": 1.2}}, "attention_factor"),
        ({"rope_parameters": YARN | {"attn_factor": 1.2}}, "attn_factor"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": YARN}, "rope_scaling beside another rope_parameters"),
        (
            {"rope_parameters": YARN, "original_max_position_embeddings": 64},
            "original_max_position_embeddings beside another",
        ),
        ({"rope_parameters": YARN | {"beta_fast": 0.0}}, "beta_fast and beta_slow above 0"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1]}}, "a rope mrope_section"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
        ({"compression_config": {"format": "float-quantized"}}, "compression_config"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"model_type": "qwen3_next", **NEXT, "decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ({"model_type": "qwen3_next", **HYBRID, "num_experts_per_tok": 2}, "num_experts is missing"),
        ({"model_type": "qwen3_next", **NEXT, "mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"model_type": "qwen3_next", **NEXT, "num_experts_per_tok": 1}, "num_experts_per_tok 1"),
        (
            {"model_type": "qwen3_next", **NEXT, "shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size 0",
        ),
        ({"model_type": "qwen3_5_text", **HYBRID, "attn_output_gate": False}, "attn_output_gate false"),
        (
            {
                "model_type": "qwen3_5_text",
                **HYBRID,
                "layer_types": ["linear_attention", "sliding_attention"],
            },
            "layer_types .'linear_attention', 'sliding_attention'.",
        ),
        (
            {"model_type": "qwen3_5_text", **HYBRID, "layer_types": ["linear_attention"]},
            "layer_types of 1 layers",
        ),
        (
            {"model_type": "qwen3_5_text", **HYBRID, "linear_num_value_heads": 5},
            "linear_num_value_heads 5 for linear_num_key_heads 2",
        ),
        (
            {"model_type": "qwen3_5_text", **HYBRID, "architectures": ["Qwen3_5ForConditionalGeneration"]},
            "Qwen3_5ForConditionalGeneration",
        ),
        ({"model_type": "gpt_oss", **OSS, "attention_bias": False}, "attention_bias false"),
        (
            {"model_type": "gpt_oss", **OSS, "layer_types": ["linear_attention", "full_attention"]},
            "layer_types .'linear_attention', 'full_attention'.",
        ),
        ({"model_type": "gpt_oss", **OSS, "layer_types": ["full_attention"]}, "layer_types of 1 layers"),
        (
            {"model_type": "gpt_oss", **OSS, "quantization_config": {"quant_method": "fp8"}},
            "quantization_config",
        ),
        (
            {"model_type": "mistral", "sliding_window": None, "partial_rotary_factor": 0.5},
            "partial_rotary_factor",
        ),
        (
            {"model_type": "ministral3", "rope_parameters": YARN},
            "rope_parameters.llama_4_scaling_beta or .* is missing",
        ),
        ({"model_type": "seed_oss", "attention_out_bias": True}, "attention_out_bias"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval must be 1 or more"),
        ({"model_type": "glm4_moe", **GLM, "num_experts_per_tok": 1}, "num_experts_per_tok 1"),
        ({"model_type": "minimax_m2", **MINIMAX, "num_experts_per_tok": 1}, "num_experts_per_tok 1"),
        ({"model_type": "minimax_m2", **MINIMAX, "use_qk_norm": False}, "use_qk_norm false"),
        ({"model_type": "minimax_m2", **MINIMAX, "tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"model_type": "minimax_m2", **MINIMAX, "qk_norm_type": "per_head"}, "qk_norm_type 'per_head'"),
        ({"model_type": "minimax_m2", **MINIMAX, "scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"model_type": "minimax_m2", **MINIMAX, "use_routing_bias": False}, "use_routing_bias false"),
        ({"model_type": "minimax_m2", **MINIMAX, "shared_intermediate_size": 8}, "shared_intermediate_size"),
        ({"model_type": "minimax_m2", **MINIMAX, "attn_type_list": [1, 0]}, "attn_type_list"),
        (
            {"model_type": "minimax_m2", **MINIMAX, "partial_rotary_factor": 0.5},
            "rotary_dim 16 beside partial_rotary_factor 0.5",
        ),
        (
            {
                "model_type": "minimax_m2",
                **MINIMAX,
                "quantization_config": FP8 | {"weight_block_size": [1, 128]},
            },
            "quantization_config",
        ),
        ({"model_type": "glm4_moe", **GLM, "routed_scaling_factor": 0.0}, "routed_scaling_factor 0"),
        ({"model_type": "glm4_moe", **GLM, "n_group": 4, "topk_group": 2}, "n_group 4 with topk_group 2"),
        ({"model_type": "glm4_moe", **GLM, "norm_topk_prob": False}, "norm_topk_prob false"),
        (
            {
                "model_type": "glm4_moe",
                **GLM,
                "partial_rotary_factor": 0.25,
                "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
            },
            "partial_rotary_factor beside another one",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers has 1 entries for 2 layers"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
        (
            {
                "rope_parameters": YARN
                | {"rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 1.0}
            },
            "low_freq_factor above 0 and below",
        ),
    ],
)
def test_what_cannot_be_trained_as_defined_is_refused_by_name(
    qwen3: Path, tmp_path: Path, change: dict[str, object], named: str
) -> None:
    original = msgspec.json.decode((qwen3 / "config.json").read_bytes())
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(original | change))
    with pytest.raises(ValueError, match=named):
        read_architecture(tmp_path)


def test_the_first_words_about_a_model_that_is_refused_are_those_that_can_be_trained(
    qwen3: Path, tmp_path: Path
) -> None:
    inner = msgspec.json.decode((qwen3 / "config.json").read_bytes(), type=dict[str, object])
    # A language model of a kind that is trained, within one that also sees: its weights have other names, and more of them.
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({"model_type": "sees", "text_config": inner}))
    with pytest.raises(ValueError, match="model_type 'sees'") as raised:
        read_architecture(tmp_path)
    scaled = inner | {"rope_parameters": {"rope_type": "dynamic"}}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(scaled))
    with pytest.raises(
        ValueError, match=r"config.json has rope_type 'dynamic', which the learner does not compute"
    ):
        read_architecture(tmp_path)
    assert str(raised.value).startswith(
        "the learner trains Llama 2 and 3 to 3.3, SmolLM2; Qwen2, Qwen2.5; Qwen3; Qwen3's mixture of experts; Mistral from 7B to "
    )


def test_sizes_in_a_table_of_the_language_model_are_read(qwen3: Path, tmp_path: Path) -> None:
    inner = msgspec.json.decode((qwen3 / "config.json").read_bytes(), type=dict[str, object])
    outer = {"model_type": inner["model_type"], "text_config": inner | {"model_type": "qwen3_text"}}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(outer))
    assert read_architecture(tmp_path) == read_architecture(qwen3)


def test_a_config_without_a_list_of_the_layers_that_rotate_has_one_that_does_not_in_every_interval(
    qwen3: Path, tmp_path: Path
) -> None:
    keys = msgspec.json.decode((qwen3 / "config.json").read_bytes())
    keys |= {"model_type": "smollm3", "num_hidden_layers": 7, "no_rope_layer_interval": 3}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(keys))
    assert read_architecture(tmp_path).unrotated_layers == {2, 5}


def test_three_of_four_layers_have_a_delta_net_where_the_config_lists_none(
    qwen3: Path, tmp_path: Path
) -> None:
    keys = msgspec.json.decode((qwen3 / "config.json").read_bytes())
    sections = {
        "rope_type": "default",
        "rope_theta": 1e7,
        "mrope_section": [1, 1, 2],
        "mrope_interleaved": True,
    }
    keys |= {"num_hidden_layers": 8, "layer_types": None, "rope_parameters": sections}
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": keys | {"model_type": "qwen3_5_text", "architectures": None},
    }
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(outer))
    architecture = read_architecture(tmp_path)
    assert architecture.delta_layers == {0, 1, 2, 4, 5, 6}
    assert (architecture.rotary_width, architecture.rope_theta) == (4, 1e7)
    (tmp_path / "config.json").write_bytes(
        msgspec.json.encode(outer | {"text_config": keys | {"full_attention_interval": 2}})
    )
    assert read_architecture(tmp_path).delta_layers == {0, 2, 4, 6}


def test_key_heads_of_linear_attention_are_divided_whole(qwen3: Path, tmp_path: Path) -> None:
    keys = msgspec.json.decode((qwen3 / "config.json").read_bytes())
    keys |= {"model_type": "qwen3_5_text", **HYBRID, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(keys))
    architecture = read_architecture(tmp_path)
    assert layout_faults(architecture, config(tensor_parallel=2)) == []
    assert layout_faults(architecture, config(context_parallel=2)) == []
    assert [fault.split(":")[0] for fault in layout_faults(architecture, config(tensor_parallel=4))] == [
        "learner.tensor_parallel = 4 does not divide the model's 2 key heads of linear attention"
    ]
    (fault,) = layout_faults(architecture, config(tensor_parallel=2, context_parallel=2))
    assert "context_parallel = 2 does not divide the model's 1 key heads of linear attention of a" in fault


@pytest.mark.parametrize(
    ("model_type", "num_key_value_heads", "head_width"),
    [("llama", 4, 16), ("qwen2", 32, 16), ("qwen3", 32, 128), ("mistral", 8, 16), ("ministral3", 8, 128)],
)
def test_a_key_that_a_config_lacks_has_the_value_that_transformers_gives_it(
    qwen3: Path, tmp_path: Path, model_type: str, num_key_value_heads: int, head_width: int
) -> None:
    keys = msgspec.json.decode((qwen3 / "config.json").read_bytes())
    del keys["num_key_value_heads"], keys["head_dim"]
    rope = YARN | {"llama_4_scaling_beta": 0.1}
    (tmp_path / "config.json").write_bytes(
        msgspec.json.encode(keys | {"model_type": model_type, "rope_parameters": rope})
    )
    architecture = read_architecture(tmp_path)
    assert (architecture.num_key_value_heads, architecture.head_width) == (num_key_value_heads, head_width)


def test_experts_without_their_number_are_refused(qwen3: Path, tmp_path: Path) -> None:
    original = msgspec.json.decode((qwen3 / "config.json").read_bytes())
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(original | {"model_type": "qwen3_moe"}))
    with pytest.raises(
        ValueError, match="num_experts, num_experts_per_tok or moe_intermediate_size is missing"
    ):
        read_architecture(tmp_path)


def test_the_older_place_of_rope_theta_is_read(qwen3: Path, tmp_path: Path) -> None:
    original = msgspec.json.decode((qwen3 / "config.json").read_bytes())
    del original["rope_parameters"]
    (tmp_path / "config.json").write_bytes(
        msgspec.json.encode(original | {"rope_theta": 5e5, "rope_scaling": None})
    )
    assert read_architecture(tmp_path).rope_theta == 5e5


def test_a_layout_that_does_not_divide_the_model_is_refused(qwen3: Path) -> None:
    with pytest.raises(ValueError, match=r"learner\.tensor_parallel = 3"):
        build_model(read_architecture(qwen3), config(tensor_parallel=3))


def test_every_reason_why_a_layout_does_not_fit_is_given(qwen3: Path) -> None:
    architecture = read_architecture(qwen3)
    assert layout_faults(architecture, config(tensor_parallel=2, pipeline_parallel=2)) == []
    faults = layout_faults(architecture, config(tensor_parallel=4, pipeline_parallel=3))
    assert [fault.split(":")[0] for fault in faults] == [
        "learner.tensor_parallel = 4 does not divide the model's 2 key-value heads",
        "learner.pipeline_parallel = 3 does not divide the model's 2 layers",
    ]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "No such file or directory; `model` must be a Hugging Face directory"),
        (b"not json", "malformed"),
        (b'{"model_type": "gpt2", "n_layer": 12}', "model_type 'gpt2' of .* is not one of them"),
        (b'{"model_type": "llama"}', "missing required field `num_hidden_layers`"),
    ],
)
def test_a_config_that_cannot_be_read_is_a_mistake_with_a_fix(
    tmp_path: Path, content: bytes | None, named: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=named):
        read_architecture(tmp_path)


def test_context_parallel_processes_need_a_head_each(qwen3: Path) -> None:
    architecture = read_architecture(qwen3)
    assert layout_faults(architecture, config(tensor_parallel=2, context_parallel=2)) == []
    assert layout_faults(architecture, config(tensor_parallel=2, context_parallel=4)) == [
        "learner.context_parallel = 4 does not divide the model's 2 attention heads of a tensor-parallel process: set it to a "
        "divisor"
    ]


def test_sequence_parallelism_without_tensor_parallelism_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set learner\.tensor_parallel to 2 or more"):
        config(sequence_parallel=True)
