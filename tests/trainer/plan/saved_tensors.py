"""Counts the bytes that the learner's real modules keep for the backward pass, at the shapes of one process of a layout.

Run by itself, because its process group is torch's fake one of eight: collectives return at once, and this process is rank 0 with
its own part of every layer. Reads cases from the file that it is given, and writes their counts to standard output.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch import Tensor, distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from tests.trainer.learner.tiny import make_samples
from trainer.batching.packing import pack
from trainer.learner import backend, delta_net
from trainer.learner.architecture import Architecture
from trainer.learner.attention import PackedAttention, Positions, Rotary
from trainer.learner.config import LearnerConfig
from trainer.learner.model import build_model

NUM_PROCESSES = 8


class Case(msgspec.Struct, frozen=True, kw_only=True):
    architecture: Architecture  # the number of layers does not matter
    config: LearnerConfig
    num_positions: int = 64
    keeps_all: bool = False  # whether linear attention keeps what it otherwise computes again


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """Per position of the micro-batch."""

    layer: float
    outside: float  # of the layers; a recomputed layer keeps the angles of the positions in a closure, which is not counted


class FlashKernel(torch.autograd.Function):
    """Keeps what the kernel on a GPU keeps: its inputs, its output, and one number per position and head. Computes nothing."""

    @staticmethod
    def forward(ctx: Any, query_PHD: Tensor, key_PHD: Tensor, value_PHD: Tensor) -> Tensor:
        output_PHD = torch.zeros(query_PHD.shape, dtype=query_PHD.dtype)
        ctx.save_for_backward(query_PHD, key_PHD, value_PHD, output_PHD, torch.zeros(query_PHD.shape[:2]))
        return output_PHD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        return None, None, None


def flash(_self: PackedAttention, query: Tensor, key: Tensor, value: Tensor, _packing: Any) -> Tensor:
    return FlashKernel.apply(query, key, value)


def keeping_all(function: Any, *inputs: Any, **_options: Any) -> Tensor:
    return function(*inputs)


def kept_bytes(case: Case, num_layers: int) -> int:
    """By storage: views of one tensor count once, parameters not at all."""
    architecture = msgspec.structs.replace(case.architecture, num_layers=num_layers)
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    # A sample of T tokens takes T - 1 positions.
    samples = make_samples((case.num_positions // 2 + 1,) * 2)
    (microbatch,) = pack(samples, max_tokens=case.num_positions)
    with backend.device_scope():
        model = build_model(architecture, case.config)
        for parameter in model.parameters():
            parameter.data.zero_()
        positions = Positions(case.config, Rotary(architecture))
        inputs = positions.mine(microbatch.inputs_P)[None]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(inputs, None, None, packed_seq_params=positions.packing(microbatch))
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


def count(case: Case) -> Counted:
    config = case.config
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        context_parallel_size=config.context_parallel,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    initialize_rng_tracker(inference_rng_tracker=True)
    delta_net.checkpoint = keeping_all if case.keeps_all else checkpoint
    one, two = kept_bytes(case, 1), kept_bytes(case, 2)
    return Counted(layer=(two - one) / case.num_positions, outside=(2 * one - two) / case.num_positions)


def main() -> None:
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_PROCESSES)
    PackedAttention.sample_by_sample = flash
    cases = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=list[Case])
    sys.stdout.buffer.write(msgspec.json.encode([count(case) for case in cases]))


if __name__ == "__main__":
    main()
