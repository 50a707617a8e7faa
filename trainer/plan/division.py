"""A recipe's model: its shape, its adapters, and how the learner's processes divide its parameters. Pure arithmetic, no torch.

The shape is read from the model's own directory or, before the model is downloaded, from the published `config.json` of the model with that
name. `trainer/plan/models/` holds the configurations of known models, without weights. `trainer/learner/lora.py` makes the adapters.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from trainer.learner.architecture import Architecture, layout_faults
from trainer.learner.config import LearnerConfig, LoraConfig
from trainer.learner.families.registry import read_architecture
from trainer.learner.parameters import (
    EMBEDDING,
    EXPERT,
    FINAL_NORM,
    OUTPUT,
    layer_parameters,
    outer_parameters,
)

KNOWN = Path(__file__).parent / "models"
FP8_SUFFIX = "-fp8"
"""What ends the names of models that are published in FP8, beside the same in bf16."""


def known_models() -> list[str]:
    return sorted(path.name for path in KNOWN.iterdir() if path.is_dir())


def shape_of(model: str) -> tuple[Architecture, bool]:
    """The architecture of the model in directory `model`, and whether it was read there rather than from the known models.
    Raises ValueError if the directory is missing and its name is that of no known model.
    """
    directory = Path(model)
    if (directory / "config.json").exists():
        return read_architecture(directory), True
    names = {name.lower(): name for name in known_models()}
    name = names.get(directory.name.lower()) or names.get(directory.name.lower().removesuffix(FP8_SUFFIX))
    if name is None:
        raise ValueError(
            f"model: {directory} has no config.json, and {directory.name} is not one of the models whose shape is known "
            f"({', '.join(names.values())}): put the model's config.json there; weights are not needed to plan"
        )
    return read_architecture(KNOWN / name), False


SUFFIX = "_adapter"
"""The suffix that the name of an adapter's layer adds to the name of the layer that it belongs to."""


class _Projection(msgspec.Struct, frozen=True):
    """A projection that may have adapters, in all layers of a process that have it."""

    layer: str  # the layer in which Megatron computes it
    inputs: int
    outputs: int
    count: int  # layers that have it, on a process
    copies: int  # experts of one of these layers that have it, on a process; 0: it is none of experts


def adapter_sizes(
    architecture: Architecture, lora: LoraConfig, division: "Division", layers: range
) -> Iterator["HeldParameter"]:
    """Each adapter matrix, in all of these layers together. Layers with linear attention have none for their attention.

    For a layer that is divided by output, A is whole and B divided; for one that is divided by input, the other way round. An expert's are
    whole.
    """
    if not lora.rank:
        return
    for one, found in _projections(architecture, division.expert, layers):
        if one not in lora.targets or not found.count:
            continue
        tensor = 1 if found.copies else division.tensor
        inputs, outputs = found.inputs, found.outputs
        if found.layer.endswith(("linear_proj", "linear_fc2")):
            inputs //= tensor
        else:
            outputs //= tensor
        for letter, width in (("A", inputs), ("B", outputs)):
            yield HeldParameter(
                f"decoder.layers.{found.layer}{SUFFIX}.{one}_{letter}",
                found.count * max(found.copies, 1) * lora.rank * width,
                is_expert=bool(found.copies),
                num_layers=found.count,
            )


def num_adapter_parameters(architecture: Architecture, lora: LoraConfig) -> int:
    """The number of adapter parameters of the whole model; 0 without adapters."""
    layers = range(architecture.num_layers)
    return sum(one.num_values for one in adapter_sizes(architecture, lora, _UNDIVIDED, layers))


def _projections(
    architecture: Architecture, expert_parallel: int, layers: range
) -> Iterator[tuple[str, _Projection]]:
    """The projections of these layers, by Hugging Face's names."""
    width, head_width = architecture.width, architecture.head_width
    queries, keys = architecture.num_heads * head_width, architecture.num_key_value_heads * head_width
    joint, attending = "self_attention.linear_qkv", len({*layers} - architecture.delta_layers)
    gated = queries * (2 if architecture.gated else 1)
    yield "q_proj", _Projection(joint, width, gated, attending, 0)
    yield "k_proj", _Projection(joint, width, keys, attending, 0)
    yield "v_proj", _Projection(joint, width, keys, attending, 0)
    yield "o_proj", _Projection("self_attention.linear_proj", queries, width, attending, 0)
    experts, name = architecture.experts, "mlp"
    inner, count, copies = architecture.mlp_width, len(layers), 0
    if experts:  # the only MLPs of a mixture that have adapters
        name, inner, copies = "mlp.experts.local_experts", experts.width, experts.count // expert_parallel
        count = sum(architecture.experts_of(layer) is not None for layer in layers)
    yield "gate_proj", _Projection(f"{name}.linear_fc1", width, inner, count, copies)
    yield "up_proj", _Projection(f"{name}.linear_fc1", width, inner, count, copies)
    yield "down_proj", _Projection(f"{name}.linear_fc2", inner, width, count, copies)


class Division(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of the groups of processes."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int

    @classmethod
    def of(cls, config: LearnerConfig, architecture: Architecture, num_processes: int) -> Self:
        """The sizes for a configuration. Raises ValueError if the layout does not divide the model, or the processes."""
        for fault in layout_faults(architecture, config):
            raise ValueError(fault)
        if num_processes % config.replica_processes:
            raise ValueError(
                f"learner.tensor_parallel x pipeline_parallel x context_parallel = {config.tensor_parallel} x "
                f"{config.pipeline_parallel} x {config.context_parallel} needs {config.replica_processes} GPUs or a multiple for "
                f"the learner, not {num_processes}: change plan.learner_gpus, or lower one of them"
            )
        division = cls(
            tensor=config.tensor_parallel,
            pipeline=config.pipeline_parallel,
            context=config.context_parallel,
            expert=config.expert_parallel,
            data=num_processes // config.replica_processes,
        )
        if (num_processes // division.pipeline) % division.expert:
            raise ValueError(
                f"learner.expert_parallel = {division.expert} does not divide the {num_processes // division.pipeline} GPUs of a "
                "pipeline stage: set it to a divisor"
            )
        return division

    @property
    def replica(self) -> int:
        """The number of processes that together hold one copy of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def num_copies(self) -> int:
        """The number of processes that hold the same part of a weight outside of the experts."""
        return self.data * self.context

    @property
    def num_expert_copies(self) -> int:
        """The number of processes that hold the same expert: each expert is whole, even under tensor parallelism."""
        return self.tensor * self.num_copies // self.expert


class HeldParameter(msgspec.Struct, frozen=True):
    """One process's part of a parameter, by Megatron's name; a layer's parameter covers the same parameter of all of its layers."""

    name: str
    num_values: int
    is_expert: bool = False
    num_layers: int = 1


def parameters(
    architecture: Architecture, division: Division, stage: int, lora: LoraConfig | None = None
) -> Iterator[HeldParameter]:
    """The parameters of a process of pipeline stage `stage`, without the few constants that are not trained."""
    tensor, outer = division.tensor, outer_parameters(architecture)
    is_first, is_last = stage == 0, stage == division.pipeline - 1
    # A tied output layer on a stage of its own needs a copy of the embedding there.
    if is_first or (is_last and architecture.tied):
        yield HeldParameter(EMBEDDING, outer[EMBEDDING].num_values(tensor))
    num_layers = architecture.num_layers // division.pipeline
    layers = range(stage * num_layers, (stage + 1) * num_layers)
    for parameter, count in Counter(
        parameter
        for layer in layers
        for parameter in layer_parameters(architecture, layer)
        if not parameter.is_constant
    ).items():
        experts = architecture.experts
        copies = experts.count // division.expert if parameter.is_expert and experts else 1
        yield HeldParameter(
            "decoder.layers." + parameter.name.replace(f".{EXPERT}", ""),
            count * copies * parameter.num_values(tensor),
            parameter.is_expert,
            count,
        )
    if lora:
        yield from adapter_sizes(architecture, lora, division, layers)
    if is_last:
        yield HeldParameter(FINAL_NORM, outer[FINAL_NORM].num_values(tensor))
        if not architecture.tied:
            yield HeldParameter(OUTPUT, outer[OUTPUT].num_values(tensor))


def num_parameters(architecture: Architecture) -> int:
    """The parameters of the whole model."""
    return sum(parameter.num_values for parameter in _whole(architecture))


def active_share(architecture: Architecture) -> float:
    """The share of the experts that one token passes; 1 without experts."""
    experts = architecture.experts
    return experts.per_token / experts.count if experts else 1.0


def num_active_parameters(architecture: Architecture) -> int:
    """The parameters of the whole model that one token passes."""
    share = active_share(architecture)
    return round(
        sum(
            parameter.num_values * (share if parameter.is_expert else 1) for parameter in _whole(architecture)
        )
    )


_UNDIVIDED = Division(tensor=1, pipeline=1, context=1, expert=1, data=1)


def _whole(architecture: Architecture) -> Iterator[HeldParameter]:
    return parameters(architecture, _UNDIVIDED, 0)
