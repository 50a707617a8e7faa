"""The parameters of a model: their names in Megatron and in Hugging Face directories, their shapes, and how processes divide them. Pure
arithmetic, no torch; `hf.py` reads and joins the tensors, and `trainer/plan/division.py` counts them.
"""

from collections.abc import Iterator
from math import prod
from typing import Literal

import msgspec

from trainer.learner.architecture import Architecture, Experts
from trainer.learner.families.registry import FAMILIES

Kind = Literal[
    "whole",
    "stacked",
    "qkv",
    "gate_up",
    "rows",
    "columns",
    "entries",
    "of_all",
    "of_all_mixed",
    "of_all_as_is",
    "key_heads",
    "key_heads_apart",
]
"""How a parameter is made from its tensors. `rows` and `columns` name the dimension of a matrix that tensor-parallel ranks divide, and
`entries` that of a vector; `qkv` and `gate_up` join tensors that they divide by rows; `stacked` is the gate above the up projection of an
expert, which they do not divide. `of_all` is an expert's part of a tensor that holds those of all experts of a layer, in which a matrix has
its inputs first; `of_all_mixed` is the same for gate and up projection, whose outputs alternate there; `of_all_as_is` is a part that needs
no change. `key_heads` joins tensors of a delta net so that all rows of a key head are together; in `key_heads_apart` the first tensor has
the queries of all heads, then their keys, then their values.
"""

OF_ALL: tuple[Kind, ...] = ("of_all", "of_all_mixed", "of_all_as_is")

EXPERT = "{expert}"
"""What stands for the number of an expert: on its process in Megatron's names, in the whole model in those of Hugging Face."""


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of the model or of a layer."""

    name: str  # Megatron's; without the layer
    origins: tuple[str, ...]  # the Hugging Face tensors that it consists of; without the layer
    kind: Kind
    shape: tuple[int, ...]  # on a single process
    expert: int | None = None  # the number of its expert in the whole model
    is_constant: bool = False  # part of the model, but never trained; fp32 whatever the type of the others

    @property
    def is_divided(self) -> bool:
        """Whether tensor-parallel ranks divide it; otherwise each rank that has the parameter holds all of it."""
        return self.kind not in ("whole", "stacked", *OF_ALL)

    @property
    def is_of_all(self) -> bool:
        """Whether its tensor holds the same parameter of all experts of the layer."""
        return self.kind in OF_ALL

    @property
    def is_expert(self) -> bool:
        return EXPERT in self.name

    def num_values(self, tensor_parallel: int) -> int:
        """The number of values on one tensor-parallel rank."""
        if self.kind == "rows":
            return -(-self.shape[0] // tensor_parallel) * self.shape[1]
        return prod(self.shape) // (tensor_parallel if self.is_divided else 1)

    def of_expert(self, place: int, index: int) -> "Parameter":
        """The parameter of the expert with number `index`, which is at `place` among those of its process."""
        return msgspec.structs.replace(
            self,
            name=self.name.replace(EXPERT, str(place)),
            origins=tuple(origin.replace(EXPERT, str(index)) for origin in self.origins),
            expert=index,
        )


EMBEDDING, FINAL_NORM, OUTPUT = (
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
)


def outer_parameters(architecture: Architecture) -> dict[str, Parameter]:
    """The parameters outside of the layers, by name. The output layer of a tied model has the tensor of the embedding."""
    matrix = (architecture.vocab_size, architecture.width)
    prefix = FAMILIES[architecture.family].language_prefix
    embedding = (f"{prefix}embed_tokens.weight",)
    return {
        EMBEDDING: Parameter(name=EMBEDDING, origins=embedding, kind="rows", shape=matrix),
        FINAL_NORM: Parameter(
            name=FINAL_NORM, origins=(f"{prefix}norm.weight",), kind="whole", shape=(architecture.width,)
        ),
        OUTPUT: Parameter(
            name=OUTPUT,
            origins=embedding if architecture.tied else ("lm_head.weight",),
            kind="rows",
            shape=matrix,
        ),
    }


CORRECTION = "mlp.router.expert_bias"


def layer_parameters(architecture: Architecture, layer: int) -> list[Parameter]:
    """The parameters of a layer, counted from 0. A parameter of experts is one of each expert."""
    names = FAMILIES[architecture.family].layer_names
    experts = architecture.experts_of(layer)
    shaped = [
        *(_delta_net(architecture) if layer in architecture.delta_layers else _attention(architecture)),
        *(_mlp("mlp", architecture.mlp_width, architecture.width) if experts is None else ()),
        *(_mixture(experts, architecture) if experts else ()),
    ]
    return [
        Parameter(name=name, origins=names[name], kind=kind, shape=shape, is_constant=name == CORRECTION)
        for name, kind, shape in shaped
    ]


Shaped = tuple[str, Kind, tuple[int, ...]]


def _attention(architecture: Architecture) -> Iterator[Shaped]:
    width, head_width = architecture.width, architecture.head_width
    queries = architecture.num_heads * head_width
    gates = queries if architecture.gated else 0
    joint = queries + gates + 2 * architecture.num_key_value_heads * head_width
    yield "input_layernorm.weight", "whole", (width,)
    yield "self_attention.linear_qkv.weight", "qkv", (joint, width)
    if architecture.biased_qkv or architecture.biased:
        yield "self_attention.linear_qkv.bias", "qkv", (joint,)
    if architecture.normed_qk and not architecture.normed_together:
        yield "self_attention.q_layernorm.weight", "whole", (head_width,)
        yield "self_attention.k_layernorm.weight", "whole", (head_width,)
    if architecture.normed_together:
        yield "self_attention.q_layernorm.weight", "entries", (queries,)
        yield "self_attention.k_layernorm.weight", "entries", (architecture.num_key_value_heads * head_width,)
    if architecture.sinks:
        yield "self_attention.core_attention.sinks", "entries", (architecture.num_heads,)
    yield "self_attention.linear_proj.weight", "columns", (width, queries)
    if architecture.biased:
        yield "self_attention.linear_proj.bias", "whole", (width,)
    yield "pre_mlp_layernorm.weight", "whole", (width,)


def _delta_net(architecture: Architecture) -> Iterator[Shaped]:
    width, net, name = architecture.width, architecture.delta_net, "self_attention"
    assert net is not None
    of_key_heads: Kind = "key_heads" if net.grouped else "key_heads_apart"
    yield "input_layernorm.weight", "whole", (width,)
    yield f"{name}.in_proj.weight", of_key_heads, (net.num_key_heads * net.group_width, width)
    yield f"{name}.conv_weight", "key_heads_apart", (net.num_key_heads * net.convolved_width, 1, net.kernel)
    yield f"{name}.decay_log", "entries", (net.num_value_heads,)
    yield f"{name}.decay_bias", "entries", (net.num_value_heads,)
    yield f"{name}.norm_weight", "whole", (net.value_width,)
    yield f"{name}.out_proj.weight", "columns", (width, net.num_value_heads * net.value_width)
    yield "pre_mlp_layernorm.weight", "whole", (width,)


def _mlp(name: str, mlp_width: int, width: int) -> Iterator[Shaped]:
    yield f"{name}.linear_fc1.weight", "gate_up", (2 * mlp_width, width)
    yield f"{name}.linear_fc2.weight", "columns", (width, mlp_width)


def _mixture(experts: Experts, architecture: Architecture) -> Iterator[Shaped]:
    width, prefix = architecture.width, f"mlp.experts.local_experts.{EXPERT}"
    up: Kind
    down: Kind
    up, down = ("of_all_mixed", "of_all") if experts.in_one_tensor else ("stacked", "whole")
    if experts.outputs_first:
        up = down = "of_all_as_is"
    yield "mlp.router.weight", "whole", (experts.count, width)
    if experts.corrected:
        yield CORRECTION, "whole", (experts.count,)
    yield f"{prefix}.linear_fc1.weight", up, (2 * experts.width, width)
    yield f"{prefix}.linear_fc2.weight", down, (width, experts.width)
    if architecture.biased:
        yield "mlp.router.bias", "whole", (experts.count,)
        yield f"{prefix}.linear_fc1.bias", up, (2 * experts.width,)
        yield f"{prefix}.linear_fc2.bias", down, (width,)
    if experts.shared_width:
        yield from _mlp("mlp.shared_experts", experts.shared_width, width)
    if experts.shared_gated:
        yield "mlp.shared_experts.gate_weight", "whole", (1, width)
