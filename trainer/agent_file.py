"""The agent that a recipe names: its files merged and tried, on every task and with the chat template, before anything is enqueued."""

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from pipeline.agent.config import load_agent
from pipeline.agent.example import doubts, example
from pipeline.agent.files import merged, parse, to_text
from pipeline.agent.keys import fates
from pipeline.agent.option import read_agent
from pipeline.agent.versions import flavour_of
from pipeline.chat import ChatMessage
from pipeline.chat_template import ChatTemplate
from pipeline.errors import RequestError
from pipeline.task import Task
from pipeline.tokenizer import TokenizerBundle
from pipeline.visible import visible
from trainer.recipe import Recipe
from trainer.recipe.schema import Rollout

INSPECT = "python -m workers.agent"  # says more about a file


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
    """The agent's lines of the plan: what it is, and a warning for what does not hold."""
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
    """The opening of `task`, as the policy is shown it."""
    system, user = example(load_agent(text), task, recipe.rollout.limits)
    return f"example: the opening of task {task.id}\n--- system\n{visible(system)}\n--- user\n{visible(user)}\n---"


def agent_warnings(recipe: Recipe, text: str, tasks: Sequence[Task]) -> Iterator[str]:
    """What the agent's files say that does not hold in this run."""
    config = load_agent(text)
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
