"""Reads a recipe from its TOML file, with overrides on top, checks it, and writes it again.

Unknown keys are refused, and so are contradictions between several keys: each error names the keys and the fix.
The resolved copy in the run's directory loads again to an equal recipe.
"""

import contextlib
import copy
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec.structs import asdict, replace

from pipeline.errors import FAILURE_CLASSES
from pipeline.request import Retries
from pipeline.screen import visible_line
from trainer.learner.config import NUM_LAGS, UNCORRECTED, LoraConfig
from trainer.recipe.imitation import ImitationRecipe
from trainer.recipe.schema import (
    AdmissionRecipe,
    AlarmsRecipe,
    BatchRecipe,
    ContextRecipe,
    CreditRecipe,
    CurriculumRecipe,
    EvaluationRecipe,
    JudgeEndpointRecipe,
    JudgeRecipe,
    OverlongRecipe,
    Recipe,
    SinksRecipe,
    StalenessRecipe,
    WandbRecipe,
    WeightsRecipe,
)
from trainer.recipe.wording import explanation, refusal, toml_value

AnyRecipe = Recipe | ImitationRecipe
KINDS: dict[str, type[Recipe] | type[ImitationRecipe]] = {"rl": Recipe, "sft": ImitationRecipe}
"""The type of a recipe by its key `kind`, which is "rl" by default."""


def check(recipe: AnyRecipe) -> None:
    """Raises ValueError for the first fault."""
    for fault in _imitation_faults(recipe) if isinstance(recipe, ImitationRecipe) else _faults(recipe):
        raise ValueError(fault)


def _imitation_faults(recipe: ImitationRecipe) -> Iterator[str]:
    learner, evaluation = recipe.learner, recipe.evaluation
    if (recipe.num_steps is None) == (recipe.num_epochs is None):
        given = "both are missing" if recipe.num_steps is None else "both are given"
        yield f"num_steps and num_epochs: {given}; give one of the two"
    if recipe.max_tokens > learner.micro_batch_tokens:
        yield (
            f"data.max_tokens is {recipe.max_tokens}; a sample is never split, so set it to learner.micro_batch_tokens = "
            f"{learner.micro_batch_tokens} at most, or raise that"
        )
    if evaluation.every_steps and not recipe.data.heldout:
        yield (
            "evaluation.every_steps has no effect without data.heldout: give held-out rows, or remove the key"
        )
    if recipe.data.heldout and not (evaluation.every_steps or evaluation.before or evaluation.after):
        yield "data.heldout is never measured: set evaluation.before, evaluation.after or evaluation.every_steps, or remove the files"
    for name in ("snapshots_kept", "routing_replay"):
        if getattr(learner, name):
            yield f'learner.{name} is about sampled tokens and has no effect with kind = "sft": remove it'
    if learner.loss.geometric_mask is not None:
        yield 'learner.loss.geometric_mask is about sampled tokens, and kind = "sft" has none: remove it'
    yield from _sink_faults(recipe.sinks)


def _faults(recipe: Recipe) -> Iterator[str]:
    yield from _source_faults(recipe)
    yield from _faults_of_one(recipe)
    for name, one in recipe.by_source.items():
        yield from (f"{source_words(name)}{fault}" for fault in _faults_of_one(one))


def source_words(name: str) -> str:
    """The beginning of an error about the recipe as it is for the source `name`; empty where tasks.train is given."""
    return f"sources.{name}, with [rollout] for the keys that it does not give: " if name else ""


@contextlib.contextmanager
def about_source(name: str) -> Iterator[None]:
    """A block whose errors are about the recipe as it is for the source `name`. Its ValueErrors say so."""
    try:
        yield
    except ValueError as error:
        if not name:
            raise
        raise ValueError(f"{source_words(name)}{error}") from error


def _source_faults(recipe: Recipe) -> Iterator[str]:
    train, sources = recipe.tasks.train, recipe.sources
    if bool(train) == bool(sources):
        yield f"tasks.train and [[sources]]: {'both are given' if train else 'both are missing'}; one of the two must be given"
    for name, number in Counter(source.name for source in sources).items():
        if number > 1:
            yield f'sources.name: {number} sources have the name "{name}"; give each a name of its own'
    for source in sources:
        if source.agent is not None and source.harness:
            yield f"sources.{source.name}.agent and its harness are both given; give the one that plays"


def _faults_of_one(recipe: Recipe) -> Iterator[str]:
    yield from _rollout_faults(recipe)
    yield from _group_size_faults(recipe)
    yield from _learning_faults(recipe)
    yield from _overlong_faults(recipe.overlong, context_tokens=recipe.rollout.limits.context_tokens)
    yield from _credit_faults(recipe)
    yield from _evaluation_faults(recipe.evaluation, has_heldout=bool(recipe.tasks.heldout))
    yield from _heldout_set_faults(recipe.tasks.heldout_sets)
    yield from _staleness_faults(recipe.admission)
    yield from _transport_faults(recipe.weights)
    yield from _adapter_faults(recipe.weights, recipe.learner.lora)
    if recipe.weights.precision == "fp8":
        yield from _fp8_faults(recipe)
    yield from _judge_faults(recipe.judge)
    yield from _sink_faults(recipe.sinks)
    yield from _alarm_faults(recipe.alarms)


def _credit_faults(recipe: Recipe) -> Iterator[str]:
    credit, default = recipe.credit, CreditRecipe()
    if credit.distills or recipe.judge.method == "teacher":
        yield from _distillation_faults(recipe)
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
    if recipe.judge.is_on and recipe.judge.required and not credit.reads_judgements:
        yield (
            "judge.required is true, and no group waits for scores that [credit] does not read: remove it, or set credit.method and a "
            "credit.coefficient above 0"
        )
    if recipe.batch.train_without_signal and not credit.reads_judgements:
        yield (
            "batch.train_without_signal is true, and [credit] reads no scores, so the advantages of such groups are 0 and only take "
            "weight from the others: remove it, or set credit.method and a credit.coefficient above 0"
        )
    if credit.method == "potential" and credit.reads_judgements:
        yield from _potential_faults(recipe)
    if credit.method == "step_wise" and recipe.batch.advantage != "group_mean_std":
        yield (
            f'credit.method = "step_wise" divides by standard deviations, and batch.advantage = "{recipe.batch.advantage}" does '
            'not, so turns without a score would weigh differently: set batch.advantage = "group_mean_std"'
        )


def _distillation_faults(recipe: Recipe) -> Iterator[str]:
    credit, judge, rollout = recipe.credit, recipe.judge, recipe.rollout
    if not credit.distills:
        yield (
            f'judge.method = "teacher" gives log-probs, and credit.method = "{credit.method}" does not read them: set credit.method = '
            '"distill" or "outcome_plus_distill", or another judge.method'
        )
    if judge.method != "teacher":
        yield (
            f'credit.method = "{credit.method}" needs the log-probs of a teacher, and judge.method is "{judge.method}": set '
            'judge.method = "teacher", and judge.tokenizer to the directory of its model'
        )
    if not credit.coefficient:
        yield f'credit.coefficient is 0, and credit.method = "{credit.method}" would teach nothing: set it above 0, as to 1.0'
    if not judge.required:
        yield (
            f'judge.required is false, and credit.method = "{credit.method}" trains no rollout without its teacher\'s log-probs, so an '
            "outage of the teacher would waste every rollout: set judge.required = true"
        )
    if recipe.learner.loss.kind == "sft":
        yield (
            f'learner.loss.kind = "sft" reads no advantages, and credit.method = "{credit.method}" teaches by them: set another objective, '
            'as "stream_grpo"'
        )
    if rollout.sampling.temperature != 1:
        yield (
            f"rollout.sampling.temperature is {rollout.sampling.temperature:g}, and a teacher's engine gives log-probs at temperature 1 "
            "only, which cannot be compared: set it to 1.0"
        )
    if credit.method == "distill":
        yield from _unread_reward_faults(recipe)


def _unread_reward_faults(recipe: Recipe) -> Iterator[str]:
    """What has no effect where the advantages do not depend on rewards."""
    unread = 'has no effect with credit.method = "distill", which reads no rewards: remove it, or set "outcome_plus_distill"'
    if recipe.batch.advantage != BatchRecipe(groups_per_step=1).advantage:
        yield f"batch.advantage {unread}"
    if recipe.overlong.penalty:
        yield f"overlong.penalty {unread}"
    if recipe.curriculum.kind == "signal":
        yield (
            'curriculum.kind = "signal" draws tasks by the chance that rewards differ, and credit.method = "distill" learns from '
            'every group: set it to "plain"'
        )


def _potential_faults(recipe: Recipe) -> Iterator[str]:
    if (recipe.judge.method, recipe.judge.name) == ("rule", "evidence"):
        yield (
            'judge.name = "evidence" scores a step by what happened after it, and credit.method = "potential" needs scores that '
            'depend on nothing later: set judge.name = "commands", another judge.method, or another credit.method'
        )
    if recipe.rollout.harness:
        yield (
            "rollout.harness names an agent program, whose turns are numbered as their replies end, so what comes before a turn may depend "
            'on it, and credit.method = "potential" needs scores that do not: set another credit.method'
        )


def _rollout_faults(recipe: Recipe) -> Iterator[str]:
    rollout, valid = recipe.rollout, recipe.min_valid_members
    sampling, limits = rollout.sampling, rollout.limits
    if min(valid, rollout.group_size) < 2 and recipe.credit.method != "distill":
        name = "rollout.group_size" if rollout.group_size < 2 else "batch.min_valid_members"
        yield f'{name} is 1, and a baseline needs two members: set it to 2 or more, or set credit.method = "distill"'
    if valid > rollout.group_size:
        yield (
            f"batch.min_valid_members is {valid}; set it to rollout.group_size = {rollout.group_size} at most"
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
    if sampling.max_new_tokens >= limits.context_tokens:
        yield (
            f"rollout.sampling.max_new_tokens is {sampling.max_new_tokens}; it must be below "
            f"rollout.limits.context_tokens = {limits.context_tokens}"
        )
    yield from _context_faults(rollout.context)
    yield from _retry_faults(limits.retries)


def _group_size_faults(recipe: Recipe) -> Iterator[str]:
    curriculum, smallest = recipe.curriculum, recipe.rollout.group_size
    largest = curriculum.max_group_size
    for name in ("plain_share", "sharpness"):
        if curriculum.kind == "plain" and getattr(curriculum, name) != getattr(CurriculumRecipe(), name):
            yield f'curriculum.{name} is of use with curriculum.kind = "signal" only: set that, or remove it'
    if largest is None:
        if curriculum.signal_share != CurriculumRecipe().signal_share:
            yield "curriculum.signal_share is of use with curriculum.max_group_size only: set that, or remove it"
        if curriculum.kind == "plain" and curriculum.memory_episodes != CurriculumRecipe().memory_episodes:
            yield 'curriculum.memory_episodes is of use with curriculum.kind = "signal" or curriculum.max_group_size only: remove it'
    elif largest < smallest:
        yield f"curriculum.max_group_size is {largest}; set it to rollout.group_size = {smallest} at least, or remove it"
    if largest is not None and recipe.credit.method == "distill":
        yield (
            'curriculum.max_group_size makes groups larger so that their rewards differ, and credit.method = "distill" reads no rewards: '
            'remove it, or set "outcome_plus_distill"'
        )


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
        if budget.first_s > budget.longest_s:
            yield f"{where}.{kind}: first_s is {budget.first_s:g} and longest_s {budget.longest_s:g}; raise longest_s to first_s at least"


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
    if overlong.buffer_tokens > context_tokens and overlong.penalty:
        yield (
            f"overlong.buffer_tokens is {overlong.buffer_tokens}; set it to rollout.limits.context_tokens = {context_tokens} at most"
        )
    if not overlong.penalty and overlong.buffer_tokens != OverlongRecipe().buffer_tokens:
        yield "overlong.buffer_tokens is of use with overlong.penalty only: set that, or remove it"


def _evaluation_faults(evaluation: EvaluationRecipe, *, has_heldout: bool) -> Iterator[str]:
    if evaluation.episodes % evaluation.samples_per_task:
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
        yield f"{where}.most_versions is {most}; lags above {NUM_LAGS - 2} are counted as one, so set it to {NUM_LAGS - 2} at most"
    if control.least_versions > most:
        yield f"{where}.least_versions is {control.least_versions}; set it to most_versions = {most} at most"


def _transport_faults(weights: WeightsRecipe) -> Iterator[str]:
    if weights.transport != "disk" and weights.engines == "none":
        yield f'weights.transport = "{weights.transport}" has no effect with weights.engines = "none": remove one of the two'
    if weights.transport != "delta" and weights.receiver_port != WeightsRecipe().receiver_port:
        yield 'weights.receiver_port is of use with weights.transport = "delta" only: remove it, or set that'


def _adapter_faults(weights: WeightsRecipe, lora: LoraConfig) -> Iterator[str]:
    if weights.adapters == "merged":
        return
    alone = 'weights.adapters = "alone"'
    if weights.transport == "distributed":
        yield f'{alone}: engines read adapters from a directory; set weights.transport to "disk" or "delta"'
    if not lora.rank:
        yield f"{alone}, but nothing trains adapters: set learner.lora.rank, or remove it"
    # SGLang has one layer for q, k and v, and one for gate and up; it makes up adapters of k_proj and up_proj that are absent.
    missing = (
        {"q_proj", "v_proj"} - {*lora.targets}
        if {"q_proj", "k_proj", "v_proj"} & {*lora.targets}
        else set[str]()
    )
    if "up_proj" in lora.targets:
        missing |= {"gate_proj"} - {*lora.targets}
    if missing:
        yield (
            f"{alone}: SGLang needs {' and '.join(sorted(missing))} beside the others of learner.lora.targets; add "
            f'{"it" if len(missing) == 1 else "them"}, or set weights.adapters = "merged"'
        )


def _fp8_faults(recipe: Recipe) -> Iterator[str]:
    """Low precision moves the engines away from the learner: what lies between them has to be measured, and corrected."""
    fp8, loss, learner = 'weights.precision = "fp8"', recipe.learner.loss, recipe.learner
    if recipe.weights.adapters == "alone":
        yield f'{fp8}: adapters are published in the type of the learner; set weights.adapters = "merged", or weights.precision = "learner"'
    if loss.kind in UNCORRECTED and not loss.objective:
        yield (
            f'{fp8}: learner.loss.kind = "{loss.kind}" does not read the log-probs of the engines, so nothing corrects what they differ '
            'from the learner\'s by; set another objective, as "tis" or "stream_grpo"'
        )
    if not learner.snapshots_kept:
        yield (
            f"{fp8}: learner.snapshots_kept is 0, so the log-prob gap would be unmeasured; set it to admission.max_lag_versions + 2 = "
            f"{recipe.admission.max_lag_versions + 2}"
        )
    if not recipe.audit.share:
        yield f"{fp8}: audit.share is 0, so the log-prob gap would be unmeasured; set it above 0, as to 0.02"


def _heldout_set_faults(sets: Mapping[str, str]) -> Iterator[str]:
    for name in sets:
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or name in ("greedy", "sampled"):
            yield (
                f"tasks.heldout_sets.{name}: name it with lower-case letters, digits, - and _, and not greedy or sampled"
            )


def _judge_faults(judge: JudgeRecipe) -> Iterator[str]:
    if judge.method == "none":
        if judge != JudgeRecipe():
            yield 'judge.method is "none", so the other keys of [judge] have no effect: set it, or remove them'
        return
    if judge.temperature == 0 and judge.num_votes > 1 and judge.method == "votes":
        yield (
            f"judge.temperature is 0, so all {judge.num_votes} votes on a step are the same: raise it, or set judge.num_votes to 1"
        )
    named, endpoint = judge.method in ("rule", "function"), judge.endpoint
    if named and not judge.name:
        example = "commands" if judge.method == "rule" else "my_judge"
        yield f'judge.name is missing; judge.method = "{judge.method}" needs the name of one, as in "{example}"'
    if endpoint != JudgeEndpointRecipe() and judge.method != "votes":
        yield f'judge.endpoint is of use with judge.method = "votes" only: remove it, or set that instead of "{judge.method}"'
    if endpoint.api_base and not endpoint.api_base.startswith(("http://", "https://")):
        yield f'judge.endpoint.api_base is "{endpoint.api_base}"; give a URL, as in "http://127.0.0.1:30000/v1"'
    if endpoint.api_base and not endpoint.model:
        yield "judge.endpoint.model is missing; give the model's name as the server at judge.endpoint.api_base knows it"
    if not endpoint.api_base and endpoint != JudgeEndpointRecipe():
        yield "judge.endpoint.api_base is missing; give the server's URL, or remove [judge.endpoint]"
    if endpoint.key_env and endpoint.key_file:
        yield "judge.endpoint.key_env and judge.endpoint.key_file are both given; remove one of them"
    if not named and not endpoint.api_base and not judge.tokenizer:
        yield (
            "judge.tokenizer is missing; give the Hugging Face directory of the judge's model, whose tokenizer cuts the prompts, "
            "or judge.endpoint.api_base"
        )


def _sink_faults(sinks: SinksRecipe) -> Iterator[str]:
    if not sinks.wandb.project and sinks.wandb != WandbRecipe():
        yield "sinks.wandb.project is missing; give the project, or remove the other keys of sinks.wandb"
    if not sinks.mlflow.experiment and sinks.mlflow.tracking_uri:
        yield "sinks.mlflow.experiment is missing; give the experiment, or remove sinks.mlflow.tracking_uri"


def _alarm_faults(alarms: AlarmsRecipe) -> Iterator[str]:
    if alarms.gap_growth and alarms.gap_growth <= 1:
        yield f"alarms.gap_growth is {alarms.gap_growth:g}; set it above 1, or to 0 to switch the alarm off"
    for kind in alarms.stop_on:
        if kind in alarms.kinds_off:
            yield f"alarms.stop_on names {kind}, which is switched off: give its limit, or remove it there"


_BARE_KEY = re.compile(r"[\w-]+", re.ASCII)  # a key as TOML allows it without quotes
_SAID_CHARS = 200


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The checked recipe of kind "rl" in `path` with `a.b=c` overrides applied. Raises ValueError as `load_any_recipe` does, and for
    another kind.
    """
    recipe = load_any_recipe(path, overrides)
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f'{path}: kind is "{recipe.kind}", and this command is for recipes of kind "rl"; train it with `python -m trainer.run`'
        )
    return recipe


def load_any_recipe(path: Path, overrides: Sequence[str] = ()) -> AnyRecipe:
    """The checked recipe in `path` with `a.b=c` overrides applied. Raises ValueError naming the key, its meaning, the fix,
    and the responsible override, or else the file.
    """
    tree = _read(path)
    whole = _with_overrides(tree, overrides)
    try:
        recipe = _checked(whole)
    except ValueError as error:
        meaning = explanation(str(error), KINDS.get(str(whole.get("kind")), Recipe))
        raise ValueError(f"{_source(str(error), path, tree, overrides)}: {error}{meaning}") from error
    return _with_absolute_paths(recipe, path.resolve().parent)


def to_toml(recipe: AnyRecipe) -> str:
    """The recipe with every default written out, which loads again to an equal recipe."""
    return "\n".join(_toml_lines(_all_fields(recipe), "")) + "\n"


def set_keys(recipe: AnyRecipe) -> list[str]:
    """Keys whose values are not their defaults, as `learner.lr: 2e-06`; keys without a default are among them."""
    return [f"{name}: {value}" for name, value in _set_leaves(recipe, None, "")]


def _set_leaves(
    table: msgspec.Struct, usual: msgspec.Struct | None, prefix: str
) -> Iterator[tuple[str, Any]]:
    """The leaves on which a table differs from `usual`, or from the defaults of its type."""
    for field in msgspec.structs.fields(type(table)):
        value, name = getattr(table, field.name), f"{prefix}{field.encode_name}"
        if usual is not None:
            default = getattr(usual, field.name)
        else:
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if isinstance(value, msgspec.Struct) and (
            default is msgspec.NODEFAULT or type(default) is type(value)
        ):
            nested = None if default is msgspec.NODEFAULT else default
            yield from _set_leaves(value, nested, f"{name}.")
        elif value != default:
            yield from _leaves({name: msgspec.to_builtins(value)}, "")


def differences(old: AnyRecipe, new: AnyRecipe) -> list[str]:
    """Keys on which two recipes differ, as `learner.lr: 1e-06 -> 2e-06`."""
    before, after = dict(_leaves(_all_fields(old), "")), dict(_leaves(_all_fields(new), ""))
    names = sorted(before.keys() | after.keys())
    return [f"{k}: {before.get(k)} -> {after.get(k)}" for k in names if before.get(k) != after.get(k)]


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}; give the path of a recipe, as in trainer/recipes/demo.toml"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not TOML: {error}") from error


def _checked(tree: Mapping[str, Any]) -> AnyRecipe:
    """The recipe in the tree. Raises ValueError with the fault, without the source of the value."""
    kind = _type_of(tree)
    try:
        recipe = msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise ValueError(refusal(error, tree, kind)) from error
    check(recipe)
    return recipe


def _type_of(tree: Mapping[str, Any]) -> type[Recipe] | type[ImitationRecipe]:
    """The type of the recipe in the tree. Raises ValueError for an unknown kind."""
    given = tree.get("kind", "rl")
    if given not in list(KINDS):
        raise ValueError(f"kind is {toml_value(given)}; it must be {' or '.join(map(toml_value, KINDS))}")
    return KINDS[given]


def _with_overrides(tree: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    whole = copy.deepcopy(dict(tree))
    for override in overrides:
        _graft(whole, override)
    return whole


def _graft(tree: dict[str, Any], override: str) -> None:
    """Sets one `a.b=c` in the tree; c is a TOML value if it parses as one, else a string."""
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(_BARE_KEY.fullmatch(name) for name in names):
        raise ValueError(f"{_said(override)}: write it as table.key=value, as in learner.lr=2e-6")
    for place, name in enumerate(names[:-1]):
        tree = tree.setdefault(name, {})
        if isinstance(tree, list) and place + 2 < len(names):  # as in sources.NAME.share
            tree = _named(tree)
            if names[place + 1] not in tree:
                raise ValueError(
                    f"{_said(override)}: `{name}` has no table with the name `{names[place + 1]}`"
                )
        if not isinstance(tree, dict):
            raise ValueError(f"{_said(override)}: `{name}` is a value, not a table")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    # A text with a line break could define further keys, so it is taken as it is.
    tree[names[-1]] = parsed["value"] if len(parsed) == 1 else text


def _source(fault: str, path: Path, tree: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """The source of the faulty value: the newest override whose key the fault names; else the newest override of a table that the fault
    names and that exists only because of it; else the file.
    """
    for override in reversed(overrides):
        key = _key(override)
        # A key without a dot may occur in a sentence as an ordinary word.
        where = rf"(?<![\w.]){re.escape(key)}(?!\w)" if "." in key else rf"^{re.escape(key)}(?!\w)"
        if re.search(where, fault):
            return _said(override)
    for place, override in reversed(list(enumerate(overrides))):
        table = _key(override).partition(".")[0]
        if not re.search(rf"(?<![\w.]){re.escape(table)}\b", fault):
            continue
        try:
            _checked(_with_overrides(tree, [*overrides[:place], *overrides[place + 1 :]]))
        except ValueError as without:
            if str(without) == fault:
                continue
        return _said(override)
    return str(path)


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _said(override: str) -> str:
    text = visible_line(override)
    return f"--set {text if len(text) <= _SAID_CHARS else text[:_SAID_CHARS] + '…'}"


def _with_absolute_paths(recipe: AnyRecipe, directory: Path) -> AnyRecipe:
    def absolute(text: str) -> str:
        return str((directory / text).resolve()) if text else ""

    def agent(specs: str | tuple[str, ...]) -> str | tuple[str, ...]:
        each = (specs,) if isinstance(specs, str) else specs
        whole = tuple(spec if "=" in spec else absolute(spec) for spec in each)
        return whole[0] if len(whole) == 1 else whole

    if isinstance(recipe, ImitationRecipe):
        data = replace(
            recipe.data,
            train=tuple(map(absolute, recipe.data.train)),
            heldout=tuple(map(absolute, recipe.data.heldout)),
        )
        chat = replace(recipe.chat, template=absolute(recipe.chat.template))
        return replace(recipe, model=absolute(recipe.model), data=data, chat=chat)
    tasks = replace(
        recipe.tasks,
        train=absolute(recipe.tasks.train),
        heldout=absolute(recipe.tasks.heldout),
        heldout_sets={name: absolute(path) for name, path in recipe.tasks.heldout_sets.items()},
    )
    sources = tuple(
        replace(source, tasks=absolute(source.tasks), agent=source.agent and agent(source.agent))
        for source in recipe.sources
    )
    rollout = replace(recipe.rollout, agent=agent(recipe.rollout.agent))
    chat = replace(recipe.chat, template=absolute(recipe.chat.template))
    loss = replace(recipe.learner.loss, objective=absolute(recipe.learner.loss.objective))
    judge = replace(
        recipe.judge,
        templates=absolute(recipe.judge.templates),
        tokenizer=absolute(recipe.judge.tokenizer),
    )
    return replace(
        recipe,
        model=absolute(recipe.model),
        tasks=tasks,
        sources=sources,
        rollout=rollout,
        chat=chat,
        learner=replace(recipe.learner, loss=loss),
        judge=judge,
    )


def _all_fields(part: msgspec.Struct) -> dict[str, Any]:
    """All fields, including those that a message omits because they have their defaults. A list of tables is a list here."""
    return {name: _plain(value) for name, value in asdict(part).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and any(isinstance(one, msgspec.Struct) for one in value):
        return [_plain(one) for one in value]
    return _all_fields(value) if isinstance(value, msgspec.Struct) else value


def _toml_lines(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(value, dict) and not _named(value) and value is not None:
            yield f"{key} = {toml_value(value)}"
    for key, value in table.items():
        for inner in _named(value).values():
            yield f"\n[[{prefix}{key}]]"
            yield from _toml_lines(inner, f"{prefix}{key}.")
        if isinstance(value, dict):
            yield f"\n[{prefix}{key}]"
            yield from _toml_lines(cast(dict[str, Any], value), f"{prefix}{key}.")


def _named(value: Any) -> dict[str, dict[str, Any]]:
    """The tables of a list by their names; empty for any other value."""
    tables = cast(list[Any], value) if isinstance(value, list) else []
    return {one["name"]: one for one in tables if isinstance(one, dict) and "name" in one}


def _leaves(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        value = _named(value) or value
        if isinstance(value, dict):
            yield from _leaves(cast(dict[str, Any], value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
