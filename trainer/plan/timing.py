"""How long a step and a publication take, from operations, bytes and the peaks of the devices. Estimates, measured nowhere on a GPU."""

import msgspec

from trainer.learner.architecture import Architecture
from trainer.learner.flops import training_flops
from trainer.plan.engines import EnginePlan
from trainer.plan.episodes import EpisodeLength
from trainer.plan.hardware import GIB, GpuGroup
from trainer.recipe import Recipe

# What recomputation adds to the three passes of a step: the whole forward pass, or the part of it that costs little.
REPEATED_PASSES = {"none": 0.0, "selective": 0.1, "full": 1.0}
# In bf16 at a learning rate of 1e-6, 4.2 % of the values change in the first step and fewer later; each is sent with its place.
DELTA_SHARE = 0.085
PCIE_EFFICIENCY = 0.5  # of its peak, for copies to pinned host memory


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    flops: int  # that the result needs
    train_s: float
    num_tokens: int  # positions that a step trains on or reads
    utilisation: float  # of the peak, by the operations that the result needs

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.train_s


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """One weight version on its way to all engines."""

    num_bytes: int  # of the version
    sent_bytes: int  # over the network, to all machines of engines together
    export_s: float  # from the GPUs to files
    load_s: float  # from the announcement to the last engine


def step_time(recipe: Recipe, architecture: Architecture, length: EpisodeLength, gpus: GpuGroup) -> StepTime:
    """Of one optimizer step over full groups of mean episodes."""
    num_episodes = recipe.batch.groups_per_step * recipe.rollout.group_size
    lengths = sample_lengths(recipe, length)
    rows = int(length.sampled_tokens)
    flops = num_episodes * training_flops(architecture, lengths, num_head_positions=rows)
    peak = gpus.count * gpus.device.flops_per_s
    done = flops * (1 + REPEATED_PASSES[recipe.learner.recompute] / 3) * recipe.learner.num_epochs
    train_s = done / (peak * recipe.plan.utilisation)
    return StepTime(
        flops=flops,
        train_s=train_s,
        num_tokens=num_episodes * sum(lengths),
        utilisation=flops * recipe.learner.num_epochs / (train_s * peak),
    )


def sample_lengths(recipe: Recipe, length: EpisodeLength) -> list[int]:
    """Of the samples that one mean episode is trained as: one, or one for each turn where the context of each turn differs."""
    context = recipe.rollout.context
    if not context.every_step and context.thinking != "strip":
        return [int(length.tokens)]
    turns = max(round(length.turns), 1)
    return [int(length.tokens * (turn + 1) / turns) for turn in range(turns)]


def publication(recipe: Recipe, num_bytes: int, learner: GpuGroup, engines: EnginePlan) -> Publication:
    """Of whole weights, adapters merged. Engines of one machine share what was brought to it, or read from a page cache."""
    plan, transport = recipe.plan, recipe.weights.transport
    storage, network = plan.storage_gib_per_s * GIB, plan.network_gib_per_s * GIB
    learner_nodes = -(-learner.count // plan.gpus_per_node)
    engine_nodes = -(-engines.gpus.count // plan.gpus_per_node)
    pcie = learner.device.pcie_bytes_per_s * PCIE_EFFICIENCY * learner.count
    to_gpu_s = engines.weight_bytes / (engines.gpus.device.pcie_bytes_per_s * PCIE_EFFICIENCY)
    at_once = min(recipe.weights.engines_at_once or engines.num_engines, engines.num_engines)
    rounds = -(-engines.num_engines // at_once)
    match transport:
        case "disk":
            sent_bytes, load_s = engine_nodes * num_bytes, num_bytes / storage + rounds * to_gpu_s
        case "delta":
            # Sent and rebuilt once for each machine, while its engines go on sampling.
            sent_bytes = int(engine_nodes * num_bytes * DELTA_SHARE)
            load_s = sent_bytes / network + num_bytes / storage + rounds * to_gpu_s
        case "distributed":
            sent_bytes = engines.num_engines * num_bytes
            load_s = sent_bytes / network + rounds * to_gpu_s
    return Publication(
        num_bytes=num_bytes,
        sent_bytes=sent_bytes,
        export_s=num_bytes / pcie + num_bytes / (storage * learner_nodes),
        load_s=load_s,
    )
