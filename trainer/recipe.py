"""What a run is to be: one TOML file, overrides on top, every key checked. Configuration refuses what it
does not know.

A recipe holds the experiment; where the machine's services are comes from the environment (`settings.py`).
Relative paths are meant from the recipe's own directory. The resolved copy beside the checkpoints loads
again to an equal recipe.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
from msgspec.structs import asdict, replace

from pipeline.errors import FAILURE_CLASSES
from pipeline.request import Budget, Limits, Retries, Sampling
from trainer.learner.config import LearnerConfig

AdvantageKind = Literal["leave_one_out", "group_mean", "group_mean_std"]
Stragglers = Literal["wait", "train", "withhold"]
Unverified = Literal["refuse", "heldout", "allow"]
PauseMode = Literal["retract", "in_place", "abort"]


class SamplingRecipe(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`Sampling` that refuses unknown keys."""


class BudgetRecipe(Budget, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`Budget` that refuses unknown keys."""


class RetriesRecipe(Retries, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`Retries` that refuses unknown keys. A class that is named is named in full."""

    policy: BudgetRecipe = BudgetRecipe(tries=1)
    environment: BudgetRecipe = BudgetRecipe(tries=1)
    infrastructure: BudgetRecipe = BudgetRecipe(tries=5)
    grader: BudgetRecipe = BudgetRecipe(tries=3, first_s=2.0)
    poison: BudgetRecipe = BudgetRecipe(tries=1)


class LimitsRecipe(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`Limits` that refuses unknown keys."""

    retries: RetriesRecipe = RetriesRecipe()


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the recipe. `kw_only=True` is not inherited in msgspec: say it on each class."""


class TaskFiles(Part, kw_only=True):
    train: str  # tasks.jsonl
    heldout: str = ""  # tasks.jsonl, disjoint from train; needed for evaluation only
    unverified: Unverified = "refuse"  # tasks whose verification is missing; "heldout": allowed there alone


class Rollout(Part, kw_only=True):
    group_size: int  # requests of one task that share a baseline
    agent: str  # the agent's YAML
    sampling: SamplingRecipe = SamplingRecipe()
    limits: LimitsRecipe = LimitsRecipe()
    group_deadline_s: float | None = (
        None  # from a group's first claim until it closes with who is in, if that is enough; None: wall_s + grade_wall_s
    )
    queue_s: float | None = (
        None  # that a group may wait for its first claim before it is given up as failed; None: for ever
    )
    group_refills: int | None = (
        None  # members of a group that may be asked for again because something of ours broke; None: half of them
    )


class AdmissionRecipe(Part, kw_only=True):
    """How far rollouts may fall behind. See `admission.py` for the formula."""

    max_lag_versions: int = 4
    stragglers: Stragglers = (
        "wait"  # a group about to exceed the lag: the step waits for it, or trains it late, or leaves it out
    )
    sweep_every_s: float = 10.0  # how often what is owed is compared with what is queued
    max_queue_bytes: int = (
        4 * 1024**3
    )  # of answers that Redis holds until a checkpoint contains them; beyond it, one group at a time
    max_held_bytes: int = (
        4 * 1024**3
    )  # of answers in the trainer's memory until their step; beyond it the same


class BatchRecipe(Part, kw_only=True):
    groups_per_step: int
    min_valid_members: int | None = (
        None  # a group with fewer graded members is dropped; None: half of it, 2 at least
    )
    advantage: AdvantageKind = "leave_one_out"
    train_without_signal: bool = (
        False  # also train groups whose members are all worth the same, to no advantage
    )
    max_groups_without_signal: int = (
        200  # in a row, each member worth the same; then there is nothing left to learn and the run ends
    )
    max_failed_groups: int = (
        50  # in a row, too few of their members graded; then the run stops, to be resumed
    )


class WeightsRecipe(Part, kw_only=True):
    keep: int = 3  # published directories kept on disk
    pause: PauseMode = "retract"  # what engines do with running requests while weights change
    engines: Literal["router", "none"] = "router"  # whatever the router knows; or publish to disk only


class EvaluationRecipe(Part, kw_only=True):
    """Held-out episodes inside the run. Weights stand still while one is under way."""

    episodes: int = 0  # sampled as in training
    samples_per_task: int = 1  # of those episodes
    greedy_episodes: int = 0  # one per task at temperature 0
    before: bool = True  # with the starting weights
    after: bool = True  # with the last
    every_steps: int = 0  # 0: not in between


class CheckpointRecipe(Part, kw_only=True):
    every_steps: int = 10
    keep: int = 2


class Recipe(Part, kw_only=True):
    name: str
    model: str  # Hugging Face directory of the starting policy
    num_steps: int
    tasks: TaskFiles
    rollout: Rollout
    batch: BatchRecipe
    learner: LearnerConfig
    seed: int = 0
    admission: AdmissionRecipe = AdmissionRecipe()
    weights: WeightsRecipe = WeightsRecipe()
    evaluation: EvaluationRecipe = EvaluationRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()

    @property
    def min_valid_members(self) -> int:
        return self.batch.min_valid_members or max(2, math.ceil(self.rollout.group_size / 2))

    @property
    def group_deadline_s(self) -> float:
        limits, deadline_s = self.rollout.limits, self.rollout.group_deadline_s
        return limits.wall_s + limits.grade_wall_s if deadline_s is None else deadline_s

    @property
    def group_refills(self) -> int:
        refills = self.rollout.group_refills
        return self.rollout.group_size // 2 if refills is None else refills


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The checked recipe in `path` with `a.b=c` overrides applied. Raises ValueError naming the key, and
    the fix where there is one.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}; give the path of a recipe, as in trainer/recipes/demo.toml"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not TOML: {error}") from error
    for override in overrides:
        _graft(tree, override)
    try:
        recipe = msgspec.convert(tree, Recipe)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from error
    _check(recipe)
    return _with_absolute_paths(recipe, path.resolve().parent)


def to_toml(recipe: Recipe) -> str:
    """The recipe with every default spelled out; loads again to an equal one."""
    return "\n".join(_toml_lines(_all_fields(recipe), "")) + "\n"


def differences(old: Recipe, new: Recipe) -> list[str]:
    """Keys on which two recipes differ, as `learner.lr: 1e-06 -> 2e-06`."""
    before, after = dict(_leaves(_all_fields(old), "")), dict(_leaves(_all_fields(new), ""))
    names = sorted(before.keys() | after.keys())
    return [f"{k}: {before.get(k)} -> {after.get(k)}" for k in names if before.get(k) != after.get(k)]


def _graft(tree: dict[str, Any], override: str) -> None:
    """Put one `a.b=c` into the tree; c is a TOML value if it reads as one, else a string."""
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ValueError(f"--set {override!r}: write it as table.key=value, as in learner.lr=2e-6")
    for name in names[:-1]:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise ValueError(f"--set {override!r}: `{name}` is a value, not a table")
    try:
        tree[names[-1]] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        tree[names[-1]] = text


def _with_absolute_paths(recipe: Recipe, directory: Path) -> Recipe:
    def absolute(text: str) -> str:
        return str((directory / text).resolve()) if text else ""

    tasks = replace(recipe.tasks, train=absolute(recipe.tasks.train), heldout=absolute(recipe.tasks.heldout))
    rollout = replace(recipe.rollout, agent=absolute(recipe.rollout.agent))
    return replace(recipe, model=absolute(recipe.model), tasks=tasks, rollout=rollout)


def _check(recipe: Recipe) -> None:
    for fault in _faults(recipe):
        raise ValueError(fault)


def _faults(recipe: Recipe) -> Iterator[str]:
    """What no single field can know is wrong, each with its fix."""
    yield from _rollout_faults(recipe)
    yield from _learning_faults(recipe)
    yield from _evaluation_faults(recipe.evaluation, has_heldout=bool(recipe.tasks.heldout))
    floors = {
        "num_steps": (recipe.num_steps, 1),
        "batch.groups_per_step": (recipe.batch.groups_per_step, 1),
        "batch.max_failed_groups": (recipe.batch.max_failed_groups, 1),
        "batch.max_groups_without_signal": (recipe.batch.max_groups_without_signal, 1),
        "admission.max_lag_versions": (recipe.admission.max_lag_versions, 0),
        "admission.max_queue_bytes": (recipe.admission.max_queue_bytes, 1),
        "admission.max_held_bytes": (recipe.admission.max_held_bytes, 1),
        "rollout.group_refills": (recipe.group_refills, 0),
        "checkpoint.every_steps": (recipe.checkpoint.every_steps, 1),
        "checkpoint.keep": (recipe.checkpoint.keep, 1),
        "weights.keep": (recipe.weights.keep, 2),
    }
    for name, (value, least) in floors.items():
        if value < least:
            yield f"{name} is {value}; it must be {least} or more"
    if recipe.admission.sweep_every_s <= 0:
        yield f"admission.sweep_every_s is {recipe.admission.sweep_every_s}; it must be above 0"


def _rollout_faults(recipe: Recipe) -> Iterator[str]:
    rollout, valid = recipe.rollout, recipe.min_valid_members
    sampling, limits = rollout.sampling, rollout.limits
    if rollout.group_size < 2:
        yield f"rollout.group_size is {rollout.group_size}; a baseline needs 2 members or more"
    if not 2 <= valid <= rollout.group_size:
        yield (
            f"batch.min_valid_members is {valid}; "
            f"it must lie between 2 and rollout.group_size = {rollout.group_size}"
        )
    if sampling.temperature <= 0:
        yield "rollout.sampling.temperature must be above 0; greedy belongs to evaluation.greedy_episodes"
    if sampling.top_p != 1 or sampling.top_k is not None:
        yield (
            "rollout.sampling: training needs top_p = 1 and no top_k, "
            "for log-probs are of the distribution drawn from; remove them"
        )
    if not 0 < sampling.max_new_tokens < limits.context_tokens:
        yield (
            f"rollout.sampling.max_new_tokens is {sampling.max_new_tokens}; it must be above 0 and below "
            f"rollout.limits.context_tokens = {limits.context_tokens}"
        )
    for name in (
        "turns",
        "context_tokens",
        "wall_s",
        "command_s",
        "grade_cpu_s",
        "grade_wall_s",
        "format_errors",
    ):
        if getattr(limits, name) <= 0:
            yield f"rollout.limits.{name} is {getattr(limits, name)}; it must be above 0"
    if recipe.group_deadline_s <= 0:
        yield f"rollout.group_deadline_s is {recipe.group_deadline_s}; it must be above 0"
    yield from _retry_faults(limits.retries)


def _retry_faults(retries: Retries) -> Iterator[str]:
    where = "rollout.limits.retries"
    for kind in FAILURE_CLASSES:
        budget = retries.of(kind)
        if budget.tries < 1:
            yield f"{where}.{kind}.tries is {budget.tries}; it must be 1 or more: the first try counts"
        if not 0 <= budget.first_s <= budget.longest_s:
            yield f"{where}.{kind}: it must hold that 0 <= first_s <= longest_s"
    if retries.unended_claims < 1:
        yield f"{where}.unended_claims is {retries.unended_claims}; it must be 1 or more"


def _learning_faults(recipe: Recipe) -> Iterator[str]:
    learner, context = recipe.learner, recipe.rollout.limits.context_tokens
    needed = recipe.admission.max_lag_versions + 2
    if learner.micro_batch_tokens < context:
        yield (
            f"learner.micro_batch_tokens is {learner.micro_batch_tokens}; a sample is never split, "
            f"so set it to rollout.limits.context_tokens = {context} or more"
        )
    if 0 < learner.snapshots_kept < needed:
        yield (
            f"learner.snapshots_kept is {learner.snapshots_kept}; with admission.max_lag_versions = "
            f"{needed - 2} set it to {needed}, or to 0 to leave the log-prob gap unmeasured"
        )


def _evaluation_faults(evaluation: EvaluationRecipe, *, has_heldout: bool) -> Iterator[str]:
    if (
        min(evaluation.episodes, evaluation.greedy_episodes, evaluation.every_steps) < 0
        or evaluation.samples_per_task < 1
    ):
        yield "evaluation: its numbers must be 0 or more, samples_per_task 1 or more"
    elif evaluation.episodes % evaluation.samples_per_task:
        yield (
            f"evaluation.episodes is {evaluation.episodes}; make it a multiple of "
            f"evaluation.samples_per_task = {evaluation.samples_per_task}"
        )
    if evaluation.episodes + evaluation.greedy_episodes > 0 and not has_heldout:
        yield "tasks.heldout is missing; give it, or set evaluation.episodes and greedy_episodes to 0"


def _all_fields(part: msgspec.Struct) -> dict[str, Any]:
    """Also the fields that a message would omit for having their default."""
    return {
        name: _all_fields(value) if isinstance(value, msgspec.Struct) else value
        for name, value in asdict(part).items()
    }


def _toml_lines(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(value, dict) and value is not None:
            yield f"{key} = {_toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield f"\n[{prefix}{key}]"
            yield from _toml_lines(cast(dict[str, Any], value), f"{prefix}{key}.")


def _toml_value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return msgspec.json.encode(value).decode()  # a JSON string is a TOML basic string
        case list() | tuple():
            return "[" + ", ".join(_toml_value(item) for item in cast(Sequence[Any], value)) + "]"
        case _:
            return repr(value)


def _leaves(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(cast(dict[str, Any], value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
