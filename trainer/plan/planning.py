"""The whole plan of a run, and its parts that do not fit. It starts nothing and reads only the recipe and the model's `config.json`.

Besides GPU memory it computes the sizes of Redis, the trainer's memory, disk and containers, and the durations of a step and a publication.
Times are computed from operations, bytes and the peaks of the devices; they are estimates, and none was measured on a GPU.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from pipeline.harness import Harness
from pipeline.task import Resources
from trainer.agent_file import read_program
from trainer.learner.architecture import Architecture, recomputed_flops, training_flops
from trainer.learner.config import LearnerConfig
from trainer.learner.devices import GIB, GpuGroup, Gpus, Hosts
from trainer.learner.precision import left_out_of, version_bytes
from trainer.plan.division import Division, num_adapter_parameters, num_parameters, shape_of
from trainer.plan.engines import Demand, EnginePlan, EpisodeLength, demand, episode_length, plan_engines
from trainer.plan.memory import (
    FP32_BYTES,
    OPTIMIZER_BYTES,
    VALUE_BYTES,
    WEIGHT_BYTES,
    RankMemory,
    fullest_rank,
    usable_bytes,
)
from trainer.recipe import Recipe
from trainer.recipe.loading import about_source

# Compressed bytes of a trajectory for each token: its id, its text, and for sampled tokens the log-prob, which hardly compresses.
TOLD_TOKEN_BYTES = 5
SAMPLED_TOKEN_BYTES = 9
REQUEST_BYTES = 100_000  # size of an outstanding request: mostly the task's tests
HEAD_BYTES = 500  # size of a trajectory's entry on the stream
EPISODES_SHARE = 0.85  # share of a host's memory that episodes may use: swerve-episodes.slice


class StoragePlan(msgspec.Struct, frozen=True, kw_only=True):
    trajectory_bytes: int  # the mean episode, compressed
    redis_bytes: int  # the largest size, just before a checkpoint lets Redis delete trajectories
    held_bytes: int  # largest size of the trajectories in the trainer's memory
    checkpoint_bytes: int  # one checkpoint
    weights_bytes: int  # one published version
    base_bytes: int  # the weights that adapters belong to, if each version is adapters alone
    disk_bytes: int  # largest size of the run directory
    rollouts_bytes: int  # the part of disk_bytes for kept rollouts


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts of the sandboxes."""

    hosts: Hosts
    slots_per_host: int
    container_bytes: int  # memory that one container may use

    @property
    def num_slots(self) -> int:
        return self.hosts.count * self.slots_per_host

    def hosts_for(self, num_episodes: int) -> int:
        return -(-num_episodes // max(self.slots_per_host, 1))


def plan_storage(
    recipe: Recipe,
    architecture: Architecture,
    length: EpisodeLength,
    *,
    fp8_except: Sequence[str] | None = None,
) -> StoragePlan:
    """What a run stores. `fp8_except` is that of `plan_engines`."""
    told_tokens = length.tokens - length.sampled_tokens
    trajectory_bytes = int(told_tokens * TOLD_TOKEN_BYTES + length.sampled_tokens * SAMPLED_TOKEN_BYTES)
    per_step = recipe.batch.groups_per_step * recipe.rollout.group_size
    num_open = open_episodes(recipe)
    unacknowledged = recipe.checkpoint.every_steps * per_step + num_open
    parameters = num_parameters(architecture)
    value_bytes, base_bytes = WEIGHT_BYTES[recipe.learner.dtype], 0
    whole_bytes = parameters * value_bytes
    trained = num_adapter_parameters(architecture, recipe.learner.lora) or parameters
    optimizer_bytes = OPTIMIZER_BYTES[recipe.learner.dtype]
    checkpoint_bytes = whole_bytes + trained * optimizer_bytes
    weights_bytes = version_bytes(architecture, value_bytes=value_bytes, fp8_except=fp8_except)
    if recipe.weights.adapters == "alone":
        base_bytes, weights_bytes = whole_bytes, trained * value_bytes
    rollouts_bytes = _rollouts_bytes(recipe, per_step * trajectory_bytes)
    # One checkpoint and one version more than are kept exist while the next is written.
    written = (recipe.checkpoint.keep + 1) * checkpoint_bytes + (recipe.weights.keep + 1) * weights_bytes
    return StoragePlan(
        trajectory_bytes=trajectory_bytes,
        redis_bytes=unacknowledged * (trajectory_bytes + HEAD_BYTES) + num_open * REQUEST_BYTES,
        held_bytes=num_open * trajectory_bytes,
        checkpoint_bytes=checkpoint_bytes,
        weights_bytes=weights_bytes,
        base_bytes=base_bytes,
        disk_bytes=written + base_bytes + rollouts_bytes,
        rollouts_bytes=rollouts_bytes,
    )


def open_episodes(recipe: Recipe) -> int:
    """The number of episodes that may be open at once so that none is trained too late."""
    groups = min(recipe.admission.max_lag_versions + 1, recipe.num_steps) * recipe.batch.groups_per_step
    return groups * recipe.rollout.group_size


def plan_fleet(recipe: Recipe, hosts: Hosts) -> FleetPlan:
    """The slots that the cores and the memory of a host allow, if every container uses everything that it may."""
    container_bytes = Resources().memory_bytes
    by_memory = int(hosts.memory_bytes * EPISODES_SHARE) // container_bytes
    by_cores = int(hosts.cores * recipe.plan.slots_per_core)
    return FleetPlan(hosts=hosts, slots_per_host=min(by_cores, by_memory), container_bytes=container_bytes)


def _rollouts_bytes(recipe: Recipe, step_bytes: int) -> int:
    keep = recipe.rollouts.keep
    share = {"all": 1.0, "none": 0.0}[keep] if isinstance(keep, str) else keep
    return min(recipe.rollouts.max_bytes, int(recipe.num_steps * step_bytes * share))


def gib(num_bytes: float) -> str:
    """The size in readable form: "24.6 GiB", or "310 MiB" if it is less than one GiB."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:,.0f} MiB"


# The share of its peak that a GPU may reach while it trains, slow and fast, where plan.utilisation says nothing. The attention, the
# MLP's activation and the rotary embedding are not fused kernels, and communication does not overlap with computation.
DENSE_UTILISATION = (0.2, 0.4)
# The experts of a GPU are one product, but of few rows each, and tokens are copied and sent for it in every layer. Not measured.
MIXTURE_UTILISATION = (0.05, 0.15)
# The share of a version's bytes that a patch has, measured at a learning rate of 1e-6, in docs/weights.md. A larger rate changes more.
DELTA_SHARE = 0.0043
# The trainer reads the new version to hash it, and both versions to compare them; a receiver reads the old version and writes the new one.
DELTA_READS_BY_TRAINER, DELTA_PASSES_BY_RECEIVER = 3, 2
PCIE_EFFICIENCY = 0.5  # share of its peak that copies to pinned host memory reach


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """The learner's work of one step, and its duration if a GPU reaches little or much of its peak."""

    flops: int  # floating-point operations that the result needs
    num_tokens: int  # positions that a step trains on or reads
    slow_s: float
    fast_s: float
    peak_flops_per_s: float  # the peaks of all GPUs of the learner together
    sent_bytes: int  # bytes that a GPU sends to the experts of others and back, if all experts are chosen equally often
    sent_to_machines_bytes: int  # the part of these that leaves its machine

    def utilisation(self, train_s: float) -> float:
        """The used share of the peak, by the operations that the result needs."""
        return self.flops / (train_s * self.peak_flops_per_s)


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """One weight version on its way to all engines."""

    num_bytes: int  # size of the version
    sent_bytes: int  # bytes sent over the network to all machines of engines
    export_s: float  # time of writing the GPUs' weights to files
    load_s: float  # time from the announcement until the last engine has the version


def step_time(recipe: Recipe, architecture: Architecture, length: EpisodeLength, gpus: GpuGroup) -> StepTime:
    """The time of one optimizer step over full groups of mean episodes."""
    num_episodes = recipe.batch.groups_per_step * recipe.rollout.group_size
    lengths = sample_lengths(recipe, length)
    rows = int(length.sampled_tokens)
    num_played = num_episodes * recipe.learner.num_epochs
    flops = num_played * training_flops(architecture, lengths, num_head_positions=rows)
    repeated = num_played * recomputed_flops(architecture, lengths, recipe.learner.recompute)
    peak = gpus.count * gpus.device.flops_per_s
    peak_s = (flops + repeated) / peak
    slow, fast = utilisation_range(recipe, architecture)
    num_positions = num_episodes * sum(lengths)
    sent = (
        num_positions
        * recipe.learner.num_epochs
        * dispatched_bytes(architecture, recipe.learner)
        / gpus.count
    )
    expert = recipe.learner.expert_parallel
    elsewhere = (expert - min(expert, recipe.plan.gpus_per_node)) / max(expert - 1, 1)
    return StepTime(
        flops=flops,
        num_tokens=num_positions,
        sent_bytes=round(sent),
        sent_to_machines_bytes=round(sent * elsewhere),
        slow_s=peak_s / slow,
        fast_s=peak_s / fast,
        peak_flops_per_s=peak,
    )


def dispatched_bytes(architecture: Architecture, config: LearnerConfig) -> float:
    """Bytes that one position's way to its experts and back is, over all layers, where these are on other processes.

    It takes a vector to each of its experts, with a share in fp32, and gets one from each; the backward pass sends the gradients of all
    three the other way. What is recomputed is sent again.
    """
    if architecture.experts is None:
        return 0.0
    num_layers = architecture.num_layers - architecture.experts.num_dense_layers
    elsewhere = (config.expert_parallel - 1) / config.expert_parallel
    of_choice = 2 * architecture.width * VALUE_BYTES[config.dtype] + FP32_BYTES
    num_passes = 2 if config.recompute == "none" else 3
    return num_layers * architecture.experts.per_token * elsewhere * num_passes * of_choice


def utilisation_range(recipe: Recipe, architecture: Architecture) -> tuple[float, float]:
    """Returns the least and the greatest share of its peak FLOP/s that a training GPU reaches, recomputed operations included.

    A recipe may set the share.
    """
    if recipe.plan.utilisation is not None:
        return recipe.plan.utilisation, recipe.plan.utilisation
    return MIXTURE_UTILISATION if architecture.experts else DENSE_UTILISATION


def sample_lengths(recipe: Recipe, length: EpisodeLength) -> list[int]:
    """The lengths of the samples of one mean episode: one sample, or one for each turn if the context of each turn differs."""
    context = recipe.rollout.context
    if not context.every_step and context.thinking != "strip":
        return [int(length.tokens)]
    turns = max(round(length.turns), 1)
    return [int(length.tokens * (turn + 1) / turns) for turn in range(turns)]


def publication(recipe: Recipe, num_bytes: int, learner: GpuGroup, engines: EnginePlan) -> Publication:
    """The times of publishing a version: whole weights, with merged adapters, or adapters alone. Engines of one machine share a received
    version, or a page cache.
    """
    plan, transport = recipe.plan, recipe.weights.transport
    storage, network = plan.storage_gib_per_s * GIB, plan.network_gib_per_s * GIB
    learner_nodes = -(-learner.count // plan.gpus_per_node)
    engine_nodes = -(-engines.gpus.count // plan.gpus_per_node)
    pcie = learner.device.pcie_bytes_per_s * PCIE_EFFICIENCY * learner.count
    is_alone = recipe.weights.adapters == "alone"
    gpu_bytes = num_bytes // engines.gpus_per_engine if is_alone else engines.weight_bytes
    to_gpu_s = gpu_bytes / (engines.gpus.device.pcie_bytes_per_s * PCIE_EFFICIENCY)
    at_once = min(recipe.weights.engines_at_once or engines.num_engines, engines.num_engines)
    rounds = -(-engines.num_engines // at_once)
    match transport:
        case "disk":
            sent_bytes, load_s = engine_nodes * num_bytes, num_bytes / storage + rounds * to_gpu_s
        case "delta":
            # The patch is sent to and applied on each machine once, while its engines continue to sample.
            sent_bytes = int(engine_nodes * num_bytes * (1 if is_alone else DELTA_SHARE))
            disk_s = (DELTA_READS_BY_TRAINER + DELTA_PASSES_BY_RECEIVER) * num_bytes / storage
            load_s = disk_s + sent_bytes / network + rounds * to_gpu_s
        case "distributed":
            sent_bytes = engines.num_engines * num_bytes
            load_s = sent_bytes / network + rounds * to_gpu_s
    return Publication(
        num_bytes=num_bytes,
        sent_bytes=sent_bytes,
        export_s=num_bytes / pcie + num_bytes / (storage * learner_nodes),
        load_s=load_s,
    )


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of a run in which the learner computes for `train_s` seconds per step. Either the learner or the engines limit it."""

    train_s: float
    demand: Demand
    episodes_per_step: int

    @property
    def step_s(self) -> float:
        """The seconds of a step, including its wait for episodes."""
        return max(self.train_s, self.episodes_per_step / self.demand.episodes_per_s)

    @property
    def waiting(self) -> float:
        """Share of a step that the learner waits for episodes."""
        return 1 - self.train_s / self.step_s

    @property
    def num_running(self) -> int:
        """The number of concurrent episodes: as many as the learner needs, or as are possible."""
        return min(self.demand.num_needed or self.demand.num_possible, self.demand.num_possible)


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All numbers of one recipe on one set of machines."""

    recipe: Recipe
    architecture: Architecture
    is_model_here: bool  # whether the shape was read from the recipe's model, not from the known ones
    gpus: Gpus
    division: Division
    rank: RankMemory
    engines: EnginePlan
    length: EpisodeLength
    step: StepTime
    publication: Publication
    storage: StoragePlan
    fleet: FleetPlan | None  # None: no hosts were given
    bounds: dict[str, int]  # episodes that may run at once, by what limits them
    slow: Throughput  # throughput if the learner reaches little of its GPUs' peak
    fast: Throughput  # throughput if it reaches much of its GPUs' peak
    program: Harness | None = None  # the agent program that plays; None: the built-in loop

    @property
    def usable_gpu_bytes(self) -> int:
        return usable_bytes(self.gpus.learner.device)

    @property
    def node_host_bytes(self) -> int:
        """Host memory of the learner's processes of one machine."""
        return min(self.gpus.learner.count, self.recipe.plan.gpus_per_node) * self.rank.host_bytes

    @property
    def episodes_held(self) -> int:
        """The number of episodes of mean length that all engines hold."""
        return self.engines.episodes_held(int(self.length.tokens))


def counted(recipe: Recipe) -> Recipe:
    """The recipe with one source that needs as much as any: the largest groups, contexts and numbers of turns, and the agent program with
    the longest opening.
    """
    each = list(recipe.by_source.values())
    limits = [one.rollout.limits for one in each]
    openings = list[int]()
    for name, one in recipe.by_source.items():
        with about_source(name):
            openings.append(_opening_tokens(read_program(one.rollout)))
    largest = each[openings.index(max(openings))]
    rollout = replace(
        largest.rollout,
        group_size=recipe.largest_group_size,
        limits=replace(
            largest.rollout.limits,
            context_tokens=max(one.context_tokens for one in limits),
            turns=max(one.turns for one in limits),
        ),
    )
    return replace(largest, rollout=rollout)


def _opening_tokens(program: Harness | None) -> int:
    return program.footprint.opening_tokens if program is not None else 0


def _fp8_except(recipe: Recipe, *, is_model_here: bool) -> tuple[str, ...] | None:
    """The modules that are left out of versions in FP8; None if these are not in FP8."""
    if recipe.weights.precision == "learner":
        return None
    return left_out_of(Path(recipe.model)) if is_model_here else ()


def make_plan(recipe: Recipe, *, measured: Path | None = None) -> RunPlan:
    """The plan, for the recipe as `counted` has it. Raises ValueError if the recipe, its layout and its machines contradict each other;
    `misfits` returns what does not fit.
    """
    recipe = counted(recipe)
    wanted = recipe.plan
    if not wanted.gpus:
        raise ValueError(
            "--gpus is missing: say which, as in --gpus 16xH100-80, or set plan.gpus in the recipe"
        )
    architecture, is_model_here = shape_of(recipe.model)
    gpus = Gpus.parse(wanted.gpus, num_learner=wanted.learner_gpus, num_reserved=wanted.reserved_gpus)
    division = Division.of(recipe.learner, architecture, gpus.learner.count)
    fp8_except = _fp8_except(recipe, is_model_here=is_model_here)
    engines = plan_engines(architecture, wanted, gpus.engines, fp8_except=fp8_except)
    program = read_program(recipe.rollout)
    length = episode_length(recipe, measured, opening_tokens=_opening_tokens(program))
    step = step_time(recipe, architecture, length, gpus.learner)
    storage = plan_storage(recipe, architecture, length, fp8_except=fp8_except)
    fleet = plan_fleet(recipe, Hosts.parse(wanted.hosts)) if wanted.hosts else None
    bounds = {
        "admission.max_lag_versions": open_episodes(recipe),
        "the engines' KV cache": engines.episodes_held(int(length.tokens)),
        **({"the slots of the hosts": fleet.num_slots} if fleet else {}),
    }

    def throughput(train_s: float) -> Throughput:
        per_step = recipe.batch.groups_per_step * recipe.rollout.group_size
        num_possible = max(min(bounds.values()), 1)
        needed = demand(length, engines, episodes_per_s=per_step / train_s, num_possible=num_possible)
        return Throughput(train_s=train_s, demand=needed, episodes_per_step=per_step)

    slow = throughput(step.slow_s)
    num_senders = engines.num_engines if recipe.weights.transport == "distributed" else 0
    return RunPlan(
        recipe=recipe,
        architecture=architecture,
        is_model_here=is_model_here,
        gpus=gpus,
        division=division,
        rank=fullest_rank(architecture, recipe.learner, division, num_senders=num_senders),
        engines=engines,
        length=length,
        step=step,
        publication=publication(recipe, storage.weights_bytes, gpus.learner, engines),
        storage=storage,
        fleet=fleet,
        bounds=bounds,
        slow=slow,
        fast=slow if step.fast_s == step.slow_s else throughput(step.fast_s),
        program=program,
    )


Part = Literal["learner GPU", "learner host", "engine GPU", "Redis", "trainer memory"]


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """The requirement of one part of the system, and what is available."""

    part: Part
    what: str  # the part's name as the subject of a sentence
    needed_bytes: int
    usable_bytes: int

    @property
    def excess_bytes(self) -> int:
        return self.needed_bytes - self.usable_bytes

    @property
    def fits(self) -> bool:
        return self.excess_bytes <= 0

    def __str__(self) -> str:
        sentence = f"{self.what} needs {gib(self.needed_bytes)} and has {gib(self.usable_bytes)}"
        return sentence if self.fits else f"{sentence}: {gib(self.excess_bytes)} too much"


def needs(plan: RunPlan) -> dict[Part, Need]:
    """The needs of every part that can be too small, most important first."""
    recipe, engines = plan.recipe, plan.engines
    context_bytes = round(engines.context_bytes(recipe.rollout.limits.context_tokens))
    found = (
        Need(
            part="learner GPU",
            what="a GPU of the learner",
            needed_bytes=plan.rank.gpu_bytes,
            usable_bytes=plan.usable_gpu_bytes,
        ),
        Need(
            part="learner host",
            what="the host memory of a machine of the learner (plan.node_memory_gib)",
            needed_bytes=plan.node_host_bytes,
            usable_bytes=recipe.plan.node_memory_gib * GIB,
        ),
        Need(
            part="engine GPU",
            what="a GPU of an engine, for its weights and one whole context,",
            needed_bytes=engines.weight_bytes + context_bytes,
            usable_bytes=engines.usable_bytes,
        ),
        Need(
            part="Redis",
            what="Redis, for trajectories until a checkpoint holds them (admission.max_queue_bytes),",
            needed_bytes=plan.storage.redis_bytes,
            usable_bytes=recipe.admission.max_queue_bytes,
        ),
        Need(
            part="trainer memory",
            what="the trainer, for trajectories until their step (admission.max_held_bytes),",
            needed_bytes=plan.storage.held_bytes,
            usable_bytes=recipe.admission.max_held_bytes,
        ),
    )
    return {need.part: need for need in found}


def misfits(plan: RunPlan) -> list[Need]:
    """The needs that are not met, most important first."""
    return [need for need in needs(plan).values() if not need.fits]
