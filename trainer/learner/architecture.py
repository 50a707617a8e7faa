"""The shape of a model, read from its Hugging Face `config.json`, and whether a parallel layout divides it.

Supported are dense Llama, Qwen2 and Qwen3. A config that asks for something the learner cannot do is rejected by name,
never trained as something else. Nothing here imports torch, so a recipe can be checked on a machine without it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from trainer.learner.config import LearnerConfig

Family = Literal["llama", "qwen2", "qwen3"]

FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model and the constants that its `config.json` fixes."""

    family: Family
    num_layers: int
    width: int
    mlp_width: int
    num_heads: int
    num_key_value_heads: int
    head_width: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied: bool  # one matrix for the embedding and the output

    @property
    def biased_qkv(self) -> bool:
        return self.family == "qwen2"

    @property
    def normed_qk(self) -> bool:
        return self.family == "qwen3"


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of `config.json` that say what is computed, by their Hugging Face names."""

    model_type: Family
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool | None = None
    rope_parameters: dict[str, Any] | None = None  # written by transformers 5
    rope_theta: float | None = None  # written by earlier versions, beside rope_scaling
    rope_scaling: dict[str, Any] | None = None
    hidden_act: str = "silu"
    attention_bias: bool | None = None
    attention_dropout: float | None = None
    mlp_bias: bool | None = None
    use_sliding_window: bool | None = None


def read_architecture(directory: Path) -> Architecture:
    """Read `config.json`. Raises ValueError if it is missing, malformed, or describes a model that is not supported."""
    path = directory / "config.json"
    config = _read_config(path)
    for feature in _unsupported_features(config):
        raise ValueError(f"{path}: {feature} is not supported by the learner: choose a model without it")
    rope = config.rope_parameters or {}
    return Architecture(
        family=config.model_type,
        num_layers=config.num_hidden_layers,
        width=config.hidden_size,
        mlp_width=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads or config.num_attention_heads,
        head_width=config.head_dim or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        rope_theta=rope.get("rope_theta") or config.rope_theta or 10_000.0,
        tied=bool(config.tie_word_embeddings),
    )


def layout_faults(architecture: Architecture, config: LearnerConfig) -> list[str]:
    """Why this model cannot be divided as `config` says, one sentence per reason; empty if it can be."""
    parts = {
        "tensor_parallel": (
            ("attention heads", architecture.num_heads),
            ("key-value heads", architecture.num_key_value_heads),
            ("columns of the MLP", architecture.mlp_width),
        ),
        "pipeline_parallel": (("layers", architecture.num_layers),),
    }
    return [
        f"learner.{field} = {getattr(config, field)} does not divide the model's {count} {name}: set it to a divisor"
        for field, counted in parts.items()
        for name, count in counted
        if count % getattr(config, field)
    ]


def _read_config(path: Path) -> _Config:
    try:
        keys = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if keys.get("model_type") not in FAMILIES:
            raise ValueError(
                f"{path}: model_type {keys.get('model_type')!r} is not one of {', '.join(FAMILIES)}: "
                "choose such a model"
            )
        return msgspec.convert(keys, _Config)
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}; `model` must be a Hugging Face directory with config.json and weights"
        ) from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}; take the file that came with the weights") from error


def _unsupported_features(config: _Config) -> Iterator[str]:
    rope = config.rope_parameters or config.rope_scaling or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    unsupported = {
        f"rope_type {rope_type!r}": rope_type != "default",
        "attention_bias": bool(config.attention_bias) and config.model_type != "qwen2",
        "mlp_bias": bool(config.mlp_bias),
        "use_sliding_window": bool(config.use_sliding_window),
        f"hidden_act {config.hidden_act!r}": config.hidden_act != "silu",
        "partial_rotary_factor": (rope.get("partial_rotary_factor") or 1.0) != 1.0,
        "attention_dropout": bool(config.attention_dropout),
    }
    yield from (name for name, present in unsupported.items() if present)
