"""A run's whole plan, and what of it does not fit. Nothing is started and nothing is read but the recipe and the model's `config.json`."""

from pathlib import Path
from typing import Literal

import msgspec

from trainer.learner.architecture import Architecture
from trainer.plan.division import Division
from trainer.plan.engines import EnginePlan, plan_engines
from trainer.plan.episodes import Demand, EpisodeLength, demand, episode_length
from trainer.plan.hardware import GIB, Gpus, Hosts
from trainer.plan.memory import RankMemory, fullest_rank, usable_bytes
from trainer.plan.shapes import shape_of
from trainer.plan.storage import (
    FleetPlan,
    StoragePlan,
    gib,
    open_episodes,
    plan_fleet,
    plan_storage,
)
from trainer.plan.timing import Publication, StepTime, publication, step_time
from trainer.recipe import Recipe


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
    demand: Demand

    @property
    def usable_gpu_bytes(self) -> int:
        return usable_bytes(self.gpus.learner.device)

    @property
    def node_host_bytes(self) -> int:
        """Host memory of the learner's processes of one machine."""
        return min(self.gpus.learner.count, self.recipe.plan.gpus_per_node) * self.rank.host_bytes

    @property
    def step_s(self) -> float:
        """A step with its wait for episodes."""
        per_step = self.recipe.batch.groups_per_step * self.recipe.rollout.group_size
        return max(self.step.train_s, per_step / self.demand.episodes_per_s)


def make_plan(recipe: Recipe, *, measured: Path | None = None) -> RunPlan:
    """Raises ValueError where the recipe, its layout and its machines contradict each other; whether it fits, `misfits` says."""
    wanted = recipe.plan
    if not wanted.gpus:
        raise ValueError(
            "--gpus is missing: say which, as in --gpus 16xH100-80, or set plan.gpus in the recipe"
        )
    architecture, is_model_here = shape_of(recipe.model)
    gpus = Gpus.parse(wanted.gpus, num_learner=wanted.learner_gpus, num_reserved=wanted.reserved_gpus)
    division = Division.of(recipe.learner, architecture, gpus.learner.count)
    engines = plan_engines(architecture, wanted, gpus.engines)
    length = episode_length(recipe, measured)
    step = step_time(recipe, architecture, length, gpus.learner)
    storage = plan_storage(recipe, architecture, length)
    fleet = plan_fleet(recipe, Hosts.parse(wanted.hosts)) if wanted.hosts else None
    bounds = {
        "admission.max_lag_versions": open_episodes(recipe),
        "the engines' KV cache": engines.episodes_held(int(length.tokens)),
        **({"the slots of the hosts": fleet.num_slots} if fleet else {}),
    }
    per_step = recipe.batch.groups_per_step * recipe.rollout.group_size
    return RunPlan(
        recipe=recipe,
        architecture=architecture,
        is_model_here=is_model_here,
        gpus=gpus,
        division=division,
        rank=fullest_rank(architecture, recipe.learner, division),
        engines=engines,
        length=length,
        step=step,
        publication=publication(recipe, storage.weights_bytes, gpus.learner, engines),
        storage=storage,
        fleet=fleet,
        bounds=bounds,
        demand=demand(
            length,
            engines,
            episodes_per_s=per_step / step.train_s,
            num_possible=max(min(bounds.values()), 1),
        ),
    )


Part = Literal["learner GPU", "learner host", "engine GPU", "Redis", "trainer memory"]


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What one part of the system needs and has."""

    part: Part
    what: str  # the same for people, as the subject of a sentence
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
    """Of every part that can be too small, most important first."""
    recipe, engines = plan.recipe, plan.engines
    context_bytes = recipe.rollout.limits.context_tokens * engines.kv_bytes_per_token
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
    """What does not fit, most important first."""
    return [need for need in needs(plan).values() if not need.fits]
