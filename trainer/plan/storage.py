"""Bytes outside of the GPUs: Redis, the trainer's memory, disk, containers, and what a publication moves."""

import msgspec

from pipeline.task import Resources
from trainer.learner.architecture import Architecture
from trainer.plan.adapters import num_adapter_parameters
from trainer.plan.division import num_parameters
from trainer.plan.episodes import EpisodeLength
from trainer.plan.hardware import GIB, Hosts
from trainer.plan.memory import OPTIMIZER_BYTES, WEIGHT_BYTES
from trainer.recipe import Recipe

# Compressed bytes of a trajectory for each token: its id, its text, and for sampled tokens the log-prob, which hardly compresses.
TOLD_TOKEN_BYTES = 5
SAMPLED_TOKEN_BYTES = 9
REQUEST_BYTES = 100_000  # of an outstanding request: mostly the task's tests
HEAD_BYTES = 500  # of a trajectory on the stream
EPISODES_SHARE = 0.85  # of a host's memory: swerve-episodes.slice


class StoragePlan(msgspec.Struct, frozen=True, kw_only=True):
    trajectory_bytes: int  # of the mean episode, compressed
    redis_bytes: int  # at most, just before a checkpoint lets Redis forget
    held_bytes: int  # of trajectories in the trainer's memory, at most
    checkpoint_bytes: int  # of one
    weights_bytes: int  # of one published version
    disk_bytes: int  # of the run directory, at most
    rollouts_bytes: int  # of that, for kept rollouts


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where the sandboxes run."""

    hosts: Hosts
    slots_per_host: int
    container_bytes: int  # that one container may use

    @property
    def num_slots(self) -> int:
        return self.hosts.count * self.slots_per_host

    def hosts_for(self, num_episodes: int) -> int:
        return -(-num_episodes // max(self.slots_per_host, 1))


def plan_storage(recipe: Recipe, architecture: Architecture, length: EpisodeLength) -> StoragePlan:
    told_tokens = length.tokens - length.sampled_tokens
    trajectory_bytes = int(told_tokens * TOLD_TOKEN_BYTES + length.sampled_tokens * SAMPLED_TOKEN_BYTES)
    per_step = recipe.batch.groups_per_step * recipe.rollout.group_size
    num_open = open_episodes(recipe)
    unacknowledged = recipe.checkpoint.every_steps * per_step + num_open
    parameters = num_parameters(architecture)
    weights_bytes = parameters * WEIGHT_BYTES[recipe.learner.dtype]
    trained = num_adapter_parameters(architecture, recipe.learner.lora) or parameters
    optimizer_bytes = OPTIMIZER_BYTES[recipe.learner.dtype]
    checkpoint_bytes = weights_bytes + trained * optimizer_bytes
    rollouts_bytes = _rollouts_bytes(recipe, per_step * trajectory_bytes)
    # One checkpoint and one version more than are kept exist while the next is written.
    written = (recipe.checkpoint.keep + 1) * checkpoint_bytes + (recipe.weights.keep + 1) * weights_bytes
    return StoragePlan(
        trajectory_bytes=trajectory_bytes,
        redis_bytes=unacknowledged * (trajectory_bytes + HEAD_BYTES) + num_open * REQUEST_BYTES,
        held_bytes=num_open * trajectory_bytes,
        checkpoint_bytes=checkpoint_bytes,
        weights_bytes=weights_bytes,
        disk_bytes=written + rollouts_bytes,
        rollouts_bytes=rollouts_bytes,
    )


def open_episodes(recipe: Recipe) -> int:
    """Episodes that may be open at once, so that none is trained too late."""
    groups = min(recipe.admission.max_lag_versions + 1, recipe.num_steps) * recipe.batch.groups_per_step
    return groups * recipe.rollout.group_size


def plan_fleet(recipe: Recipe, hosts: Hosts) -> FleetPlan:
    """As many slots as the cores and the memory of a host allow, if every container uses all that it may."""
    container_bytes = Resources().memory_bytes
    by_memory = int(hosts.memory_bytes * EPISODES_SHARE) // container_bytes
    by_cores = int(hosts.cores * recipe.plan.slots_per_core)
    return FleetPlan(hosts=hosts, slots_per_host=min(by_cores, by_memory), container_bytes=container_bytes)


def _rollouts_bytes(recipe: Recipe, step_bytes: int) -> int:
    keep = recipe.rollouts.keep
    share = {"all": 1.0, "none": 0.0}[keep] if isinstance(keep, str) else keep
    return min(recipe.rollouts.max_bytes, int(recipe.num_steps * step_bytes * share))


def gib(num_bytes: float) -> str:
    """As people read it: "24.6 GiB", or "310 MiB" where that is less than one."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:,.0f} MiB"
