"""How the learner's processes divide a model, and which parameters one of them holds. Pure arithmetic, no torch."""

from collections.abc import Iterator
from typing import Self

import msgspec

from trainer.learner.architecture import Architecture, layout_faults
from trainer.learner.config import LearnerConfig, LoraConfig
from trainer.plan.adapters import adapter_sizes


class Division(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of the groups of processes."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int

    @classmethod
    def of(cls, config: LearnerConfig, architecture: Architecture, num_processes: int) -> Self:
        """Raises ValueError where the layout does not divide the model, or the processes."""
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
    def num_copies(self) -> int:
        """Processes that hold the same part of a weight outside of the experts."""
        return self.data * self.context

    @property
    def num_expert_copies(self) -> int:
        """Processes that hold the same expert: each is whole, also under tensor parallelism."""
        return self.tensor * self.num_copies // self.expert


class Parameter(msgspec.Struct, frozen=True):
    """A parameter as one process holds it, by the name that Megatron gives it; of a layer, of all its layers together."""

    name: str
    num_values: int
    is_expert: bool = False


def parameters(
    architecture: Architecture, division: Division, stage: int, lora: LoraConfig | None = None
) -> Iterator[Parameter]:
    """What a process of pipeline stage `stage` holds."""
    width, tensor = architecture.width, division.tensor
    vocab_rows = -(-architecture.vocab_size // tensor)
    is_first, is_last = stage == 0, stage == division.pipeline - 1
    # A tied output layer on a stage of its own needs a copy of the embedding there.
    if is_first or (is_last and architecture.tied):
        yield Parameter("embedding.word_embeddings.weight", vocab_rows * width)
    num_layers = architecture.num_layers // division.pipeline
    for name, num_values in _layer(architecture, tensor):
        yield Parameter(f"decoder.layers.{name}", num_layers * num_values)
    for name, num_values in _mlp(architecture, tensor):
        yield Parameter(f"decoder.layers.{name}", num_layers * num_values)
    for name, num_values in _experts(architecture, division.expert):
        yield Parameter(f"decoder.layers.{name}", num_layers * num_values, is_expert=True)
    for name, num_values in adapter_sizes(architecture, lora, tensor) if lora else ():
        yield Parameter(f"decoder.layers.{name}", num_layers * num_values)
    if is_last:
        yield Parameter("decoder.final_layernorm.weight", width)
        if not architecture.tied:
            yield Parameter("output_layer.weight", vocab_rows * width)


def num_parameters(architecture: Architecture) -> int:
    """Of the whole model."""
    return sum(parameter.num_values for parameter in _whole(architecture))


def num_active_parameters(architecture: Architecture) -> int:
    """Of the whole model, those that one token meets."""
    experts = architecture.experts
    share = experts.per_token / experts.count if experts else 1.0
    return round(
        sum(
            parameter.num_values * (share if parameter.is_expert else 1) for parameter in _whole(architecture)
        )
    )


def _whole(architecture: Architecture) -> Iterator[Parameter]:
    return parameters(architecture, Division(tensor=1, pipeline=1, context=1, expert=1, data=1), 0)


def _layer(architecture: Architecture, tensor: int) -> Iterator[tuple[str, int]]:
    width, head_width = architecture.width, architecture.head_width
    query_width = architecture.num_heads * head_width
    qkv_width = query_width + 2 * architecture.num_key_value_heads * head_width
    yield "input_layernorm.weight", width
    yield "self_attention.linear_qkv.weight", width * qkv_width // tensor
    if architecture.biased_qkv:
        yield "self_attention.linear_qkv.bias", qkv_width // tensor
    if architecture.normed_qk:
        yield "self_attention.q_layernorm.weight", head_width
        yield "self_attention.k_layernorm.weight", head_width
    yield "self_attention.linear_proj.weight", query_width * width // tensor
    yield "pre_mlp_layernorm.weight", width


def _mlp(architecture: Architecture, tensor: int) -> Iterator[tuple[str, int]]:
    width = architecture.width
    if architecture.experts:
        yield "mlp.router.weight", width * architecture.experts.count
        return
    yield "mlp.linear_fc1.weight", 2 * width * architecture.mlp_width // tensor
    yield "mlp.linear_fc2.weight", width * architecture.mlp_width // tensor


def _experts(architecture: Architecture, expert_parallel: int) -> Iterator[tuple[str, int]]:
    experts, width = architecture.experts, architecture.width
    if experts:
        num_local = experts.count // expert_parallel
        yield "mlp.experts.local_experts.linear_fc1.weight", num_local * 2 * width * experts.width
        yield "mlp.experts.local_experts.linear_fc2.weight", num_local * width * experts.width
