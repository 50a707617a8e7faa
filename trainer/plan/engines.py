"""What the engines hold and how fast they are: weights, KV cache, episodes, and tokens a second by the roofline.

Speeds are estimates: a step of decoding reads all weights and the KV cache of every running request once, a prompt costs two
operations for each weight and token. What SGLang reaches of the peaks is the two constants below; nothing here was measured on a GPU.
"""

import msgspec

from trainer.learner.architecture import Architecture
from trainer.plan.division import num_active_parameters, num_parameters
from trainer.plan.hardware import GpuGroup
from trainer.recipe import PlanRecipe

BYTES_PER_VALUE = 2  # weights and KV cache in bf16
MEMORY_EFFICIENCY = 0.6  # of the memory's peak, while it decodes
COMPUTE_EFFICIENCY = 0.5  # of the peak of matrix products, while it reads prompts


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """All engines are alike."""

    gpus: GpuGroup
    num_engines: int
    gpus_per_engine: int
    weight_bytes: int  # of one GPU
    usable_bytes: int  # of one GPU, for weights and KV cache
    kv_bytes_per_token: int  # of one GPU
    active_weight_bytes: int  # of one GPU, that one token needs

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache of one engine holds; 0 where not even the weights fit."""
        return max(self.usable_bytes - self.weight_bytes, 0) // self.kv_bytes_per_token

    def episodes_held(self, context_tokens: int) -> int:
        """Episodes whose contexts of so many tokens stay in the KV caches of all engines."""
        return self.num_engines * (self.kv_tokens // context_tokens)

    def decode_s_per_token(self, num_running: float, context_tokens: float) -> float:
        """Seconds for one token of each request, where an engine runs `num_running` with contexts of so many tokens."""
        device = self.gpus.device
        read_bytes = (
            min(self.weight_bytes, self.active_weight_bytes * max(num_running, 1))
            + num_running * context_tokens * self.kv_bytes_per_token
        )
        operations = num_running * self.active_weight_bytes
        return max(
            read_bytes / (device.memory_bytes_per_s * MEMORY_EFFICIENCY),
            operations / (device.flops_per_s * COMPUTE_EFFICIENCY),
        )

    def prompt_tokens_per_s(self) -> float:
        """Of one engine that does nothing else. Two operations per weight are one per byte of bf16."""
        return self.gpus.device.flops_per_s * COMPUTE_EFFICIENCY / self.active_weight_bytes


def plan_engines(architecture: Architecture, plan: PlanRecipe, gpus: GpuGroup) -> EnginePlan:
    """Raises ValueError where the layout of an engine does not divide the model or the GPUs."""
    size = plan.engine_gpus
    if architecture.num_heads % size:
        raise ValueError(
            f"plan.engine_gpus = {size} does not divide the model's {architecture.num_heads} attention heads: set it to a divisor"
        )
    if gpus.count < size:
        raise ValueError(
            f"plan.engine_gpus = {size}, but only {gpus.count} GPUs are left for engines: lower it or give more GPUs"
        )
    # With fewer key-value heads than GPUs each GPU holds one, so some are held twice.
    kv_heads = max(architecture.num_key_value_heads / size, 1)
    kv_bytes = 2 * architecture.num_layers * kv_heads * architecture.head_width * BYTES_PER_VALUE
    weight_bytes = num_parameters(architecture) * BYTES_PER_VALUE // size
    return EnginePlan(
        gpus=gpus,
        num_engines=gpus.count // size,
        gpus_per_engine=size,
        weight_bytes=weight_bytes,
        usable_bytes=int(gpus.device.memory_bytes * plan.engine_memory_share),
        kv_bytes_per_token=int(kv_bytes),
        active_weight_bytes=num_active_parameters(architecture) * BYTES_PER_VALUE // size,
    )
