"""The shape of a model and what its layers compute; a check whether a parallel layout divides it; the number of its floating-point
operations.

`trainer/learner/families/` reads it from a Hugging Face `config.json`. Nothing here imports torch, so a recipe can be checked on a machine
without it.

The count includes the operations that the result needs: matrix products at two per multiplication and addition, causal attention at the
pairs that it keeps. Norms, activations and the rotary embedding are left out (below 1 %), and so is recomputation, which has a count of its
own, because the result needs each operation once. Recomputation therefore lowers a utilisation that is computed from these counts.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from trainer.learner.config import LearnerConfig, LoraConfig, Recompute


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """The mixture of experts that layers have instead of one MLP: a router chooses a few experts for every token."""

    count: int
    per_token: int
    width: int  # inner width of one expert's MLP
    renormalised: bool  # whether the weights of the chosen experts are scaled to a sum of 1
    scores: Literal["softmax", "sigmoid"] = "softmax"  # what the router makes of its logits
    corrected: bool = False  # whether a constant of each expert is added to its score for the choice, but not for its weight
    weight_factor: float = 1.0  # factor of the weights of the chosen experts
    shared_width: int = 0  # inner width of an MLP that every token passes beside its experts; 0: none
    shared_gated: bool = False  # whether the result of that MLP is multiplied by a sigmoid of its input
    num_dense_layers: int = 0  # the number of first layers that have an MLP and no experts
    # Whether Hugging Face keeps the experts of a layer in one tensor for each projection
    in_one_tensor: bool = False
    # Whether the matrices of that tensor have their outputs first, all of the gate before the up projection; otherwise their inputs
    outputs_first: bool = False
    # What gpt-oss's gate is clamped to: quick GELU of the gate times the other projection plus 1; None: the SiLU of the gate
    gate_limit: float | None = None


class Yarn(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="rope_type",
    tag="yarn",
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
        if self.factor < 1 or self.original_positions < 1 or min(self.beta_fast, self.beta_slow) <= 0:
            raise ValueError(
                "YaRN needs a factor and original_max_position_embeddings of 1 or more, and beta_fast and beta_slow above 0"
            )

    @property
    def magnitude(self) -> float:
        """The factor by which cosines and sines are multiplied."""

        def at(mscale: float) -> float:
            return 0.1 * mscale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return at(self.mscale) / at(self.mscale_all_dim)
        return at(1.0)


class Llama3Rope(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="rope_type",
    tag="llama3",
    rename={"original_positions": "original_max_position_embeddings"},
):
    """The stretching of rotary embedding by Llama 3.1 and later, by transformers' names."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def __post_init__(self) -> None:
        if (
            self.factor < 1
            or self.original_positions < 1
            or not 0 < self.low_freq_factor < self.high_freq_factor
        ):
            raise ValueError(
                "a factor and original_max_position_embeddings of 1 or more are needed, and a low_freq_factor above 0 and below "
                "high_freq_factor"
            )


class QueryScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Queries of position t are multiplied by 1 + beta * ln(1 + floor(t / original_positions))."""

    beta: float
    original_positions: int


class DeltaNet(msgspec.Struct, frozen=True, kw_only=True):
    """Linear attention by the gated delta rule (arXiv 2412.06464), which some layers have in place of attention. Each key head serves the
    same number of consecutive value heads.
    """

    num_key_heads: int
    num_value_heads: int  # a multiple of the key heads
    key_width: int
    value_width: int
    kernel: int  # the number of positions, its own included, that the convolution before the rule covers
    layers: frozenset[int]  # numbers, from 0
    # Whether Hugging Face keeps what belongs to a key head together, in two tensors; otherwise there is one after the other, in four
    grouped: bool

    @property
    def values_per_key(self) -> int:
        """The number of value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def convolved_width(self) -> int:
        """The number of channels of one key head that the convolution passes over: its query, its key and its values."""
        return 2 * self.key_width + self.values_per_key * self.value_width

    @property
    def group_width(self) -> int:
        """The number of outputs of the input projection for one key head: besides these channels a gate for each value, and for each
        value head a strength and a decay.
        """
        return self.convolved_width + self.values_per_key * (self.value_width + 2)


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model, the constants that its `config.json` fixes, and what its layers compute."""

    family: str  # model_type of config.json
    num_layers: int
    width: int
    mlp_width: int  # inner width of the MLP; unused if all layers have experts
    num_heads: int
    num_key_value_heads: int
    head_width: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied: bool  # one matrix for the embedding and the output
    experts: Experts | None = None  # None: each layer has one MLP
    rotary_width: int | None = None  # the number of a head's first dimensions that are rotated; None: all
    rope_scaling: Yarn | Llama3Rope | None = None
    query_scaling: QueryScaling | None = None
    unrotated_layers: frozenset[int] = frozenset()  # numbers, from 0, of the layers that ignore positions
    # The number of positions, its own included, that a position attends to in windowed layers, and the numbers of these, from 0
    window: int | None = None
    windowed_layers: frozenset[int] = frozenset()
    sinks: bool = False  # whether each head has one more logit, of no value, in the softmax of its attention
    biased_qkv: bool = False  # whether query, key and value projections have biases
    # Whether all projections of a layer have biases, those of experts and their router included
    biased: bool = False
    normed_qk: bool = False  # whether queries and keys are normalised
    normed_together: bool = False  # whether they are over all heads of a layer; otherwise each head is by itself
    gated: bool = False  # whether what attention returns is multiplied by a sigmoid, of which the query projection has the inputs
    # Whether the factor of a norm is its weight plus 1, except for the norm within a delta net
    zero_centred_norms: bool = False
    delta_net: DeltaNet | None = None  # None: all layers have attention

    @property
    def delta_layers(self) -> frozenset[int]:
        """The numbers, from 0, of the layers that have a delta net in place of attention."""
        return self.delta_net.layers if self.delta_net else frozenset()

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers - len(self.delta_layers)

    @property
    def routing_width(self) -> int:
        """The number of experts in a report for one token, which covers all layers, with experts or not; 0 for a dense model."""
        return self.num_layers * self.experts.per_token if self.experts else 0

    def reported_experts(self, config: LearnerConfig) -> int:
        """The number of experts that engines report for each token; 0 if the learner does not replay their routing."""
        return self.routing_width if config.routing_replay else 0

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of a layer, counted from 0; None if it has one MLP."""
        return self.experts if self.experts and layer >= self.experts.num_dense_layers else None


def layout_faults(architecture: Architecture, config: LearnerConfig) -> list[str]:
    """The reasons why this model cannot be divided as `config` requires, one sentence per reason; empty if it can be."""
    experts = architecture.experts
    faults = [
        f"learner.{field} = {getattr(config, field)} does not divide the model's {count} {name}: set it to a divisor"
        for field, name, count in _divided(architecture, config)
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
    of_mlp = {*config.lora.targets} & {"gate_proj", "up_proj", "down_proj"}
    if experts and experts.in_one_tensor and config.lora.rank and of_mlp:
        faults.append(
            f"learner.lora.targets: experts of {architecture.family}, which are one tensor, get no adapters; name some of q_proj, k_proj, "
            "v_proj and o_proj only"
        )
    return faults


def alone_faults(architecture: Architecture, lora: LoraConfig) -> Iterator[str]:
    """The reasons why engines cannot load adapters of this model, one sentence per reason."""
    alone, merged = 'weights.adapters = "alone"', 'set weights.adapters = "merged"'
    of_mlp = sorted({*lora.targets} & {"gate_proj", "up_proj", "down_proj"})
    if architecture.experts and of_mlp:
        yield f"{alone}: engines get no adapters of experts; take {', '.join(of_mlp)} out of learner.lora.targets, or {merged}"
    if architecture.delta_net or architecture.gated:
        yield f"{alone}: engines get no adapters of {architecture.family}, whose attention is linear or gated; {merged}"


def _divided(architecture: Architecture, config: LearnerConfig) -> Iterator[tuple[str, str, int]]:
    """The keys of `[learner]` that divide the model, each with what it divides and how many of these there are."""
    experts, delta_net = architecture.experts, architecture.delta_net
    tensor_parallel = config.tensor_parallel
    yield "tensor_parallel", "attention heads", architecture.num_heads
    yield "tensor_parallel", "key-value heads", architecture.num_key_value_heads
    if delta_net:
        yield "tensor_parallel", "key heads of linear attention", delta_net.num_key_heads
    if architecture.experts_of(0) is None:
        yield "tensor_parallel", "columns of the MLP", architecture.mlp_width
    if experts:
        yield "tensor_parallel", "columns of the shared expert", experts.shared_width
    of_process = "of a tensor-parallel process"
    yield "context_parallel", f"attention heads {of_process}", architecture.num_heads // tensor_parallel
    if delta_net:
        key_heads = delta_net.num_key_heads // tensor_parallel
        yield "context_parallel", f"key heads of linear attention {of_process}", key_heads
    yield "pipeline_parallel", "layers", architecture.num_layers
    if experts:
        yield "expert_parallel", "experts", experts.count


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
    matrices = (
        architecture.num_attention_layers * _attention_matrices(architecture)
        + len(architecture.delta_layers) * _delta_matrices(architecture)
        + _mlp_matrices(architecture)
    )
    layers = 2 * num_positions * matrices + sum(attention_flops(architecture, length) for length in sizes)
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
            return 2 * sum(sizes) * _mlp_matrices(architecture)
        case "full":
            return forward_flops(architecture, sizes, num_head_positions=0)


def attention_flops(architecture: Architecture, length: int) -> int:
    """Operations for the scores and weighted values of one sample in all layers: position t attends to t positions, itself included, or to
    those of its window. A delta net does three products of a vector with the matrix that is its state for each position and value head.
    """
    num_pairs = length * (length + 1) // 2
    beyond = max(length - (architecture.window or length), 0)
    num_windowed = len(architecture.windowed_layers)
    all_pairs = architecture.num_attention_layers * num_pairs - num_windowed * (beyond * (beyond + 1) // 2)
    of_attention = 2 * 2 * all_pairs * architecture.num_heads * architecture.head_width
    delta_net = architecture.delta_net
    if delta_net is None:
        return of_attention
    state = delta_net.num_value_heads * delta_net.key_width * delta_net.value_width
    return of_attention + len(delta_net.layers) * length * 3 * 2 * state


def _attention_matrices(architecture: Architecture) -> int:
    """The number of weights of one layer's attention by which each position is multiplied."""
    query_width = architecture.num_heads * architecture.head_width
    key_value_width = 2 * architecture.num_key_value_heads * architecture.head_width
    gate_width = query_width if architecture.gated else 0
    return (
        architecture.width * (query_width + gate_width + key_value_width) + query_width * architecture.width
    )


def _delta_matrices(architecture: Architecture) -> int:
    """The number of weights of one delta net's projections."""
    net = architecture.delta_net
    if net is None:
        return 0
    return architecture.width * (net.num_key_heads * net.group_width + net.num_value_heads * net.value_width)


def _mlp_matrices(architecture: Architecture) -> int:
    """The number of weights of the MLPs of all layers by which each position is multiplied; in a mixture of experts, those of the router
    and of the experts that one position is sent to.
    """

    def of_layer(experts: Experts | None) -> int:
        if experts is None:
            return 3 * architecture.width * architecture.mlp_width
        passed = experts.per_token * experts.width + experts.shared_width
        return architecture.width * (experts.count + int(experts.shared_gated) + 3 * passed)

    return sum(of_layer(architecture.experts_of(layer)) for layer in range(architecture.num_layers))
