"""What a family of models says of itself: the keys of its `config.json` that determine the computation, the architecture that follows from
them, the settings that the learner does not compute, and the Hugging Face names of its weights.

Building, loading, exporting, counting and dividing follow from the architecture (`trainer/learner/architecture.py`) and the names, and ask
no family by its name. A new family is a file here and a line in `registry.py`. If it computes something that no other family does, the
architecture gets a field for that, whose default is what the others do.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from trainer.learner.architecture import Architecture, Experts, Llama3Rope, Yarn

LAYER_NAMES: Mapping[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{one}_proj.weight" for one in "qkv"),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{one}_proj.bias" for one in "qkv"),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
"""Llama's names of the tensors that make up each parameter of a layer of Megatron, which most families have, too; without the layer."""


EXPERT_NAMES: Mapping[str, tuple[str, ...]] = {
    "mlp.router.weight": ("mlp.gate.weight",),
    "mlp.experts.local_experts.{expert}.linear_fc1.weight": (
        "mlp.experts.{expert}.gate_proj.weight",
        "mlp.experts.{expert}.up_proj.weight",
    ),
    "mlp.experts.local_experts.{expert}.linear_fc2.weight": ("mlp.experts.{expert}.down_proj.weight",),
}
"""The names of a router and its experts in most families; `{expert}` is the number of an expert."""


NEUTRAL_KEYS: Mapping[str, Any] = {
    "bias": False,
    "compression_config": None,
    "dual_chunk_attention_config": None,
    "final_logit_softcapping": None,
    "rope_is_neox_style": True,
    "scale_emb": None,
}
"""Keys by which engines compute something else and which transformers ignores, with the values that change nothing."""

NEUTRAL_ROPE_KEYS: Mapping[str, Any] = {
    "attention_factor": None,  # transformers knows this one and engines the next: one of them would compute something else
    "attn_factor": 1.0,
    "extrapolation_factor": 1.0,
    "mrope_section": None,
    "use_fope": False,
}
"""The same in the table of the rotary embedding."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of `config.json` that all families have, by their Hugging Face names. A field is a key of the file, and its default is what
    transformers takes where the file lacks the key.
    """

    models: ClassVar[str]
    """The names of the models, for people."""
    layer_names: ClassVar[Mapping[str, tuple[str, ...]]] = LAYER_NAMES
    rope_theta_without_key: ClassVar[float] = 10_000.0
    language_prefix: ClassVar[str] = "model."
    """What the names of the language model's tensors begin with, except for that of the output layer."""
    carried_prefixes: ClassVar[tuple[str, ...]] = ()
    """What the names of tensors begin with that are not trained, and that exports have as they were read."""
    class_endings: ClassVar[tuple[str, ...]] = ("ForCausalLM",)
    """The endings of the classes that engines build of such a model; a classifier has the same `model_type`."""
    engines_read_scales: ClassVar[bool] = True
    """Whether SGLang's loader takes the scales of weights in FP8, one for each block."""
    neutral_rope_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of NEUTRAL_ROPE_KEYS that change nothing in this family."""

    model_type: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool | None = False
    rope_parameters: dict[str, Any] | None = None  # written by transformers 5
    rope_theta: float | None = None  # written by earlier versions, beside rope_scaling
    rope_scaling: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    layer_types: list[str] | None = None
    hidden_act: str = "silu"
    attention_bias: bool | None = False
    attention_dropout: float | None = 0.0
    mlp_bias: bool | None = False
    use_sliding_window: bool | None = False
    quantization_config: dict[str, Any] | None = None

    def architecture(self) -> Architecture:
        """The architecture of the model. Raises ValueError for a key that is missing or out of range."""
        rope = self.rope
        return Architecture(
            family=self.model_type,
            num_layers=self.num_hidden_layers,
            width=self.hidden_size,
            mlp_width=self.intermediate_size,
            num_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads or self.num_attention_heads,
            head_width=self.head_width,
            vocab_size=self.vocab_size,
            max_positions=self.max_position_embeddings,
            norm_eps=self.rms_norm_eps,
            rope_theta=rope.get("rope_theta") or self.rope_theta or self.rope_theta_without_key,
            rope_scaling=_read_rope(_rope_type(rope), rope),
            tied=bool(self.tie_word_embeddings),
            experts=self.experts(),
            rotary_width=self.rotary_width(),
        )

    def experts(self) -> Experts | None:
        """The mixture of experts that each layer has in place of an MLP; None if it has an MLP."""
        return None

    def rotary_width(self) -> int | None:
        """The number of a head's first dimensions that are rotated; None: all."""
        return None

    def unsupported(self) -> Mapping[str, bool]:
        """The settings that the learner does not compute, each with whether this model has it."""
        rope = self.rope
        return {
            f"rope_type {_rope_type(rope)!r}": _rope_type(rope) not in ("default", *ROPE_TYPES),
            # Of two values transformers takes one and engines the other.
            "rope_scaling beside another rope_parameters": _differ(self.rope_scaling, self.rope_parameters),
            "original_max_position_embeddings beside another one of the rope": _differ(
                self.original_max_position_embeddings, rope.get("original_max_position_embeddings")
            ),
            "partial_rotary_factor beside another one of the rope": _differ(
                self.partial_rotary_factor, rope.get("partial_rotary_factor")
            ),
            "partial_rotary_factor": self.rotary_width() is None and self.rotary_share != 1.0,
            f"layer_types {self.layer_types}": not {*(self.layer_types or ())} <= {"full_attention"},
            "attention_bias": bool(self.attention_bias),
            "mlp_bias": bool(self.mlp_bias),
            "use_sliding_window": bool(self.use_sliding_window),
            f"hidden_act {self.hidden_act!r}": self.hidden_act != "silu",
            "attention_dropout": bool(self.attention_dropout),
            "quantization_config": not _is_readable(self.quantization_config),
        }

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_share(self) -> float:
        """The share of a head's dimensions that `config.json` says are rotated."""
        return self.rope.get("partial_rotary_factor") or self.partial_rotary_factor or 1.0

    @property
    def rope(self) -> dict[str, Any]:
        """The table of the rotary embedding; empty if there is none."""
        return self.rope_parameters or self.rope_scaling or {}


def _is_readable(quantization: Mapping[str, Any] | None) -> bool:
    """Whether weights of such a type are read: FP8 with a scale for each block of 128 x 128, or none that is packed."""
    return not quantization or (
        quantization.get("quant_method") == "fp8" and quantization.get("weight_block_size") == [128, 128]
    )


def _differ(one: object, other: object) -> bool:
    """Whether both are given and they are not the same."""
    return bool(one and other) and one != other


ROPE_TYPES = ("yarn", "llama3")


def engine_keys(keys: Mapping[str, Any], family: type[Family]) -> Mapping[str, bool]:
    """The keys of NEUTRAL_KEYS and NEUTRAL_ROPE_KEYS, each with whether `keys`, those of a `config.json`, have it with a value that changes
    what engines compute.
    """
    rope: Mapping[str, Any] = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    return {
        **{name: keys.get(name) not in (None, neutral) for name, neutral in NEUTRAL_KEYS.items()},
        **{
            f"a rope {name}": rope.get(name) not in (None, neutral)
            for name, neutral in NEUTRAL_ROPE_KEYS.items()
            if name not in family.neutral_rope_keys
        },
    }


def _rope_type(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def _read_rope(rope_type: str, rope: Mapping[str, Any]) -> Yarn | Llama3Rope | None:
    if rope_type not in ROPE_TYPES:
        return None
    try:
        given = {name: value for name, value in rope.items() if value is not None}
        return msgspec.convert(given | {"rope_type": rope_type}, Yarn | Llama3Rope)
    except msgspec.ValidationError as error:
        raise ValueError(f"rope of type {rope_type}: {error}; take the keys from the model card") from error
