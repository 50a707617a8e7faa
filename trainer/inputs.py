"""The inputs that a recipe names, read and checked before anything is started: tasks, agent, model, tokenizer, judge.

Tasks without a passed verification are refused unless the recipe allows them: see `python -m workers.verify`.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import msgspec
from arq.connections import ArqRedis
from msgspec.structs import asdict, replace

from pipeline.agent.config import AgentConfig, load_agent
from pipeline.agent.upstream import BASH_TOOL
from pipeline.chat import ReplyFormat
from pipeline.chat_template import ChatTemplate, Tools
from pipeline.errors import RequestError
from pipeline.harness import Harness
from pipeline.judge import Judge
from pipeline.judge_templates import parse_templates, read_templates
from pipeline.model_config import language_keys
from pipeline.request import Endpoint
from pipeline.task import RewardFile, Task
from pipeline.taskfile import TaskFacts, read_tasks
from pipeline.tokenizer import TokenizerBundle, put_tokenizer, read_bundle, vocabulary_difference
from trainer.agent_file import (
    agent_warnings,
    agent_words,
    check_deadline,
    check_opening,
    read_program,
    recipe_agent,
)
from trainer.learner.architecture import alone_faults, layout_faults
from trainer.learner.config import CORRECTIONS, LossConfig
from trainer.learner.families.registry import has_packed_weights, read_architecture
from trainer.learner.objectives.own import check_own
from trainer.learner.precision import check_scale_format, fp8_faults, is_fp8
from trainer.recipe import AdmissionRecipe, AnyRecipe, CreditRecipe, JudgeRecipe, Recipe, Unverified
from trainer.recipe.loading import about_source, source_words
from trainer.recipe.schema import ChatRecipe, TaskFiles
from trainer.recipe.wording import toml_value
from trainer.verifications import Verifications, has_controls


@dataclass(frozen=True, slots=True)
class JudgeForm:
    """A judge whose tokenizer may not be in Redis yet."""

    judge: Judge  # names no tokenizer
    tokenizer: TokenizerBundle | None

    async def announced(self, redis: ArqRedis) -> Judge:
        """The judge in the form that requests carry, after its tokenizer is stored in Redis."""
        if self.tokenizer is None:
            return self.judge
        return replace(self.judge, tokenizer=await put_tokenizer(redis, self.tokenizer))


@dataclass(frozen=True, slots=True)
class TaskSource:
    """The tasks of one source, and who plays them. Where tasks.train is given, it is the only source, and its name is empty."""

    name: str
    tasks: list[Task]
    agent_config: str
    harness: Harness | None = None  # None: the built-in loop plays


@dataclass(frozen=True, slots=True)
class Inputs:
    """A run's inputs besides its recipe. Every task carries the calibration from its verification."""

    sources: tuple[TaskSource, ...]
    heldout: list[Task]
    heldout_sets: dict[str, list[Task]]  # further held-out tasks by name of their set
    agent_config: str  # the agent that plays held-out tasks
    tokenizer: TokenizerBundle
    num_unverified: int  # among all tasks; above 0 only where the recipe allows it
    num_uncontrolled: int  # training tasks left out because of tasks.min_control
    num_too_weak: int  # further training tasks left out because of tasks.max_weakness
    judge: JudgeForm | None = None  # None: nothing is judged
    harness: Harness | None = None  # the agent program that plays held-out tasks; None: the built-in loop
    task_facts: tuple[TaskFacts, ...] = ()  # what verification says of the tasks that may be played

    @property
    def task_digests(self) -> dict[str, str]:
        """A digest of the ids of the tasks to train on, in their order, by the recipe's key of their file."""
        return {
            _tasks_key(source.name): hashlib.blake2b(
                "\0".join(task.id for task in source.tasks).encode(), digest_size=16
            ).hexdigest()
            for source in self.sources
        }

    @property
    def train(self) -> list[Task]:
        """The tasks of all sources."""
        return [task for source in self.sources for task in source.tasks]


def read_inputs(recipe: Recipe) -> Inputs:
    """The inputs. Raises ValueError naming the recipe's field whose file is missing, empty, unusable, or contradicts another."""
    files, by_source = recipe.tasks, recipe.by_source
    train = {name: _trained(name, one.tasks) for name, one in by_source.items()}
    _check_apart(list(train.values()))
    if recipe.curriculum.kind == "signal" or recipe.curriculum.max_group_size is not None:
        _check_whole_rewards(train.values())
    heldout = _heldout("tasks.heldout", files.heldout, train.values(), files) if files.heldout else _TaskSet()
    sets = {
        name: _heldout(f"tasks.heldout_sets.{name}", path, train.values(), files)
        for name, path in files.heldout_sets.items()
    }
    every = [*train.values(), heldout, *sets.values()]
    evaluation, num_heldout = recipe.evaluation, len(heldout.tasks)
    needed = max(evaluation.episodes // evaluation.samples_per_task, evaluation.greedy_episodes)
    if num_heldout < needed:
        raise ValueError(
            f"tasks.heldout holds {num_heldout} tasks, the evaluation needs {needed}; "
            "lower evaluation.episodes or greedy_episodes"
        )
    players = dict[str, tuple[str, Harness | None, TokenizerBundle]]()
    for name, one in {"": recipe, **by_source}.items():
        tasks = [*(train[name].tasks if name in train else ()), *(() if name else heldout.tasks)]
        with about_source(name):
            players[name] = _player(one, tasks)
    agent_config, harness, tokenizer = players[""]
    judge = read_judge(recipe)
    if recipe.judge.method == "teacher":
        _check_vocabulary(recipe, tokenizer, judge)
    return Inputs(
        sources=tuple(TaskSource(name, one.tasks, *players[name][:2]) for name, one in train.items()),
        heldout=heldout.tasks,
        heldout_sets={name: one.tasks for name, one in sets.items()},
        agent_config=agent_config,
        tokenizer=tokenizer,
        num_unverified=sum(one.num_unverified for one in every),
        num_uncontrolled=sum(one.num_uncontrolled for one in every),
        num_too_weak=sum(one.num_too_weak for one in every),
        judge=judge,
        harness=harness,
        task_facts=tuple(fact for one in every for fact in one.facts),
    )


def _player(recipe: Recipe, tasks: Sequence[Task]) -> tuple[str, Harness | None, TokenizerBundle]:
    """The agent of `[rollout]`, the program that plays in its place, and the tokenizer. Raises ValueError if they do not fit the tasks or
    the model.
    """
    _check_model(recipe)
    agent_config, harness = recipe_agent(recipe.rollout), read_program(recipe.rollout)
    agent = load_agent(agent_config)
    tokenizer = read_tokenizer(Path(recipe.model), recipe.chat, _tools(agent, harness))
    if harness is None:
        _check_users_in_a_row(recipe, agent, tokenizer)
        if tasks:
            check_opening(agent_config, tasks, tokenizer, recipe)
    return agent_config, harness, tokenizer


def _tools(agent: AgentConfig, harness: Harness | None) -> Tools:
    """The tools as the player shows them to the policy.

    A program declares its tools only in an episode, so one example tool represents them.
    """
    if harness is None:
        return agent.tools
    return (BASH_TOOL,) if harness.uses_tools else ()


def _player_words(recipe: Recipe, source: TaskSource, heldout: Sequence[Task]) -> str:
    """The lines about the player: the agent program, or the agent."""
    if (harness := source.harness) is None:
        return agent_words(recipe, source.agent_config, [*source.tasks, *heldout])
    footprint = harness.footprint
    return (
        f"program: {harness.name} {harness.version} plays, and rollout.agent has no effect; {footprint.opening_tokens:,} tokens before the"
        f" task, {footprint.memory_bytes / 1e6:,.0f} MB and {footprint.cpu_s:.1f} s of CPU an episode"
    )


def check_learner(recipe: AnyRecipe) -> None:
    """Raises ValueError for a model that the learner cannot train or divide as the recipe asks, or an objective that does not exist."""
    if recipe.learner.loss.objective:
        check_own(recipe.learner.loss.objective)
    directory = _model_directory(recipe)
    architecture = read_architecture(directory)
    faults = layout_faults(architecture, recipe.learner)
    if isinstance(recipe, Recipe) and recipe.weights.adapters == "alone":
        faults += alone_faults(architecture, recipe.learner.lora)
    if isinstance(recipe, Recipe) and recipe.weights.precision == "fp8":
        faults += fp8_faults(architecture)
    if faults:
        raise ValueError("; ".join(faults))
    if isinstance(recipe, Recipe):
        check_precision(recipe, directory)
    if not any(directory.glob("*.safetensors")):
        raise ValueError(
            f"model: {directory} holds no .safetensors file; give a Hugging Face directory with weights"
        )


def check_precision(recipe: Recipe, directory: Path) -> None:
    """Raises ValueError unless the weights in a directory have the type in which the recipe's versions are published. Engines are started
    with the model, and take versions of the same type alone.
    """
    if recipe.weights.precision == "fp8":
        if not is_fp8(directory):
            raise ValueError(
                f'weights.precision = "fp8": {directory} has no weights in FP8 (quantization_config in config.json), and engines that are '
                "started with others take none: give the directory in which the model is published in FP8, or write one with "
                f"`python -m trainer.convert --fp8 {directory} DIRECTORY`, for the learner and the engines alike"
            )
        check_scale_format(directory)
    elif has_packed_weights(directory):
        other = ', or set weights.precision = "fp8"' if is_fp8(directory) else ""
        raise ValueError(
            f"model: {directory} has packed weights (quantization_config in config.json), and an engine that was started with them would "
            f"pack the weights of each version, too: write them in bf16 with `python -m trainer.convert {directory} CHECKPOINT` and "
            f"`python -m trainer.convert CHECKPOINT DIRECTORY --model {directory}`, and give DIRECTORY{other}"
        )


def check_deadlines(recipe: Recipe, inputs: Inputs) -> None:
    """Raises ValueError if a group closes before its longest episodes may have ended."""
    for source in inputs.sources:
        with about_source(source.name):
            check_deadline(recipe.by_source[source.name], source.agent_config)


def warnings(recipe: Recipe, inputs: Inputs) -> list[str]:
    """Warnings about settings of the agents' files or the limits that do not hold in this run."""
    heldout = [TaskSource("", inputs.heldout, inputs.agent_config)] if inputs.heldout else []
    by_source = {"": recipe, **recipe.by_source}
    found = [
        f"{source_words(one.name)}{warning}"
        for one in (*inputs.sources, *heldout)
        for warning in agent_warnings(by_source[one.name], one.agent_config, one.tasks)
    ]
    return list(dict.fromkeys(found))


def describe(recipe: Recipe, inputs: Inputs) -> str:
    """The plan of a run in a few lines."""
    groups, by_source = recipe.batch.groups_per_step, recipe.by_source
    size = recipe.largest_group_size
    evaluation, total = recipe.evaluation, recipe.num_steps * groups
    open_at_most = min((recipe.admission.max_lag_versions + 1) * groups, total)
    episodes = evaluation.episodes + evaluation.greedy_episodes
    epochs = "" if recipe.sources else f" ({total / len(inputs.train):.1f} epochs)"
    return "\n".join(
        (
            f"plan: {recipe.num_steps} steps x {groups} groups x {size} rollouts = {total * size} trained "
            "rollouts at most, and as many more as groups without signal are replaced",
            f"tasks: {len(inputs.train)} to train on{epochs}, "
            f"{len(inputs.heldout)} held out{_sets_words(inputs)}; {_verified_words(recipe, inputs)}{_left_out_words(recipe, inputs)}",
            f"controls: {_controls_words(recipe, inputs)}",
            f"judge: {judge_words(recipe.judge, recipe.credit)}",
            *(
                line
                for source in inputs.sources
                for line in _source_lines(by_source[source.name], source, inputs, recipe)
            ),
            f"learner: {processes_words(recipe)}",
            f"objective: {_objective_words(recipe.learner.loss)}",
            *_precision_lines(recipe),
            f"admission: at most {open_at_most} groups ({open_at_most * size} rollouts) open, "
            f"so that none is trained more than {recipe.admission.max_lag_versions} versions late"
            f"{_staleness_words(recipe.admission)}",
            f"evaluation: {episodes} held-out episodes each time" if episodes else "evaluation: none",
            f"checkpoint: every {recipe.checkpoint.every_steps} steps; trajectories are acknowledged then",
        )
    )


def _source_lines(recipe: Recipe, source: TaskSource, inputs: Inputs, whole: Recipe) -> Iterator[str]:
    """The lines about the groups of one source, whose recipe is `recipe`, in the run of the recipe `whole`."""
    if source.name:
        shares = {one.name: one.share for one in whole.sources}
        share = shares[source.name] / sum(shares.values())
        num_groups = whole.num_steps * whole.batch.groups_per_step * share
        yield (
            f"source {source.name}: {share:.1%} of the groups, {len(source.tasks)} tasks ({num_groups / len(source.tasks):.1f} epochs), "
            f"{recipe.rollout.limits.turns} turns at most; of its rollouts:"
        )
    yield _player_words(recipe, source, [] if source.name else inputs.heldout)
    yield _chat_words(source, inputs.tokenizer)
    yield f"context: {_context_words(recipe)}"
    size = recipe.rollout.group_size
    yield (
        f"group: {recipe.min_valid_members} of {size} members must be graded; it closes "
        f"{recipe.group_deadline_s:.0f} s after its first claim if they are; up to {recipe.refills_of(size)} members that an "
        "infrastructure failure ended are enqueued again"
    )
    if recipe.largest_group_size > size:
        yield (
            f"group sizes: {size} to {recipe.largest_group_size}, the fewest with which rewards differ with probability "
            f"{recipe.curriculum.signal_share:g}, by the task's estimated success"
        )


def _tasks(field: str, path: str) -> list[Task]:
    try:
        tasks = read_tasks(Path(path))
    except OSError as error:
        raise ValueError(
            f"{field}: {path}: {error.strerror}; make it with `python -m workers.tasksets`"
        ) from error
    if not tasks:
        raise ValueError(f"{field}: {path} holds no task; a run needs one at least")
    return tasks


@dataclass(frozen=True, slots=True)
class _TaskSet:
    """The tasks in a file that are played, what verification says of them, and how many are not verified or left out of training."""

    key: str = ""  # the recipe's key that names the file
    path: str = ""
    tasks: list[Task] = field(default_factory=list[Task])
    facts: list[TaskFacts] = field(default_factory=list[TaskFacts])
    ids: frozenset[str] = frozenset()  # of all tasks in the file
    num_unverified: int = 0
    num_uncontrolled: int = 0
    num_too_weak: int = 0


def _tasks_key(source: str) -> str:
    return f"sources.{source}.tasks" if source else "tasks.train"


def _trained(source: str, files: TaskFiles) -> _TaskSet:
    """The training tasks of a source."""
    field = _tasks_key(source)
    tasks = _tasks(field, files.train)
    verifications = Verifications.beside(field, files.train)
    num_unverified = _num_unverified(verifications, tasks, files.unverified, allowed=("allow",))
    controlled = verifications.controlled(tasks, min_control=files.min_control)
    strong = verifications.strong(controlled, max_weakness=files.max_weakness)
    return _TaskSet(
        field,
        files.train,
        verifications.as_verified(strong),
        verifications.facts(strong),
        ids=frozenset(task.id for task in tasks),
        num_unverified=num_unverified,
        num_uncontrolled=len(tasks) - len(controlled),
        num_too_weak=len(controlled) - len(strong),
    )


def _check_apart(files: Sequence[_TaskSet]) -> None:
    """Raises ValueError if two sources have a task in common."""
    for one, other in combinations(files, 2):
        if shared := one.ids & other.ids:
            raise ValueError(
                f"{one.key} and {other.key}: {one.path} and {other.path} both have {min(shared)}"
                f"{f' and {len(shared) - 1} more tasks' if len(shared) > 1 else ''}: leave them out of one of the two"
            )


def _check_whole_rewards(files: Iterable[_TaskSet]) -> None:
    """Raises ValueError for a task whose reward may be a fraction: its mean is no rate of success."""
    for one in files:
        for task in one.tasks:
            if isinstance(task.verdict, RewardFile) and task.verdict.fractions:
                raise ValueError(
                    f'{one.key}: the reward of {task.id} may be a fraction, and curriculum.kind = "signal" and '
                    "curriculum.max_group_size estimate a rate of success: remove these, or import the task without --fractions"
                )


def _heldout(field: str, path: str, train: Iterable[_TaskSet], files: TaskFiles) -> _TaskSet:
    """The held-out tasks in a file. Raises ValueError if some of them are training tasks, too."""
    tasks = _tasks(field, path)
    for other in train:
        if shared := other.ids & {task.id for task in tasks}:
            raise ValueError(
                f"{field} shares {len(shared)} tasks with {other.key}, such as {min(shared)}: "
                "leave them out of one of the two"
            )
    verifications = Verifications.beside(field, path)
    num_unverified = _num_unverified(verifications, tasks, files.unverified, allowed=("heldout", "allow"))
    return _TaskSet(
        field,
        path,
        verifications.as_verified(tasks),
        verifications.facts(tasks),
        num_unverified=num_unverified,
    )


def _num_unverified(
    verifications: Verifications, tasks: list[Task], unverified: Unverified, *, allowed: Sequence[Unverified]
) -> int:
    """The number of tasks that are not verified in their present form. Raises ValueError unless `unverified` is one of `allowed`."""
    doubts, path = verifications.doubts(tasks), verifications.path
    if doubts and unverified not in allowed:
        first, doubt = next(iter(doubts.items()))
        raise ValueError(
            f"{verifications.field}: {len(doubts)} of the {len(tasks)} tasks in {path} are not verified; the first, {first}, "
            f"{doubt}. Run `python -m workers.verify {path}` (--passing FILE copies the tasks that are ok), or "
            f"set tasks.unverified to {' or '.join(map(repr, allowed))}"
        )
    return len(doubts)


def _model_directory(recipe: AnyRecipe) -> Path:
    directory = Path(recipe.model)
    if not directory.is_dir():
        raise ValueError(
            f"model: {directory} is not a directory; give the Hugging Face directory of the starting policy"
        )
    return directory


def _check_model(recipe: Recipe) -> None:
    """Raises ValueError unless the model's directory exists and its context is as long as the recipe needs."""
    positions, context_tokens = max_positions(_model_directory(recipe)), recipe.rollout.limits.context_tokens
    if context_tokens > positions:
        raise ValueError(
            f"rollout.limits.context_tokens is {context_tokens}; the model holds {positions}: lower it, or stretch the model "
            "by YaRN in its config.json (docs/layouts.md)"
        )


def max_positions(model: Path) -> int:
    """The length of the longest context of a model, in tokens. Raises ValueError if its config.json does not say it."""

    class _Context(msgspec.Struct):
        max_position_embeddings: int

    path = model / "config.json"
    try:
        keys = language_keys(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
        return msgspec.convert(keys, _Context).max_position_embeddings
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"model: {path}: {error}; take the file that came with the weights") from error


def read_tokenizer(model: Path, chat: ChatRecipe, tools: Tools) -> TokenizerBundle:
    """The tokenizer of `model` with the chat template that a recipe chooses. Raises ValueError naming what is unusable with an agent's
    tools.
    """
    template_file = Path(chat.template) if chat.template else None
    bundle = read_bundle(model, template_file=template_file, template_kwargs=chat.template_kwargs)
    recognised = bundle.reply_format
    chosen = ReplyFormat(
        thoughts=chat.thoughts or recognised.thoughts, tool_calls=chat.tool_calls or recognised.tool_calls
    )
    bundle = replace(bundle, reply_format=chosen)
    try:
        ChatTemplate(bundle, tools)
    except RequestError as error:
        where = f"chat.template: {template_file}" if template_file else f"model: {model}"
        raise ValueError(
            f"{where}: {error}; correct the chat template, set chat.template to another, or choose another model"
        ) from error
    return bundle


def read_judge(recipe: Recipe) -> JudgeForm | None:
    """The judge of a recipe; None if it has none. Raises ValueError naming the field whose file is missing or unusable."""
    given = recipe.judge
    if given.method == "none":
        return None
    endpoint = Endpoint(**asdict(given.endpoint)) if given.endpoint.api_base else None
    templates = _judge_templates(given.templates)
    if endpoint is not None and parse_templates(templates).opening.source:
        raise ValueError(
            f"judge.templates: {given.templates}: opening: an endpoint cannot take the beginning of its reply; remove `opening`, "
            "or judge with engines behind SWERVE_JUDGE_ROUTER_URL"
        )
    judge = Judge(
        method=given.method,
        name=given.name,
        templates=templates,
        num_votes=given.num_votes,
        temperature=given.temperature,
        max_new_tokens=given.max_new_tokens,
        prompt_tokens=given.prompt_tokens,
        history_steps=given.history_steps,
        seed=recipe.seed,
        vote_s=given.vote_s,
        score_format_errors=given.score_format_errors,
        score_submission=given.score_submission,
        endpoint=endpoint,
    )
    return JudgeForm(judge, _judge_tokenizer(given.tokenizer))


def _judge_templates(path: str) -> str:
    try:
        return read_templates(Path(path)) if path else ""
    except ValueError as error:
        raise ValueError(f"judge.templates: {error}") from error


def _judge_tokenizer(directory: str) -> TokenizerBundle | None:
    if not directory:
        return None
    try:
        return read_bundle(Path(directory))
    except ValueError as error:
        raise ValueError(f"judge.tokenizer: {error}") from error


def _check_vocabulary(recipe: Recipe, policy: TokenizerBundle, teacher: JudgeForm | None) -> None:
    """Raises ValueError if the teacher does not have every token of the policy under the same id."""
    assert teacher is not None
    assert teacher.tokenizer is not None, "a teacher without a tokenizer is refused with its recipe"
    if difference := vocabulary_difference(policy, teacher.tokenizer):
        raise ValueError(
            f"judge.tokenizer: {recipe.judge.tokenizer} has another vocabulary than model = {recipe.model}: {difference}; a teacher reads "
            "the policy's token ids, so take a model with the same tokenizer"
        )


def _check_users_in_a_row(recipe: Recipe, agent: AgentConfig, bundle: TokenizerBundle) -> None:
    """Raises ValueError if user messages would follow each other and the chat template rejects that."""
    if ChatTemplate(bundle, agent.tools).takes_users_in_a_row:
        return
    if recipe.rollout.context.marker == "message":
        raise ValueError(
            'rollout.context.marker is "message", but the chat template rejects two user messages in a row: set it to "append"'
        )
    if agent.exact and agent.upstream == "2.4":
        raise ValueError(
            "rollout.exact: as in mini-swe-agent 2, a reply in a wrong format is taken out of the context, so that two user "
            "messages follow each other, but the chat template rejects that: set rollout.exact to false"
        )


def _chat_words(source: TaskSource, bundle: TokenizerBundle) -> str:
    """The lines about how replies are read, and about differences between the context and the chat template's rendering."""
    tools = _tools(load_agent(source.agent_config), source.harness)
    differences = [announcement.text for announcement in ChatTemplate(bundle, tools).announcements]
    variables = "".join(f", {name} = {value!r}" for name, value in bundle.template_kwargs.items())
    form = bundle.reply_format
    return "; ".join(
        (
            f"chat: thoughts are read as {form.thoughts}, tool calls as {form.tool_calls}{variables}",
            *differences,
        )
    )


def _context_words(recipe: Recipe) -> str:
    """The lines about what happens to a full context and to thoughts, and about the cost."""
    rollout, context = recipe.rollout, recipe.rollout.context
    context_tokens = rollout.limits.context_tokens
    prompt_tokens = context_tokens - rollout.sampling.max_new_tokens
    words = [f"an episode ends when its {context_tokens} tokens are used up"]
    if context.policy == "head_tail":
        words = [
            f"a prompt holds {prompt_tokens} tokens at most; a longer one is cut to its first and newest turns until "
            f"{context.refill_to:.0%} of that is in use, {context.head_share:.0%} of it by the first"
        ]
    if context.thinking == "strip_on_cut":
        words.append("a cut takes out the thoughts of earlier replies")
    if context.thinking == "strip":
        words.append(
            "thoughts are taken out once the next turn begins, so each turn with one is a sample of its own, and the learner's "
            "work grows with the square of the turns"
        )
    if context.every_step:
        words.append(
            "each turn is a sample of its own, so the learner's work grows with the square of the turns"
        )
    return "; ".join(words)


def _staleness_words(admission: AdmissionRecipe) -> str:
    if admission.staleness == "fixed":
        return ""
    control = admission.control
    most = admission.max_lag_versions if control.most_versions is None else control.most_versions
    return f"; how far it runs ahead is controlled, from {control.least_versions} to {most} versions"


def judge_words(judge: JudgeRecipe, credit: CreditRecipe) -> str:
    """The judge's part of the plan of a run."""
    if judge.method == "none":
        return "none"
    name = f" {judge.name}" if judge.name else ""
    votes = f", {judge.num_votes} votes on each step" if judge.method == "votes" else ""
    where = f", by {judge.endpoint.model} at {judge.endpoint.api_base}" if judge.endpoint.api_base else ""
    waits = (
        "a group waits for its judgements whatever happens, and none is enqueued while no judge works"
        if judge.required
        else f"a group that is ready waits up to {judge.wait_s:.0f} s for its judgements"
    )
    if judge.method == "teacher":
        waits = f"a rollout without its log-probs is not trained, and {waits}"
    if not credit.reads_judgements:
        waits = "no group waits for its judgements, because [credit] reads no scores"
    return f"{judge.method}{name}{votes}{where}; {waits}"


def _sets_words(inputs: Inputs) -> str:
    return "".join(f", {len(tasks)} in {name}" for name, tasks in inputs.heldout_sets.items())


def _verified_words(recipe: Recipe, inputs: Inputs) -> str:
    if not inputs.num_unverified:
        return "all verified"
    return f'{inputs.num_unverified} not verified, as tasks.unverified = "{recipe.tasks.unverified}" allows'


def _left_out_words(recipe: Recipe, inputs: Inputs) -> str:
    words: list[str] = []
    if inputs.num_uncontrolled:
        words.append(
            f'; {inputs.num_uncontrolled} left out by tasks.min_control = "{recipe.tasks.min_control}"'
        )
    if recipe.tasks.max_weakness is not None:
        train = {task.id for task in inputs.train}
        num_unknown = sum(one.task_id in train and one.weakness is None for one in inputs.task_facts)
        unknown = f"; {num_unknown} of unknown weakness, without any partial fix" if num_unknown else ""
        bound = f"tasks.max_weakness = {recipe.tasks.max_weakness:g}"
        words.append(f"; {inputs.num_too_weak} left out, which are weaker than {bound} at 95 %{unknown}")
    return "".join(words)


def _controls_words(recipe: Recipe, inputs: Inputs) -> str:
    share = recipe.grading.control_share
    if share == 0:
        return 'none is run, as grading.controls = "never" says'
    tasks = [*inputs.train, *inputs.heldout, *chain.from_iterable(inputs.heldout_sets.values())]
    gradings = "each of their gradings has" if share == 1 else f"{share:.0%} of their gradings have"
    num_controls = recipe.grading.num_controls
    runs = "a control run" if num_controls == 1 else f"{num_controls} control runs"
    return (
        f"{sum(map(has_controls, tasks))} of {len(tasks)} tasks have controls; {gradings} {runs}, in which a contradicted test "
        "must fail"
    )


def _objective_words(loss: LossConfig) -> str:
    """The lines about the objective, and about the recipe's changes and additions to it."""
    fields = (field.name for field in msgspec.structs.fields(LossConfig))
    names = [name for name in fields if name not in ("kind", "objective")]
    given = {
        name: getattr(loss, name) for name in names if getattr(loss, name) != getattr(LossConfig(), name)
    }
    changes = ", ".join(f"{name} = {toml_value(value)}" for name, value in given.items())
    name = loss.objective or loss.kind
    return f"{name}, with {changes}" if changes else f"{name}, with its own numbers"


def _precision_lines(recipe: Recipe) -> Iterator[str]:
    """The line about engines that compute with other numbers than the learner, and what the recipe does about it."""
    if recipe.weights.precision == "learner":
        return
    loss = recipe.learner.loss
    if loss.objective:
        correction = f"whatever {loss.objective} makes of the engines' log-probs"
    else:
        correction = CORRECTIONS[loss.kind].format(
            **{
                f"ratio_{name}": name
                if getattr(loss, f"ratio_{name}") is None
                else f"{getattr(loss, f'ratio_{name}'):g}"
                for name in ("cap", "floor")
            }
        )
    if loss.geometric_mask is not None:
        correction += f"; a trajectory whose mean ratio is outside {list(loss.geometric_mask)} is not trained"
    yield (
        f"precision: engines compute with weights in FP8, the learner in {recipe.learner.dtype}; the gap between their log-probs is "
        f"measured on {recipe.audit.share:.1%} of the tokens, and corrected by {correction}"
    )


def processes_words(recipe: AnyRecipe) -> str:
    """The processes of the learner."""
    learner = recipe.learner
    if learner.replica_processes == 1:
        return "one process, or several with a part of each batch each"
    return (
        f"{learner.replica_processes} processes (tensor_parallel {learner.tensor_parallel} x pipeline_parallel "
        f"{learner.pipeline_parallel} x context_parallel {learner.context_parallel}), or a multiple of them with a part of "
        "each batch each; torchrun starts them"
    )
