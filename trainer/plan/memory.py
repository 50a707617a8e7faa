"""The memory of one process of the learner: what its GPU holds, at its fullest moment, and what its host holds for it.

State and activations are exact up to what `activations` says of itself. What CUDA, NCCL and the allocator take besides is an allowance.
"""

from collections.abc import Iterable

import msgspec

from trainer.learner.architecture import Architecture
from trainer.learner.config import LearnerConfig
from trainer.plan.activations import head_bytes, layer_bytes, outer_bytes, saved_bytes
from trainer.plan.adapters import SUFFIX
from trainer.plan.devices import Device
from trainer.plan.division import Division, Parameter, parameters
from trainer.plan.hardware import GIB

CONTEXT_BYTES = 2 * GIB  # CUDA's context, the buffers of NCCL and of cuBLAS
FRAGMENTATION_SHARE = 0.04  # of a GPU, that the allocator holds and cannot use

WEIGHT_BYTES = {"bf16": 2, "fp32": 4}
GRADIENT_BYTES = 4  # gradients are summed in fp32
# Adam's two moments, and with bf16 weights their fp32 originals.
OPTIMIZER_BYTES = {"bf16": 12, "fp32": 8}
# torch's Adam computes all square roots of a step before it uses the first.
UPDATE_BYTES = 4


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one process of the learner, by pipeline stage."""

    stage: int
    weights: int
    gradients: int
    optimizer: int
    activations: int  # that the backward pass needs, of all micro-batches in flight
    logits: int  # of the LM head, at its largest
    update: int  # that the optimizer has on the GPU only while it updates, when there are no activations
    host_optimizer: int
    host_snapshots: int  # past weights for the audit, and the present ones while it goes on
    host_checkpoint: int  # a copy of weights and optimizer while a checkpoint is written

    @property
    def gpu_bytes(self) -> int:
        """At the fullest moment: in the backward pass, or in the update."""
        state = self.weights + self.gradients + self.optimizer
        return state + max(self.activations + self.logits, self.update)

    @property
    def host_bytes(self) -> int:
        return self.host_optimizer + self.host_snapshots + self.host_checkpoint


def usable_bytes(device: Device) -> int:
    """What is left for tensors."""
    return int(device.memory_bytes * (1 - FRAGMENTATION_SHARE)) - CONTEXT_BYTES


def fullest_rank(architecture: Architecture, config: LearnerConfig, division: Division) -> RankMemory:
    """Of the processes of all pipeline stages, the one whose GPU holds most."""
    stages = (rank_memory(architecture, config, division, stage) for stage in range(division.pipeline))
    return max(stages, key=lambda memory: memory.gpu_bytes)


def rank_memory(
    architecture: Architecture, config: LearnerConfig, division: Division, stage: int
) -> RankMemory:
    held = list(parameters(architecture, division, stage, config.lora))
    trained = [parameter for parameter in held if _is_trained(parameter, config)]
    share = _share(trained, division)
    num_owned = share if config.distributed_optimizer else _count(trained)
    optimizer = num_owned * OPTIMIZER_BYTES[config.dtype]
    on_host = optimizer if config.offload_optimizer else 0
    # Of the trained weights alone; processes that hold the same weights keep a part each.
    snapshot = share * WEIGHT_BYTES[config.dtype]
    copies = config.snapshots_kept + 1 if config.snapshots_kept else 0
    return RankMemory(
        stage=stage,
        weights=_count(held) * WEIGHT_BYTES[config.dtype],
        gradients=_count(trained) * GRADIENT_BYTES,
        optimizer=optimizer - on_host,
        activations=_activation_bytes(architecture, config, division, stage),
        logits=_logit_bytes(architecture, config) if stage == division.pipeline - 1 else 0,
        update=num_owned * UPDATE_BYTES + on_host,
        host_optimizer=on_host,
        host_snapshots=copies * snapshot,
        host_checkpoint=snapshot + optimizer,
    )


def _logit_bytes(architecture: Architecture, config: LearnerConfig) -> int:
    """As if every position were trained, which is more than any batch has."""
    return head_bytes(architecture, config, num_rows=config.micro_batch_tokens)


def _is_trained(parameter: Parameter, config: LearnerConfig) -> bool:
    if config.lora.rank:
        return SUFFIX in parameter.name
    return not config.train_only or any(part in parameter.name for part in config.train_only)


def _share(held: Iterable[Parameter], division: Division) -> int:
    """Values that each of the processes which hold the same ones keeps, where they divide them among themselves."""
    copies = {True: division.num_expert_copies, False: division.num_copies}
    return sum(-(-parameter.num_values // copies[parameter.is_expert]) for parameter in held)


def _count(held: Iterable[Parameter]) -> int:
    return sum(parameter.num_values for parameter in held)


def _activation_bytes(
    architecture: Architecture, config: LearnerConfig, division: Division, stage: int
) -> int:
    """Kept for the backward pass by all micro-batches in flight, and what one layer needs while its backward pass runs.

    A stage has begun one micro-batch for itself and one for each stage behind it. The layer whose backward pass runs has all its
    activations again, and about as much in gradients.
    """
    saved, whole = saved_bytes(architecture, config), layer_bytes(architecture, config)
    in_flight = division.pipeline - stage
    num_layers = architecture.num_layers // division.pipeline
    kept = in_flight * (num_layers * saved + outer_bytes(architecture, config))
    return round(config.micro_batch_tokens * (kept + (whole - saved) + whole))
