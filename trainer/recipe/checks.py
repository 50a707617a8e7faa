"""What is wrong with a recipe that no single field can know, each fault with its fix."""

import re
from collections.abc import Iterator, Mapping

import msgspec

from pipeline.errors import FAILURE_CLASSES
from pipeline.request import Retries
from trainer.learner.config import NUM_LAGS
from trainer.recipe.alarms import alarm_faults
from trainer.recipe.credit import CreditRecipe
from trainer.recipe.judging import judge_faults
from trainer.recipe.overlong import OverlongRecipe
from trainer.recipe.schema import (
    AdmissionRecipe,
    ContextRecipe,
    EvaluationRecipe,
    PlanRecipe,
    Recipe,
    StalenessRecipe,
    WeightsRecipe,
)
from trainer.recipe.sinks import sink_faults


def check(recipe: Recipe) -> None:
    """Raises ValueError for the first fault."""
    for fault in _faults(recipe):
        raise ValueError(fault)


def _faults(recipe: Recipe) -> Iterator[str]:
    yield from _rollout_faults(recipe)
    yield from _learning_faults(recipe)
    yield from _overlong_faults(recipe.overlong, context_tokens=recipe.rollout.limits.context_tokens)
    yield from _credit_faults(recipe)
    yield from _evaluation_faults(recipe.evaluation, has_heldout=bool(recipe.tasks.heldout))
    yield from _heldout_set_faults(recipe.tasks.heldout_sets)
    weakness = recipe.tasks.max_weakness
    if weakness is not None and not 0 <= weakness <= 1:
        yield f"tasks.max_weakness is {weakness:g}; it is a share and must lie between 0 and 1"
    if not 0 <= recipe.audit.share <= 1:
        yield f"audit.share is {recipe.audit.share:g}; it is a share of the trained tokens and must lie between 0 and 1"
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
        "weights.engines_at_once": (recipe.weights.engines_at_once, 0),
        "rollouts.max_bytes": (recipe.rollouts.max_bytes, 2**20),
    }
    for name, (value, least) in floors.items():
        if value < least:
            yield f"{name} is {value}; it must be {least} or more"
    yield from _staleness_faults(recipe.admission)
    yield from _transport_faults(recipe.weights)
    yield from _plan_faults(recipe.plan)
    yield from judge_faults(recipe.judge)
    yield from sink_faults(recipe.sinks)
    yield from alarm_faults(recipe.alarms)
    durations = {
        "admission.sweep_every_s": recipe.admission.sweep_every_s,
        "weights.engine_deadline_s": recipe.weights.engine_deadline_s,
    }
    for name, seconds in durations.items():
        if seconds <= 0:
            yield f"{name} is {seconds}; it must be above 0"


def _credit_faults(recipe: Recipe) -> Iterator[str]:
    credit, default = recipe.credit, CreditRecipe()
    if not 0 <= credit.coefficient <= 1:
        yield f"credit.coefficient is {credit.coefficient:g}; it weighs scores of -1 to 1 against rewards and must lie between 0 and 1"
    if credit.method == "outcome" and credit.coefficient != default.coefficient:
        yield (
            f'credit.coefficient is {credit.coefficient:g}, which has no effect with credit.method = "outcome": '
            "remove it, or set another method"
        )
    if credit.method != "outcome" and not recipe.judge.is_on:
        yield (
            f'credit.method = "{credit.method}" has no scores to use, because judge.method is "none": set judge.method, '
            "or remove [credit]"
        )
    if credit.method == "step_wise" and recipe.batch.advantage != "group_mean_std":
        yield (
            f'credit.method = "step_wise" divides by standard deviations, and batch.advantage = "{recipe.batch.advantage}" does '
            'not, so turns without a score would weigh differently: set batch.advantage = "group_mean_std"'
        )


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
    if all("=" in spec for spec in rollout.agent_specs):
        yield "rollout.agent names no file; give the agent's YAML before the values that change it"
    if sampling.temperature <= 0:
        yield "rollout.sampling.temperature must be above 0; greedy belongs to evaluation.greedy_episodes"
    if sampling.top_p != 1 or sampling.top_k is not None:
        yield (
            "rollout.sampling: training needs top_p = 1 and no top_k, "
            "because log-probs are of the full distribution; remove them"
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
    controls = recipe.grading.controls
    if not isinstance(controls, str) and not 0 < controls < 1:
        yield f'grading.controls is {controls}; it must be "always", "never", or a share above 0 and below 1'
    keep = recipe.rollouts.keep
    if not isinstance(keep, str) and not 0 < keep < 1:
        yield f'rollouts.keep is {keep}; it must be "all", "none", or a share above 0 and below 1'
    if recipe.group_deadline_s <= 0:
        yield f"rollout.group_deadline_s is {recipe.group_deadline_s}; it must be above 0"
    yield from _context_faults(rollout.context)
    yield from _retry_faults(limits.retries)


def _context_faults(context: ContextRecipe) -> Iterator[str]:
    if context.policy != "stop":
        return
    default, where = ContextRecipe(), "rollout.context"
    for name in ("head_share", "refill_to", "marker", "thinking"):
        value = getattr(context, name)
        if value != getattr(default, name) and value != "strip":
            yield (
                f"{where}.{name} is {msgspec.json.encode(value).decode()}, which has no effect with "
                f'{where}.policy = "stop", because nothing is cut: remove one of the two'
            )


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
    if recipe.batch.streaming and (recipe.learner.num_epochs > 1 or recipe.learner.num_minibatches > 1):
        yield (
            "batch.streaming = true makes one update of groups as they come in; set learner.num_epochs and "
            "learner.num_minibatches to 1, or batch.streaming to false"
        )
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


def _overlong_faults(overlong: OverlongRecipe, *, context_tokens: int) -> Iterator[str]:
    if overlong.penalty < 0:
        yield f"overlong.penalty is {overlong.penalty:g}; it is subtracted, so it must be 0 or more"
    if not 1 <= overlong.buffer_tokens <= context_tokens and overlong.penalty:
        yield (
            f"overlong.buffer_tokens is {overlong.buffer_tokens}; it must lie between 1 and "
            f"rollout.limits.context_tokens = {context_tokens}"
        )
    if not overlong.penalty and overlong.buffer_tokens != OverlongRecipe().buffer_tokens:
        yield "overlong.buffer_tokens is of use with overlong.penalty only: set that, or remove it"


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


def _staleness_faults(admission: AdmissionRecipe) -> Iterator[str]:
    control, where = admission.control, "admission.control"
    if admission.staleness == "fixed":
        for field in msgspec.structs.fields(StalenessRecipe):
            if getattr(control, field.name) != field.default:
                yield f'{where}.{field.name} has no effect with admission.staleness = "fixed": set that to "controlled", or remove it'
        return
    most = admission.max_lag_versions if control.most_versions is None else control.most_versions
    if most > admission.max_lag_versions:
        yield f"{where}.most_versions is {most}; set it to admission.max_lag_versions = {admission.max_lag_versions} at most"
    if most > NUM_LAGS - 2:
        yield f"{where}.most_versions is {most}; lags above {NUM_LAGS - 2} are not told apart, so set it to {NUM_LAGS - 2} at most"
    if not 0 <= control.least_versions <= most:
        yield f"{where}.least_versions is {control.least_versions}; it must lie between 0 and most_versions = {most}"
    for name in ("min_ess_share", "max_masked_share"):
        if not 0 < getattr(control, name) < 1:
            yield f"{where}.{name} is {getattr(control, name):g}; it is a share of tokens and must lie between 0 and 1"
    if control.max_behaviour_kl <= 0:
        yield f"{where}.max_behaviour_kl is {control.max_behaviour_kl:g}; it must be above 0"
    if control.patience_steps < 1:
        yield f"{where}.patience_steps is {control.patience_steps}; it must be 1 or more"


def _transport_faults(weights: WeightsRecipe) -> Iterator[str]:
    if weights.transport != "disk" and weights.engines == "none":
        yield f'weights.transport = "{weights.transport}" has no effect with weights.engines = "none": remove one of the two'
    if not 0 < weights.receiver_port < 65536:
        yield f"weights.receiver_port is {weights.receiver_port}; a port lies between 1 and 65535"
    if weights.transport != "delta" and weights.receiver_port != WeightsRecipe().receiver_port:
        yield 'weights.receiver_port is of use with weights.transport = "delta" only: remove it, or set that'


def _heldout_set_faults(sets: Mapping[str, str]) -> Iterator[str]:
    for name, path in sets.items():
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or name in ("greedy", "sampled"):
            yield (
                f"tasks.heldout_sets.{name}: name it with lower-case letters, digits, - and _, and not greedy or sampled"
            )
        if not path:
            yield f"tasks.heldout_sets.{name} is empty; give a tasks.jsonl"


def _plan_faults(plan: PlanRecipe) -> Iterator[str]:
    for name in ("learner_gpus", "reserved_gpus"):
        if getattr(plan, name) < 0:
            yield f"plan.{name} is {getattr(plan, name)}; it must be 0 or more"
    for name in ("engine_memory_share", "utilisation"):
        if not 0 < getattr(plan, name) < 1:
            yield f"plan.{name} is {getattr(plan, name):g}; it is a share and must lie between 0 and 1"
    positive = (
        "gpus_per_node",
        "node_memory_gib",
        "engine_gpus",
        "slots_per_core",
        "storage_gib_per_s",
        "network_gib_per_s",
        "episode_tokens",
        "episode_turns",
        "episode_sampled_tokens",
        "episode_s",
        "command_s",
        "grade_s",
    )
    for name in positive:
        value = getattr(plan, name)
        if value is not None and value <= 0:
            yield f"plan.{name} is {value}; it must be above 0"
