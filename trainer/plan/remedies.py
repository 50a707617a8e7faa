"""Changes of the recipe that the planner tries: remedies for parts that do not fit, and balances of learner and engines.

Remedies are tried one by one and then together. The planner computes a new plan for each, and reports what it saves and whether that is
enough.

A plan that fits may still leave most of its machines idle: a balance is another division, or more hosts or GPUs, whose plan fits and takes
less time. The learner's speed is a range, so a part counts as idle if it would be idle at either end.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from trainer.learner.devices import GIB
from trainer.plan.planning import Need, Part, RunPlan, gib, make_plan, misfits, needs
from trainer.recipe import Recipe
from trainer.recipe.loading import check

SPLIT = "plan.learner_gpus"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A key of the recipe, and the value to try."""

    key: str  # name of the key, as in "learner.recompute"
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
        saves, fits = ("save", "fit") if len(self.changes) > 1 else ("saves", "fits")
        return f"{names} {saves} {gib(self.saved_bytes)}{f' and {fits}' if self.fits else ', which is not enough'}"


def remedies(plan: RunPlan, misfit: Need, *, measured: Path | None = None) -> list[Remedy]:
    """Single changes that are enough; if there is none, such changes with another division of the GPUs; if there is none, changes that
    together are enough or save most, then the single ones. If these GPUs are too few, the same with more of them.
    """

    def tried(*changes: Change) -> Remedy | None:
        return _tried(plan.recipe, misfit, changes, measured)

    candidates = list(_CANDIDATES[misfit.part](plan))
    found = (tried(change) for change in candidates)
    alone = [remedy for remedy in found if remedy and remedy.saved_bytes > 0]
    enough = [remedy for remedy in alone if remedy.fits]
    if enough:
        # Only the division next to the present one is kept of those that are enough.
        kept = {remedy.changes[0].key: remedy for remedy in reversed(enough)}
        return [one for one in enough if one.changes[0].key != SPLIT or one is kept[SPLIT]]
    alone.sort(key=lambda remedy: -remedy.saved_bytes)
    # A layout over more GPUs, or an optimizer that is divided among more of them, needs another division of the GPUs.
    for bases in (list(splits(plan)), list(_more_machines(plan))):
        for base in bases:
            both = (tried(change, base) for change in candidates if change.key != base.key)
            if enough := [remedy for remedy in both if remedy and remedy.fits]:
                return enough
        found = [_together(alone, tried, *base) for base in ((), *((base,) for base in bases))]
        if enough := [remedy for remedy in found if remedy and remedy.fits]:
            return [enough[0], *alone]
    best = _together(alone, tried)
    return [best, *alone] if best else alone


def _together(alone: Sequence[Remedy], tried: Callable[..., Remedy | None], *base: Change) -> Remedy | None:
    """The remedy made from `base` and further changes, those that save most first, until the plan fits; one value for each key. None if
    that is only one change.
    """
    best = tried(*base) if base else None
    for remedy in alone:
        taken = best.changes if best else base
        if {change.key for change in taken} & {change.key for change in remedy.changes}:
            continue
        found = tried(*taken, *remedy.changes)
        if found and (best is None or found.saved_bytes > best.saved_bytes):
            best = found
        if best and best.fits:
            break
    return best if best and len(best.changes) > 1 else None


def _tried(recipe: Recipe, misfit: Need, changes: Sequence[Change], measured: Path | None) -> Remedy | None:
    """The remedy of these changes, with the bytes that they save for the misfit; None if they make no plan."""
    plan = _changed(recipe, changes, measured)
    if plan is None:
        return None
    need = needs(plan)[misfit.part]
    saved_bytes = misfit.excess_bytes - need.excess_bytes
    return Remedy(changes=tuple(changes), saved_bytes=saved_bytes, fits=need.fits)


def _changed(recipe: Recipe, changes: Sequence[Change], measured: Path | None) -> RunPlan | None:
    """The plan of the changed recipe; None if the changes contradict the recipe, the model or the machines."""
    try:
        for change in changes:
            recipe = change.apply(recipe)
        check(recipe)
        return make_plan(recipe, measured=measured)
    except ValueError:
        return None


def splits(plan: RunPlan) -> Iterator[Change]:
    """Other numbers of the learner's GPUs out of the present total, those closest to the present number first."""
    if len(plan.recipe.plan.gpus.split("+")) > 1:
        return
    num_learner, num_free = plan.gpus.learner.count, plan.gpus.learner.count + plan.gpus.engines.count
    # Divisions consist of whole machines in powers of two, or of replicas of the model within one machine.
    node, replica = plan.recipe.plan.gpus_per_node, plan.division.replica
    counts = {*range(node, num_free, node), *(2**power for power in range(num_free.bit_length()))}
    counts |= {*range(replica, min(num_free, node), replica)}
    for count in sorted(counts - {num_learner}, key=lambda count: (abs(count - num_learner), count)):
        if count < num_free:
            yield Change(key=SPLIT, value=count)


def _more_machines(plan: RunPlan) -> Iterator[Change]:
    """Two, four and eight times the GPUs, divided as they are now."""
    parts = [part.partition("x") for part in plan.recipe.plan.gpus.split("+")]
    if plan.recipe.plan.learner_gpus or plan.gpus.num_reserved:
        return
    for factor in (2, 4, 8):
        text = "+".join(f"{factor * int(count)}x{name}" for count, _, name in parts)
        yield Change(key="plan.gpus", value=text)


def _for_learner_gpu(plan: RunPlan) -> Iterator[Change]:
    """Changes of the learner, those that cost the least speed first."""
    learner = plan.recipe.learner
    if plan.rank.senders:
        yield Change(key="weights.transport", value="delta")
    if not learner.distributed_optimizer:
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
    yield from splits(plan)


def _for_learner_host(plan: RunPlan) -> Iterator[Change]:
    learner = plan.recipe.learner
    yield Change(key="learner.snapshots_kept", value=0)
    if learner.offload_optimizer:
        yield Change(key="learner.offload_optimizer", value=False)
    if plan.division.data > 1 and not learner.distributed_optimizer:
        yield Change(key="learner.distributed_optimizer", value=True)
    yield from splits(plan)


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


MOST_WAITING = 0.1  # share of a step that a learner may wait and still count as busy
# Engines count as idle if they run less than this share of the episodes that they hold.
LEAST_USED = 0.5
LEAST_GAIN = 0.05  # share of a step's time below which a change is not proposed
MOST_GPUS = 4  # largest multiple of the present number of GPUs that is tried


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of the recipe, and the resulting plan."""

    changes: tuple[Change, ...]
    plan: RunPlan


def is_learner_idle(plan: RunPlan) -> bool:
    return plan.fast.waiting > MOST_WAITING


def are_engines_idle(plan: RunPlan) -> bool:
    """Whether the engines wait for the learner."""
    return not is_learner_idle(plan) and plan.fast.num_running < LEAST_USED * plan.episodes_held


def balances(plan: RunPlan, *, measured: Path | None = None) -> list[Balance]:
    """Balances that shorten a step if something is idle, from cheap to expensive: another division of the same GPUs, then also more hosts,
    then also more GPUs. Each is the best of its kind, and better than the one before it.
    """
    if not is_learner_idle(plan) and not are_engines_idle(plan):
        return []
    found = list[Balance]()
    so_far = plan
    for trials in (_other_splits(plan), _with_hosts(plan, measured), _with_gpus(plan, measured)):
        tried = [one for changes in trials if (one := _balanced(plan.recipe, changes, measured))]
        # A faster learner that waits even more does not improve the balance.
        tried = [one for one in tried if one.plan.fast.waiting <= max(plan.fast.waiting, MOST_WAITING)]
        best = min(tried, key=_cost, default=None)
        if best and _seconds(best.plan) < (1 - LEAST_GAIN) * _seconds(so_far):
            found.append(best)
            so_far = best.plan
        if found and not is_learner_idle(so_far):
            break
    return found


def _cost(balance: Balance) -> tuple[float, int]:
    """The sort key: the seconds, then the GPUs. A busy learner gains nothing from more GPUs for the engines, so fewer are then better."""
    plan = balance.plan
    seconds = _seconds(plan)
    return (round(seconds, 1), plan.gpus.learner.count + plan.gpus.engines.count)


def _seconds(plan: RunPlan) -> float:
    """The seconds of a step, in the middle of their range."""
    return (plan.slow.step_s + plan.fast.step_s) / 2


def _balanced(recipe: Recipe, changes: tuple[Change, ...], measured: Path | None) -> Balance | None:
    """The changed plan; None if there is none or if something does not fit in it."""
    plan = _changed(recipe, changes, measured)
    return None if plan is None or misfits(plan) else Balance(changes=changes, plan=plan)


def _other_splits(plan: RunPlan) -> Iterator[tuple[Change, ...]]:
    """Other numbers of the learner's GPUs.

    With fewer, the learner may need a smaller tensor-parallel group, and the engines change as well.
    """
    tensor, size = plan.recipe.learner.tensor_parallel, plan.recipe.plan.engine_gpus
    for split in (*splits(plan), None):
        for layout in (tensor, tensor // 2, tensor // 4):
            for engine in (size, 2 * size, size // 2):
                changes = [split] if split else []
                if layout != tensor:
                    changes += _layout(plan, layout)
                if engine != size:
                    changes.append(Change(key="plan.engine_gpus", value=engine))
                if changes and layout and engine:
                    yield tuple(changes)


def _layout(plan: RunPlan, tensor: int) -> list[Change]:
    changes = [Change(key="learner.tensor_parallel", value=tensor)]
    if tensor == 1 and plan.recipe.learner.sequence_parallel:
        changes.append(Change(key="learner.sequence_parallel", value=False))
    return changes


def _with_hosts(plan: RunPlan, measured: Path | None) -> Iterator[tuple[Change, ...]]:
    """Each division with enough hosts that their slots do not limit it."""
    if plan.fleet is None:
        return
    for changes in ((), *_other_splits(plan)):
        if enough := _with_enough_hosts(plan.recipe, changes, measured):
            yield enough


def _with_gpus(plan: RunPlan, measured: Path | None) -> Iterator[tuple[Change, ...]]:
    """More machines with engines and the same GPUs for the learner, with enough hosts."""
    first, *more = plan.recipe.plan.gpus.split("+")
    count, _, name = (more[0] if more else first).partition("x")
    node = plan.recipe.plan.gpus_per_node
    for added in range(node, (MOST_GPUS - 1) * int(count) + 1, node):
        group = f"{int(count) + added}x{name}"
        changes = [Change(key="plan.gpus", value=f"{first}+{group}" if more else group)]
        if not more:
            changes.append(Change(key="plan.learner_gpus", value=plan.gpus.learner.count))
        if enough := _with_enough_hosts(plan.recipe, tuple(changes), measured):
            yield enough
        else:
            yield tuple(changes)


def _with_enough_hosts(
    recipe: Recipe, changes: tuple[Change, ...], measured: Path | None
) -> tuple[Change, ...] | None:
    """The changes, with as many hosts as the learner needs or the engines can serve; None if there are as many already."""
    tried = _balanced(recipe, changes, measured)
    if tried is None or tried.plan.fleet is None or tried.plan.fleet.slots_per_host < 1:
        return None
    plan, fleet = tried.plan, tried.plan.fleet
    others = [
        count for bound, count in plan.bounds.items() if count != fleet.num_slots or "slots" not in bound
    ]
    wanted = min([*others, plan.fast.demand.num_needed or max(others)])
    count = fleet.hosts_for(wanted)
    if count <= fleet.hosts.count:
        return None
    kind = plan.recipe.plan.hosts.strip().partition("x")[2]
    return (*changes, Change(key="plan.hosts", value=f"{count}x{kind}"))
