"""What would make a misfit fit: changes of the recipe that the planner tries, one by one and then together, and plans anew.

Nothing is promised that was not planned: a remedy is named with what it saves, and with whether it is enough.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from trainer.plan.hardware import GIB
from trainer.plan.planning import Need, Part, RunPlan, make_plan, needs
from trainer.plan.storage import gib
from trainer.recipe import Recipe
from trainer.recipe.checks import check


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A key of the recipe, and the value to try."""

    key: str  # as in "learner.recompute"
    value: Any

    def __str__(self) -> str:
        return f"{self.key} = {msgspec.json.encode(self.value).decode()}"

    def apply(self, recipe: Recipe) -> Recipe:
        return _replaced(recipe, self.key.split("."), self.value)


def _replaced(table: Struct, names: Sequence[str], value: Any) -> Any:
    """`table` with another value at the end of the path `names`."""
    first, *rest = names
    return replace(table, **{first: _replaced(getattr(table, first), rest, value) if rest else value})


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """Changes that were tried together."""

    changes: tuple[Change, ...]
    saved_bytes: int
    fits: bool

    def __str__(self) -> str:
        names = " with ".join(map(str, self.changes))
        saves = "save" if len(self.changes) > 1 else "saves"
        return (
            f"{names} {saves} {gib(self.saved_bytes)}{' and fits' if self.fits else ', which is not enough'}"
        )


def remedies(plan: RunPlan, misfit: Need, *, measured: Path | None = None) -> list[Remedy]:
    """Single changes that are enough; if there is none, changes that are enough or save most together, then the single ones."""

    def tried(*changes: Change) -> Remedy | None:
        return _tried(plan.recipe, misfit, changes, measured)

    found = (tried(change) for change in _CANDIDATES[misfit.part](plan))
    alone = [remedy for remedy in found if remedy and remedy.saved_bytes > 0]
    enough = [remedy for remedy in alone if remedy.fits]
    if enough:
        return enough
    alone.sort(key=lambda remedy: -remedy.saved_bytes)
    return [*_together(alone, tried), *alone]


def _together(alone: Sequence[Remedy], tried: Callable[..., Remedy | None]) -> Iterator[Remedy]:
    """The remedy of one change after another, those that save most first, until they fit; one value for each key."""
    best: Remedy | None = None
    for remedy in alone:
        taken = best.changes if best else ()
        if {change.key for change in taken} & {change.key for change in remedy.changes}:
            continue
        found = tried(*taken, *remedy.changes)
        if found and (best is None or found.saved_bytes > best.saved_bytes):
            best = found
        if best and best.fits:
            break
    if best and len(best.changes) > 1:
        yield best


def _tried(recipe: Recipe, misfit: Need, changes: Sequence[Change], measured: Path | None) -> Remedy | None:
    """None where the changes contradict the recipe, the model or the machines."""
    try:
        for change in changes:
            recipe = change.apply(recipe)
        check(recipe)
        need = needs(make_plan(recipe, measured=measured))[misfit.part]
    except ValueError:
        return None
    saved_bytes = misfit.excess_bytes - need.excess_bytes
    return Remedy(changes=tuple(changes), saved_bytes=saved_bytes, fits=need.fits)


def _for_learner_gpu(plan: RunPlan) -> Iterator[Change]:
    """What costs least speed first."""
    learner = plan.recipe.learner
    if plan.division.data > 1 and not learner.distributed_optimizer:
        yield Change(key="learner.distributed_optimizer", value=True)
    if learner.tensor_parallel > 1 and not learner.sequence_parallel:
        yield Change(key="learner.sequence_parallel", value=True)
    for value in ("selective", "full"):
        yield Change(key="learner.recompute", value=value)
    if plan.architecture.experts:
        for factor in (2, 4, 8):
            yield Change(key="learner.expert_parallel", value=factor * learner.expert_parallel)
    yield Change(key="learner.head_chunk_tokens", value=max(learner.head_chunk_tokens // 4, 1))
    if not learner.offload_optimizer:
        yield Change(key="learner.offload_optimizer", value=True)
    for name in ("context_parallel", "tensor_parallel", "pipeline_parallel"):
        for factor in (2, 4, 8):
            yield Change(key=f"learner.{name}", value=factor * getattr(learner, name))
    yield from _more_gpus(plan)


def _more_gpus(plan: RunPlan) -> Iterator[Change]:
    if len(plan.recipe.plan.gpus.split("+")) == 1:
        yield Change(key="plan.learner_gpus", value=2 * plan.gpus.learner.count)


def _for_learner_host(plan: RunPlan) -> Iterator[Change]:
    learner = plan.recipe.learner
    yield Change(key="learner.snapshots_kept", value=0)
    if learner.offload_optimizer:
        yield Change(key="learner.offload_optimizer", value=False)
    if plan.division.data > 1 and not learner.distributed_optimizer:
        yield Change(key="learner.distributed_optimizer", value=True)
    yield from _more_gpus(plan)


def _for_engine_gpu(plan: RunPlan) -> Iterator[Change]:
    for factor in (2, 4, 8):
        yield Change(key="plan.engine_gpus", value=factor * plan.recipe.plan.engine_gpus)
    context_tokens = plan.recipe.rollout.limits.context_tokens
    yield Change(key="plan.engine_memory_share", value=0.9)
    yield Change(key="rollout.limits.context_tokens", value=context_tokens // 2)


def _for_redis(plan: RunPlan) -> Iterator[Change]:
    need = needs(plan)["Redis"]
    yield Change(key="admission.max_queue_bytes", value=_rounded_up(need.needed_bytes))
    yield Change(key="checkpoint.every_steps", value=max(plan.recipe.checkpoint.every_steps // 2, 1))


def _for_trainer_memory(plan: RunPlan) -> Iterator[Change]:
    need = needs(plan)["trainer memory"]
    yield Change(key="admission.max_held_bytes", value=_rounded_up(need.needed_bytes))
    yield Change(key="admission.max_lag_versions", value=max(plan.recipe.admission.max_lag_versions // 2, 1))


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // GIB) * GIB


_CANDIDATES: dict[Part, Callable[[RunPlan], Iterator[Change]]] = {
    "learner GPU": _for_learner_gpu,
    "learner host": _for_learner_host,
    "engine GPU": _for_engine_gpu,
    "Redis": _for_redis,
    "trainer memory": _for_trainer_memory,
}
