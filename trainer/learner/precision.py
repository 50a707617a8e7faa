"""Weights in FP8 (E4M3) with one scale for each block of 128 x 128, the type in which DeepSeek, Qwen and others publish models: which
tensors have it, how many bytes they are, and what SGLang cannot serve. Pure arithmetic, no torch; `fp8.py` computes the numbers.

Projections of attention, MLPs and experts are packed. Embeddings, the output layer, norms, routers and gates, biases, convolutions, the
decays and strengths of linear attention, and whatever `modules_to_not_convert` of a model's `config.json` names, keep the learner's type.
"""

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from trainer.learner.architecture import Architecture
from trainer.learner.families.registry import FAMILIES, quantization_of
from trainer.learner.parameters import EXPERT, Parameter, layer_parameters, outer_parameters

BLOCK = 128
"""The rows and the columns of a block that has one scale."""

SCALE_BYTES = 4  # a scale is a number in fp32

_PROJECTIONS = (
    "linear_qkv.weight",
    "linear_proj.weight",
    "linear_fc1.weight",
    "linear_fc2.weight",
    "in_proj.weight",
    "out_proj.weight",
)
"""The ends of Megatron's names of what becomes packed tensors."""

_KEPT = ("in_proj_ba.weight", "in_proj_a.weight", "in_proj_b.weight")
"""The ends of Hugging Face's names of projections that are not packed: a strength and a decay of each head are fewer rows than a block."""

_KEYS_AND_VALUES = ("k_proj.weight", "v_proj.weight")


class PackedMatrix(msgspec.Struct, frozen=True):
    """A matrix in FP8, by Hugging Face's name of its tensor, which may have `{expert}` for the number of an expert."""

    name: str
    outputs: tuple[int, ...]  # the rows of its parts, each of which the GPUs of an engine divide by itself
    inputs: int
    # Whether the GPUs of an engine divide its inputs in place of its outputs
    is_divided_by_input: bool = False
    num_heads: int = 0  # the key-value heads that its outputs are, of which each GPU has at least one; 0: they are something else

    @property
    def module(self) -> str:
        """The name of its module, by which `modules_to_not_convert` leaves it out."""
        return self.name.removesuffix(".weight")

    @property
    def num_scales(self) -> int:
        return -(-sum(self.outputs) // BLOCK) * -(-self.inputs // BLOCK)

    @property
    def num_values(self) -> int:
        return sum(self.outputs) * self.inputs


def scale_name(weight: str) -> str:
    """The name of the scales of a packed tensor."""
    return f"{weight}_scale_inv"


def packed_matrices(architecture: Architecture, layer: int) -> Iterator[PackedMatrix]:
    """The matrices of a layer, counted from 0, that are packed; of experts, one for all of them."""
    prefix = f"{FAMILIES[architecture.family].language_prefix}layers.{layer}."
    for parameter in layer_parameters(architecture, layer):
        if not parameter.name.endswith(_PROJECTIONS):
            continue
        by_input = parameter.kind == "columns" or parameter.name.endswith("linear_fc2.weight")
        for origin, outputs in zip(parameter.origins, _outputs(parameter, architecture), strict=True):
            if not origin.endswith(_KEPT):
                heads = architecture.num_key_value_heads if origin.endswith(_KEYS_AND_VALUES) else 0
                yield PackedMatrix(prefix + origin, outputs, parameter.shape[1], by_input, heads)


def _outputs(parameter: Parameter, architecture: Architecture) -> list[tuple[int, ...]]:
    """The rows of each tensor of a parameter, by part."""
    rows, net = parameter.shape[0], architecture.delta_net
    if parameter.name.endswith("linear_qkv.weight"):
        keys = architecture.num_key_value_heads * architecture.head_width
        return [(rows - 2 * keys,), (keys,), (keys,)]
    if parameter.name.endswith("in_proj.weight"):
        assert net is not None
        heads, values = net.num_value_heads, net.num_value_heads * net.value_width
        joint = (net.num_key_heads * net.key_width, net.num_key_heads * net.key_width, values)
        return [(*joint, values), (2 * heads,)] if net.grouped else [joint, (values,), (heads,), (heads,)]
    return [(rows // len(parameter.origins),)] * len(parameter.origins)


def is_left_out(matrix: PackedMatrix, left_out: Sequence[str]) -> bool:
    """Whether `modules_to_not_convert` names the module or a part of the model that it belongs to, as SGLang reads that list."""
    return any(f".{one.strip('.')}." in f".{matrix.module}." for one in left_out)


def version_bytes(
    architecture: Architecture,
    *,
    value_bytes: int,
    fp8_except: Sequence[str] | None = None,
    share: float = 1.0,
) -> int:
    """The bytes of all trained tensors at `value_bytes` for each number, or in FP8 but for the modules `fp8_except`, if that is given. Of
    the experts a `share` counts. The few constants that are not trained are left out.
    """
    outer = outer_parameters(architecture)
    total = float(sum(prod(one.shape) for one in outer.values()) * value_bytes)
    if architecture.tied:
        total -= architecture.vocab_size * architecture.width * value_bytes
    for layer in range(architecture.num_layers):
        experts = architecture.experts_of(layer)
        copies = experts.count * share if experts else 1.0
        for one in layer_parameters(architecture, layer):
            if not one.is_constant:
                total += prod(one.shape) * value_bytes * (copies if one.is_expert else 1)
        for matrix in packed_matrices(architecture, layer) if fp8_except is not None else ():
            if not is_left_out(matrix, fp8_except or ()):
                saved = matrix.num_values * (value_bytes - 1) - matrix.num_scales * SCALE_BYTES
                total -= saved * (copies if EXPERT in matrix.name else 1)
    return round(total)


def fp8_faults(architecture: Architecture, *, engine_gpus: int = 1) -> Iterator[str]:
    """The reasons why engines of `engine_gpus` GPUs cannot serve this model in FP8, one sentence per reason."""
    fp8, instead = 'weights.precision = "fp8"', 'set weights.precision = "learner", with the model in bf16'
    family, experts = FAMILIES[architecture.family], architecture.experts
    if experts and experts.in_one_tensor:
        yield (
            f"{fp8}: the experts of {architecture.family} are one tensor, of which SGLang reads no scales of blocks; {instead}"
        )
        return
    if not family.engines_read_scales:
        yield (f"{fp8}: SGLang's loader of {architecture.family} takes no scales of blocks; {instead}")
        return
    of_gpu, lower = "", ""
    if engine_gpus > 1:
        of_gpu = f" on each of the {engine_gpus} GPUs of an engine"
        lower = ", or lower plan.engine_gpus, the engines' --tensor-parallel"
    matrices = (
        one for layer in range(architecture.num_layers) for one in packed_matrices(architecture, layer)
    )
    for name, matrix in {_without_layer(one.module): one for one in matrices}.items():
        for what, size in _sizes(matrix, engine_gpus):
            if size % BLOCK:
                yield (
                    f"{fp8}: {name} has {size:g} {what}{of_gpu}, which is no multiple of {BLOCK}, and SGLang multiplies blocks of "
                    f"{BLOCK} x {BLOCK}; {instead}{lower}"
                )


def _without_layer(module: str) -> str:
    return module.split("layers.", 1)[1].split(".", 1)[1]


def _sizes(matrix: PackedMatrix, engine_gpus: int) -> Iterator[tuple[str, float]]:
    """The inputs and outputs of a matrix on one GPU."""
    yield "inputs", matrix.inputs / (engine_gpus if matrix.is_divided_by_input else 1)
    if not matrix.is_divided_by_input:
        # Where there are fewer key-value heads than GPUs, each GPU has a whole one.
        divisor = min(engine_gpus, matrix.num_heads) if matrix.num_heads else engine_gpus
        yield from (("outputs", part / divisor) for part in matrix.outputs)


def is_fp8(directory: Path) -> bool:
    """Whether the weights in a directory are in FP8. Raises ValueError without a readable `config.json`."""
    return quantization_of(directory).get("quant_method") == "fp8"


def left_out_of(directory: Path) -> tuple[str, ...]:
    """The modules that `config.json` leaves out of FP8."""
    quantization: dict[str, Any] = quantization_of(directory)
    return tuple(quantization.get("modules_to_not_convert") or quantization.get("ignored_layers") or ())


def check_scale_format(directory: Path) -> None:
    """Raises ValueError for scales that are powers of two, which versions do not have."""
    scale_format = quantization_of(directory).get("scale_fmt")
    if scale_format not in (None, "float"):
        raise ValueError(
            f"model: {directory} has quantization_config.scale_fmt = {scale_format!r}, and versions have scales in fp32: take weights with "
            f"such, or write them with `python -m trainer.convert` in bf16 and from there with --fp8"
        )
