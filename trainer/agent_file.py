"""The agent that a recipe names: its files merged and tried, with every task and the chat template, before anything is enqueued."""

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from pipeline.agent.config import load_agent
from pipeline.agent.files import merged, parse, to_text
from pipeline.agent.keys import fates
from pipeline.agent.option import doubts, example, read_agent
from pipeline.agent.upstream import flavour_of
from pipeline.chat import ChatMessage
from pipeline.chat_template import ChatTemplate
from pipeline.errors import RequestError
from pipeline.harness import Harness, check_can_play, read_harness
from pipeline.screen import visible
from pipeline.task import Task
from pipeline.tokenizer import TokenizerBundle
from trainer.recipe import Recipe
from trainer.recipe.schema import Rollout

INSPECT = "python -m workers.agent"  # the command that shows how each key of a file is used


def recipe_agent(rollout: Rollout) -> str:
    """The agent as requests carry it. Raises ValueError naming the file and the key."""
    try:
        return read_agent(rollout.agent_specs, exact=rollout.exact)
    except ValueError as error:
        raise ValueError(f"rollout.agent: {error}") from error
    except RequestError as error:
        raise ValueError(
            f"rollout.agent: {_names(rollout)}: {error}; `{INSPECT} FILE` says what becomes of each key"
        ) from error


def read_program(rollout: Rollout) -> Harness | None:
    """The agent program that plays in place of the agent; None if there is none. Raises ValueError naming the key.

    A program's context is what the engine held, including thoughts, so that each sampled token is trained in its place. Removing thoughts
    would be a cut of ours in a conversation that the program controls: a recipe that asks for it is refused, because it would have no
    effect.
    """
    if not rollout.harness:
        return None
    context = rollout.context
    if context.policy != "stop":
        raise ValueError(
            f'rollout.context.policy: {context.policy!r} cuts the context, which an agent program does itself; it must be "stop"'
            " where rollout.harness is set"
        )
    if context.thinking != "keep":
        raise ValueError(
            f"rollout.context.thinking: {context.thinking!r} takes thoughts out of the context, which an agent program leads itself; it"
            ' must be "keep" where rollout.harness is set'
        )
    if rollout.exact:
        raise ValueError(
            "rollout.exact: it is for the built-in loop; remove it where rollout.harness says who plays"
        )
    try:
        harness = read_harness(rollout.harness).harness
        check_can_play(harness, rollout.limits.context_tokens, rollout.sampling.max_new_tokens)
    except ValueError as error:
        raise ValueError(f"rollout.harness: {error}") from error
    return harness


def check_opening(text: str, tasks: Sequence[Task], bundle: TokenizerBundle, recipe: Recipe) -> None:
    """Raises ValueError if the opening of a task cannot be rendered, or leaves no room for a reply."""
    config, limits = load_agent(text), recipe.rollout.limits
    where = f"rollout.agent: {_names(recipe.rollout)}"
    try:
        template = ChatTemplate(bundle, config.tools)
        openings = {task.id: template.render(_messages(example(config, task, limits))) for task in tasks}
    except RequestError as error:
        raise ValueError(f"{where}: {error}") from error
    longest = max(openings, key=lambda one: len(openings[one]))
    tokenizer = Tokenizer.from_str(bundle.tokenizer_json.decode())
    num_tokens = len(tokenizer.encode(openings[longest], add_special_tokens=False).ids)
    room_tokens = limits.context_tokens - recipe.rollout.sampling.max_new_tokens
    if num_tokens > room_tokens:
        raise ValueError(
            f"{where}: the opening of task {longest} has {num_tokens} tokens, but only {room_tokens} are left of "
            "rollout.limits.context_tokens without rollout.sampling.max_new_tokens: raise or shorten one of them"
        )


def agent_words(recipe: Recipe, text: str, tasks: Sequence[Task]) -> str:
    """The agent's lines of the plan: a description, and a warning for each setting that does not hold."""
    tree = parse(text)
    flavour, config = flavour_of(tree), load_agent(text)
    idle = [
        one.key
        for one in fates(parse(to_text(merged(recipe.rollout.agent_specs))), flavour)
        if one.fate == "without effect"
    ]
    how = "exactly as it behaves" if config.exact else "with our ways where they are better"
    dialect = "text" if flavour.dialect == "text" else "tool calls"
    why = f" ({flavour.why_dialect})" if flavour.why_dialect else ""
    words = (
        f"agent: as mini-swe-agent {flavour.version} reads it, {how}; commands are read from {dialect}{why}"
    )
    if idle:
        words += f"; without effect here: {', '.join(idle)}"
    return "\n".join([words, *(f"warning: {one}" for one in agent_warnings(recipe, text, tasks))])


def example_words(text: str, task: Task, recipe: Recipe) -> str:
    """The opening of `task`, as the policy is shown it; for an agent program, the text that it gets."""
    if recipe.rollout.harness:
        return f"example: the problem of task {task.id}\n{visible(task.problem)}\n---"
    system, user = example(load_agent(text), task, recipe.rollout.limits)
    return f"example: the opening of task {task.id}\n--- system\n{visible(system)}\n--- user\n{visible(user)}\n---"


def check_deadline(recipe: Recipe, text: str) -> None:
    """Raises ValueError if a group closes before its longest episodes may have ended: these would be played and never trained."""
    plays_s, key = _playing(recipe, text)
    if recipe.group_deadline_s < plays_s:
        raise ValueError(
            f"rollout.group_deadline_s is {recipe.group_deadline_s:g}, and an episode may play for {plays_s:g} s ({key}), so that the "
            f"longest would never be trained: raise it to {plays_s + recipe.rollout.limits.grade_wall_s:g}, which leaves time for grading, "
            f"leave it out, or lower {key}"
        )


def _playing(recipe: Recipe, text: str) -> tuple[float, str]:
    """The number of seconds that an episode may play, and the key that sets it."""
    of_recipe, of_file = recipe.rollout.limits.wall_s, load_agent(text).wall_s
    if recipe.rollout.harness:
        return of_recipe, "rollout.limits.wall_s"
    if of_file and of_file < of_recipe:
        return of_file, "agent.wall_time_limit_seconds of the agent's file"
    return of_recipe, "rollout.limits.wall_s"


def agent_warnings(recipe: Recipe, text: str, tasks: Sequence[Task]) -> Iterator[str]:
    """Warnings about settings of the agent's files or the limits that do not hold in this run."""
    config = load_agent(text)
    plays_s, key = _playing(recipe, text)
    graded_s = recipe.rollout.limits.grade_wall_s
    if recipe.group_deadline_s < plays_s + graded_s:
        yield (
            f"rollout.group_deadline_s is {recipe.group_deadline_s:g}, and an episode may play for {plays_s:g} s ({key}) and be graded for "
            f"{graded_s:g} s (rollout.limits.grade_wall_s): groups may close without those that take longest; set it to "
            f"{plays_s + graded_s:g}, or lower a limit"
        )
    if recipe.rollout.harness:
        return
    one_of_each = {task.workdir: task for task in reversed(tasks)}
    for task in one_of_each.values():
        yield from doubts(config, task, recipe.rollout.limits)
    said, used = config.sampling, recipe.rollout.sampling
    pairs = (
        ("temperature", said.temperature, used.temperature),
        ("top_p", said.top_p, used.top_p),
        ("max_tokens", said.max_tokens, used.max_new_tokens),
    )
    for name, of_file, of_recipe in pairs:
        if of_file is not None and of_file != of_recipe:
            yield (
                f"model.model_kwargs.{name} = {of_file:g} of the agent's file has no effect: "
                f"rollout.sampling has {of_recipe:g}"
            )


def _names(rollout: Rollout) -> str:
    return " + ".join(rollout.agent_specs)


def _messages(opening: tuple[str, str]) -> list[ChatMessage]:
    system, user = opening
    return [ChatMessage("system", system), ChatMessage("user", user)]
