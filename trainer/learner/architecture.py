"""The shape of a model, read from its Hugging Face `config.json`; a check whether a parallel layout divides it; the number of its
floating-point operations.

The learner supports Llama, Qwen2, Qwen3 and the mixture of experts of Qwen3. A config with a setting that it does not support is rejected
with the setting's name, never trained as something else. Nothing here imports torch, so a recipe can be checked on a machine without it.

The count includes the operations that the result needs: matrix products at two per multiplication and addition, causal attention at the
pairs that it keeps. Norms, activations and the rotary embedding are left out (below 1 %), and so is recomputation, which has a count of its
own, because the result needs each operation once. Recomputation therefore lowers a utilisation that is computed from these counts.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from pipeline.model_config import language_keys
from trainer.learner.config import LearnerConfig, Recompute

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]

FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "qwen3_moe")
TRAINED = "Llama (2 and 3.0, SmolLM2), Qwen2, Qwen2.5, Qwen3 and Qwen3's mixture of experts"
"""FAMILIES by the names of their models. Llama 3.1 to 3.3 scale their rotary embedding in a way of their own, which is not supported."""


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """The mixture of experts that each layer has instead of one MLP: a router chooses a few experts for every token."""

    count: int
    per_token: int
    width: int  # inner width of one expert's MLP
    renormalised: bool  # whether the weights of the chosen experts are scaled to a sum of 1


class Yarn(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"original_positions": "original_max_position_embeddings"},
):
    """The stretching of rotary embedding beyond the positions of pretraining, by transformers' names and defaults."""

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.factor < 1 or self.original_positions < 1:
            raise ValueError("YaRN needs a factor and original_max_position_embeddings of 1 or more")

    @property
    def magnitude(self) -> float:
        """The factor by which cosines and sines are multiplied."""

        def at(mscale: float) -> float:
            return 0.1 * mscale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return at(self.mscale) / at(self.mscale_all_dim)
        return at(1.0)


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model and the constants that its `config.json` fixes."""

    family: Family
    num_layers: int
    width: int
    mlp_width: int  # inner width of the MLP; unused if the layers have experts
    num_heads: int
    num_key_value_heads: int
    head_width: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied: bool  # one matrix for the embedding and the output
    experts: Experts | None = None  # None: each layer has one MLP
    yarn: Yarn | None = None

    @property
    def biased_qkv(self) -> bool:
        return self.family == "qwen2"

    @property
    def normed_qk(self) -> bool:
        return self.family in ("qwen3", "qwen3_moe")

    @property
    def routing_width(self) -> int:
        """The number of experts that one token passes over all layers; 0 for a dense model."""
        return self.num_layers * self.experts.per_token if self.experts else 0

    def reported_experts(self, config: LearnerConfig) -> int:
        """The number of experts that engines report for each token; 0 if the learner does not replay their routing."""
        return self.routing_width if config.routing_replay else 0

    @property
    def active_mlp_width(self) -> int:
        """Width of all MLPs that one token passes in a layer."""
        return self.experts.per_token * self.experts.width if self.experts else self.mlp_width


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of `config.json` that determine the computation, by their Hugging Face names."""

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
    num_experts: int | None = None
    num_local_experts: int | None = None  # the same, as transformers 5 writes it
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None


def read_architecture(directory: Path) -> Architecture:
    """Read `config.json`. Raises ValueError if it is missing, malformed, or describes a model that is not supported."""
    path = directory / "config.json"
    config = _read_config(path)
    for feature in _unsupported_features(config):
        raise ValueError(
            f"the learner trains {TRAINED}, and {feature} is not supported by the learner, but {path} has it: choose a model without it"
        )
    rope = config.rope_parameters or config.rope_scaling or {}
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
        experts=_experts(path, config),
        yarn=_read_yarn(path, rope) if _rope_type(rope) == "yarn" else None,
    )


def layout_faults(architecture: Architecture, config: LearnerConfig) -> list[str]:
    """The reasons why this model cannot be divided as `config` requires, one sentence per reason; empty if it can be."""
    experts = architecture.experts
    parts = {
        "tensor_parallel": (
            ("attention heads", architecture.num_heads),
            ("key-value heads", architecture.num_key_value_heads),
            *(() if experts else (("columns of the MLP", architecture.mlp_width),)),
        ),
        "context_parallel": (
            (
                "attention heads of a tensor-parallel process",
                architecture.num_heads // config.tensor_parallel,
            ),
        ),
        "pipeline_parallel": (("layers", architecture.num_layers),),
        "expert_parallel": (("experts", experts.count),) if experts else (),
    }
    faults = [
        f"learner.{field} = {getattr(config, field)} does not divide the model's {count} {name}: set it to a divisor"
        for field, counted in parts.items()
        for name, count in counted
        if count % getattr(config, field)
    ]
    if not experts and config.expert_parallel > 1:
        faults.append(
            f"learner.expert_parallel = {config.expert_parallel}: the model has no experts to divide; set it to 1"
        )
    if experts and config.tensor_parallel > 1 and not config.sequence_parallel:
        faults.append(
            f"learner.tensor_parallel = {config.tensor_parallel}: each process must send its own positions to the experts; "
            "set learner.sequence_parallel = true"
        )
    if config.routing_replay and (not experts or experts.count > 256):
        count = f"{experts.count} experts, and reports have a byte for each" if experts else "no experts"
        faults.append(f"learner.routing_replay: the model has {count}; set it to false")
    if experts and config.lora.rank and {*config.lora.targets} & {"gate_proj", "up_proj", "down_proj"}:
        faults.append(
            "learner.lora.targets: experts get no adapters; name some of q_proj, k_proj, v_proj and o_proj only"
        )
    return faults


def _experts(path: Path, config: _Config) -> Experts | None:
    if config.model_type != "qwen3_moe":
        return None
    count = config.num_experts or config.num_local_experts
    if not count or not config.num_experts_per_tok or not config.moe_intermediate_size:
        raise ValueError(
            f"{path}: num_experts, num_experts_per_tok or moe_intermediate_size is missing; "
            "take the file that came with the weights"
        )
    return Experts(
        count=count,
        per_token=config.num_experts_per_tok,
        width=config.moe_intermediate_size,
        renormalised=config.norm_topk_prob,
    )


def _read_config(path: Path) -> _Config:
    try:
        keys = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if keys.get("model_type") not in FAMILIES:
            raise ValueError(
                f"the learner trains {TRAINED} (model_type {', '.join(FAMILIES)}), and model_type {keys.get('model_type')!r} of "
                f"{path} is not one of them: choose such a model"
            )
        return msgspec.convert(language_keys(keys), _Config)
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}; `model` must be a Hugging Face directory with config.json and weights"
        ) from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}; take the file that came with the weights") from error


def _rope_type(rope: dict[str, Any]) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def _read_yarn(path: Path, rope: dict[str, Any]) -> Yarn:
    try:
        given = {name: value for name, value in rope.items() if value is not None}
        return msgspec.convert(given, Yarn)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: rope of type yarn: {error}; take the keys from the model card") from error


def _unsupported_features(config: _Config) -> Iterator[str]:
    rope = config.rope_parameters or config.rope_scaling or {}
    rope_type = _rope_type(rope)
    unsupported = {
        f"rope_type {rope_type!r}": rope_type not in ("default", "yarn"),
        "attention_bias": bool(config.attention_bias) and config.model_type != "qwen2",
        "mlp_bias": bool(config.mlp_bias),
        "use_sliding_window": bool(config.use_sliding_window),
        f"hidden_act {config.hidden_act!r}": config.hidden_act != "silu",
        # transformers knows the first and engines the second: one of them would compute something else
        "a rope attention_factor": rope.get("attention_factor") is not None,
        "a rope attn_factor": (rope.get("attn_factor") or 1.0) != 1.0,
        "partial_rotary_factor": (rope.get("partial_rotary_factor") or 1.0) != 1.0,
        "attention_dropout": bool(config.attention_dropout),
        f"decoder_sparse_step {config.decoder_sparse_step}": config.decoder_sparse_step != 1,
        "mlp_only_layers": bool(config.mlp_only_layers),
    }
    yield from (name for name, present in unsupported.items() if present)


TRAINING_PASSES = 3
"""A step costs three forward passes: the backward pass has a product for the input and one for the weight."""


def forward_flops(
    architecture: Architecture, lengths: Iterable[int], *, num_head_positions: int | None = None
) -> int:
    """Operations of the whole model's forward pass over samples of `lengths` positions each.

    A sample of T tokens takes T - 1 positions. The output layer runs at `num_head_positions` of them; None: at all.
    """
    sizes = list(lengths)
    num_positions = sum(sizes)
    layers = architecture.num_layers * (
        2 * num_positions * _layer_matrices(architecture)
        + sum(attention_flops(architecture, length) for length in sizes)
    )
    rows = num_positions if num_head_positions is None else num_head_positions
    return layers + 2 * rows * architecture.width * architecture.vocab_size


def training_flops(
    architecture: Architecture, lengths: Iterable[int], *, num_head_positions: int | None = None
) -> int:
    """Operations of forward and backward pass, when all weights are trained."""
    return TRAINING_PASSES * forward_flops(architecture, lengths, num_head_positions=num_head_positions)


def recomputed_flops(architecture: Architecture, lengths: Iterable[int], recompute: Recompute) -> int:
    """Operations that `learner.recompute` adds to a step: the forward pass of each MLP or mixture of experts, or of each whole layer."""
    sizes = list(lengths)
    match recompute:
        case "none":
            return 0
        case "selective":
            return architecture.num_layers * 2 * sum(sizes) * _mlp_matrices(architecture)
        case "full":
            return forward_flops(architecture, sizes, num_head_positions=0)


def attention_flops(architecture: Architecture, length: int) -> int:
    """Operations for the scores and weighted values of one sample in one layer: position t attends to t positions, itself included."""
    num_pairs = length * (length + 1) // 2
    return 2 * 2 * num_pairs * architecture.num_heads * architecture.head_width


def _layer_matrices(architecture: Architecture) -> int:
    """The number of one layer's weights by which each position is multiplied."""
    query_width = architecture.num_heads * architecture.head_width
    key_value_width = 2 * architecture.num_key_value_heads * architecture.head_width
    attention = architecture.width * (query_width + key_value_width) + query_width * architecture.width
    return attention + _mlp_matrices(architecture)


def _mlp_matrices(architecture: Architecture) -> int:
    """The number of weights of one layer's MLP by which each position is multiplied; in a mixture of experts, those of the router and of
    the experts that one position is sent to.
    """
    router = architecture.width * architecture.experts.count if architecture.experts else 0
    return router + 3 * architecture.width * architecture.active_mlp_width
