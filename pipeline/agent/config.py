"""One agent file, ready for use: the prompts, the way in which replies are read, and the limits of episodes.

    every version    agent.{system_template, instance_template, step_limit}, environment.{timeout, env, forward_env, cwd}
    1.x              agent.{action_observation_template, format_error_template, timeout_template, action_regex}
    2.x              agent.{wall_time_limit_seconds, max_consecutive_format_errors}, environment.interpreter,
                     model.{observation_template, format_error_template, action_regex}
    ours             swerve.{exact, upstream, dialect, reminders, facts}

The file travels as text inside a request, so everything wrong with it is a RequestError that names the key. What a file leaves out has
upstream's default. Limits in the file only tighten the request's. `swerve.exact` chooses upstream's behaviour even where ours is better.
"""

import json
import math
import platform
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, cast

import msgspec

from pipeline.agent.files import Names, Prompt, compile_prompt, parse
from pipeline.agent.keys import CLIENT_KWARGS, fates
from pipeline.agent.upstream import (
    BASH_BLOCK,
    BASH_TOOL,
    LAST_REMINDER,
    MSWEA_BLOCK,
    MSWEA_TAG,
    REMINDER,
    REQUIRED,
    Dialect,
    Flavour,
    Tree,
    Version,
    flavour_of,
    prompts_of,
    section,
)
from pipeline.errors import RequestError
from pipeline.task import Task


def number(key: str, value: Any, version: Version, *, whole: bool) -> float | None:
    """The number; None where upstream interprets it as no limit. `whole`: upstream 2.x declares it as an int."""
    if version == "2.4":
        value = _converted(key, value, whole=whole)
    elif value is None or not isinstance(value, int | float):
        raise RequestError(f"agent config: {key}: expected a number, got {value!r}")
    return value if math.isfinite(value) and value > 0 else None


def _converted(key: str, value: Any, *, whole: bool) -> int | float:
    try:
        found = float(value.strip() if isinstance(value, str) else value)
    except (TypeError, ValueError) as error:
        raise RequestError(f"agent config: {key}: expected a number, got {value!r}") from error
    if not whole:
        return found
    if not found.is_integer():
        raise RequestError(f"agent config: {key}: expected a whole number, got {value!r}")
    return int(found)


def text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"agent config: {key}: expected text, got {value!r}")
    return value


def texts(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in cast(list[Any], value)):
        raise RequestError(f"agent config: {key}: expected a list of texts, got {value!r}")
    return tuple(cast(list[str], value))


def environment(key: str, value: Any, version: Version) -> dict[str, str]:
    """Variables of the agent's commands. 1.x writes any value as text, 2.x takes text only."""
    if not isinstance(value, Mapping):
        raise RequestError(f"agent config: {key}: expected names and values, got {value!r}")
    found: dict[str, str] = {}
    for name, said in cast(Mapping[Any, Any], value).items():
        if not isinstance(name, str) or (version == "2.4" and not isinstance(said, str)):
            raise RequestError(f"agent config: {key}.{name}: expected text, got {said!r}; put it in quotes")
        found[name] = f"{said}"
    return found


OUR_INTERPRETER: Final = ("bash", "-c")

_PROBE_CHARS: Final = 200_000  # length of a long output, which shows how much of it a template prints
# Template variables that change during an episode, and variables of the task that the start-up command may use.
_LIVE: Final = frozenset({"task", "n_model_calls", "model_cost", "elapsed_seconds", "image"})
_EFFECTIVE: Final = frozenset({"cwd", "timeout", "step_limit"})
_TASK: Final = frozenset({"instance_id", "repo", "base_commit", "problem_statement", "image_name"})


@dataclass(frozen=True, slots=True)
class ModelSampling:
    """The sampling settings in `model.model_kwargs`; None where it has none. The maker of a request applies them."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """One agent.

    Every rendering takes the episode's live names: task, cwd, timeout, step_limit, n_model_calls, model_cost, elapsed_seconds,
    image.
    """

    upstream: Version  # the mini-swe-agent version whose defaults apply and, if exact, whose behaviours
    exact: bool
    dialect: Dialect
    action: re.Pattern[str]  # the text dialect's pattern; its group, else its whole match, is the command
    step_limit: int | None
    command_s: float | None
    wall_s: float | None
    max_format_errors: int | None  # the largest number in a row; 0: no limit; None: the request's own
    interpreter: tuple[str, ...]  # argv before the command
    startup: Prompt | None  # a command that runs before the first turn and has to succeed
    cwd: str | None  # the directory that the file names; commands start there only if exact
    env: Mapping[str, str]  # variables of the agent's commands
    # Variables of the worker's process that the commands get too, unless env has them.
    forward_env: tuple[str, ...]
    sampling: ModelSampling
    # Fields of the body of each request to a server, as litellm sends them.
    request_fields: Mapping[str, Any]
    reminders: bool
    shows_chars: int | None  # the observation template's own limit; None: it shows any output in full
    system: Prompt
    instance: Prompt
    after_command: Prompt
    after_format_error: Prompt
    after_timeout: Prompt | None  # 1.x only; 2.x renders an observation with return code -1
    names: Names

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that the model may call."""
        return (BASH_TOOL,) if self.dialect == "tool_calls" else ()

    def opening(self, live: Names) -> tuple[str, str]:
        """The system message and the first user message."""
        names = self._names(live)
        return self.system.render(names), self.instance.render(names)

    def startup_command(self, task: Task) -> str | None:
        """The command to run in the sandbox before the first turn."""
        names = {
            "instance_id": task.id,
            "repo": task.repo,
            "base_commit": task.base_commit,
            "problem_statement": task.problem,
            "image_name": task.image,
        }
        return self.startup.render(names) if self.startup else None

    def observation(self, live: Names, *, command: str, exit_code: int | None, output: str) -> str:
        """The message to the policy about a command's end. `exit_code` None: killed at its deadline."""
        if exit_code is not None:
            return self._observe(live, command, {"output": output, "returncode": exit_code}, "")
        if self.after_timeout is not None:
            action = {"action": command} if self.exact else {"action": command, "command": command}
            return self.after_timeout.render({**self._names(live), "action": action, "output": output})
        stopped = f"the command was stopped after {live['timeout']} seconds"
        if self.exact:
            stopped = f"Command '{command}' timed out after {self._names(live)['timeout']} seconds"
            stopped = f"An error occurred while executing the command: {stopped}"
        return self._observe(live, command, {"output": output, "returncode": -1}, stopped)

    def not_executed(self, live: Names, *, command: str) -> str:
        """The result of a tool call that was not carried out."""
        return self._observe(live, command, {"output": "", "returncode": -1}, "action was not executed")

    def format_error(
        self,
        live: Names,
        *,
        reason: str,
        actions: Sequence[str],
        finish_reason: str,
        has_tool_calls: bool = False,
    ) -> str:
        """The message to the policy after a reply that cannot be carried out. `actions`: the commands found in its text."""
        wrong: dict[str, object] = {"actions": list(actions)}
        if not (self.exact and self.upstream != "2.4"):
            wrong |= {"error": reason, "finish_reason": finish_reason}
        if self.dialect == "tool_calls":
            wrong["has_tool_calls"] = has_tool_calls
        names = {} if self.exact and self.upstream == "2.4" else self._names(live)
        return self.after_format_error.render({**names, **wrong})

    def reminder(self, turns_left: int) -> str:
        """The reminder that is appended to an observation (not to a format error or a 1.x timeout); empty without reminders."""
        if not self.reminders or turns_left < 1:
            return ""
        return LAST_REMINDER if turns_left == 1 else REMINDER.format(turns_left=turns_left)

    def _observe(self, live: Names, command: str, ended: dict[str, object], exception: str) -> str:
        if self.upstream == "1.17":
            ended["action"] = command
        elif self.upstream == "2.4":
            ended["exception_info"] = exception
        names = self._names(live) | {"output": ended}
        if not self.exact:
            names["action"] = {"action": command, "command": command}
        return self.after_command.render(names)

    def _names(self, live: Names) -> dict[str, object]:
        """The names of the file and of the moment. If exact, directory and limits are those of the file, as upstream prints them."""
        names = {**live, **self.names} if self.exact else {**self.names, **live}
        elapsed = names.get("elapsed_seconds")
        if isinstance(elapsed, float):
            names["elapsed_seconds"] = int(elapsed)
        return names


@lru_cache(maxsize=16)
def load_agent(source: str) -> AgentConfig:
    """The agent that `source` describes, every template tried once. Raises RequestError naming the key that is at fault."""
    tree = parse(source)
    flavour = flavour_of(tree)
    for key in fates(tree, flavour):
        if key.fate == "refused":
            raise RequestError(f"agent config: {key.key}: {key.why}")
    exact, names = _flag(tree, "exact"), _names_of(tree, flavour)
    if not exact:
        names = {key: value for key, value in names.items() if key not in _EFFECTIVE}
    agent, place, run = (section(tree, name) for name in ("agent", "environment", "run"))
    version = flavour.version
    turns = _number(agent, flavour, "step_limit")
    startup = run.get("env_startup_command")
    config = AgentConfig(
        upstream=version,
        exact=exact,
        dialect=flavour.dialect,
        action=_action(tree, flavour),
        step_limit=None if turns is None else math.ceil(turns),
        command_s=_command_s(place, flavour, exact=exact),
        wall_s=_number(agent, flavour, "wall_time_limit_seconds"),
        max_format_errors=_max_format_errors(agent, flavour, exact=exact),
        interpreter=_interpreter(tree, flavour, exact=exact),
        startup=compile_prompt("run.env_startup_command", text("run.env_startup_command", startup), _TASK)
        if startup
        else None,
        cwd=text("environment.cwd", place["cwd"]) if place.get("cwd") else None,
        env=environment("environment.env", place.get("env") or {}, version),
        forward_env=texts("environment.forward_env", place.get("forward_env") or []),
        sampling=_sampling(tree),
        request_fields=_request_fields(tree),
        reminders=_flag(tree, "reminders"),
        shows_chars=None,
        **_prompts(tree, flavour, frozenset(names) | _LIVE | _EFFECTIVE, exact=exact),
        names=names,
    )
    return _tried(config)


def _command_s(place: Mapping[str, Any], flavour: Flavour, *, exact: bool) -> float | None:
    """The time limit of a command; None: the request's own. If exact, a file without one gets upstream's default."""
    said = place.get("timeout", flavour.environment.get("timeout") if exact else None)
    return None if said is None else number("environment.timeout", said, flavour.version, whole=True)


def _names_of(tree: Tree, flavour: Flavour) -> dict[str, object]:
    """The names that templates may use: facts about the machine, and every setting of the agent, environment and model."""
    facts: Any = section(tree, "swerve").get("facts") or platform.uname()._asdict()
    if not isinstance(facts, Mapping):
        raise RequestError(f"agent config: swerve.facts: expected names and values, got {facts!r}")
    names: dict[str, object] = {str(key): value for key, value in cast(Mapping[Any, Any], facts).items()}
    parts = (("agent", flavour.agent), ("environment", flavour.environment), ("model", flavour.model))
    for name, defaults in parts:
        names |= {key: value for key, value in defaults.items() if value is not REQUIRED}
        names |= {str(key): value for key, value in section(tree, name).items()}
    names.setdefault("model_name", "policy")
    names.pop("image", None)  # a variable of the task, so it belongs to _LIVE
    return names


def _prompts(tree: Tree, flavour: Flavour, known: frozenset[str], *, exact: bool) -> dict[str, Any]:
    v2 = flavour.version == "2.4"
    where = "model" if v2 else "agent"
    after_command = f"{where}.{'observation_template' if v2 else 'action_observation_template'}"
    wrong = {"actions", "error", "finish_reason"} if v2 or not exact else {"actions"}
    if flavour.dialect == "tool_calls":
        wrong.add("has_tool_calls")
    seen = {"output"} if exact else {"output", "action"}

    def prompt(key: str, more: set[str], known: frozenset[str] = known) -> Prompt:
        part, _, name = key.partition(".")
        defaults = flavour.model if part == "model" else flavour.agent
        source = section(tree, part).get(name, defaults.get(name))
        if source is REQUIRED:
            raise RequestError(
                f"agent config: {key} is missing, which mini-swe-agent {flavour.version} requires; "
                "merge this file with one that has prompts"
            )
        return compile_prompt(key, text(key, source), known | more)

    return {
        "system": prompt("agent.system_template", set()),
        "instance": prompt("agent.instance_template", set()),
        "after_command": prompt(after_command, seen),
        "after_format_error": prompt(
            f"{where}.format_error_template", wrong, frozenset() if v2 and exact else known
        ),
        "after_timeout": None if v2 else prompt("agent.timeout_template", {"output", "action"}),
    }


def _action(tree: Tree, flavour: Flavour) -> re.Pattern[str]:
    """The file's own expression, else the version's default."""
    key = "model.action_regex" if flavour.version == "2.4" else "agent.action_regex"
    part, _, name = key.partition(".")
    defaults = flavour.model if part == "model" else flavour.agent
    source = section(tree, part).get(name, defaults.get(name, BASH_BLOCK))
    if source == MSWEA_BLOCK and "<mswea_bash_command>" in prompts_of(tree):
        source = MSWEA_TAG
    try:
        action = re.compile(text(key, source), re.DOTALL)
    except re.error as error:
        raise RequestError(f"agent config: {key}: {error}") from error
    if action.groups > 1:  # the whole match is the command if it has no group
        raise RequestError(f"agent config: {key}: {action.groups} groups; it may have one, the command")
    return action


def _interpreter(tree: Tree, flavour: Flavour, *, exact: bool) -> tuple[str, ...]:
    said = section(tree, "environment").get("interpreter")
    if said and (not exact or "interpreter" in flavour.environment):
        return texts("environment.interpreter", said)
    return flavour.interpreter if exact else OUR_INTERPRETER


def _max_format_errors(agent: Mapping[str, Any], flavour: Flavour, *, exact: bool) -> int | None:
    key = "max_consecutive_format_errors"
    if key not in agent and not exact:
        return None
    most = number(f"agent.{key}", agent.get(key, flavour.agent.get(key, 0)), flavour.version, whole=True)
    if most is None:
        return 0
    return math.ceil(most)


def _sampling(tree: Tree) -> ModelSampling:
    said = section(tree, "model").get("model_kwargs")
    if not isinstance(said, Mapping):  # a list of models, between which 1.x's roulette chooses
        return ModelSampling()
    known = cast(Mapping[str, Any], said)
    most = known.get("max_tokens", known.get("max_completion_tokens"))
    for name, value in (
        ("temperature", known.get("temperature")),
        ("top_p", known.get("top_p")),
        ("max_tokens", most),
    ):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
        ):
            raise RequestError(f"agent config: model.model_kwargs.{name}: expected a number, got {value!r}")
    if most is not None and (most != int(most) or most < 1):
        raise RequestError(f"agent config: model.model_kwargs.max_tokens: expected 1 or more, got {most!r}")
    return ModelSampling(known.get("temperature"), known.get("top_p"), most if most is None else int(most))


def _request_fields(tree: Tree) -> dict[str, Any]:
    """The fields of `model.model_kwargs` that reach a server. litellm puts the fields of `extra_body` beside the others."""
    said = section(tree, "model").get("model_kwargs")
    fields = dict(cast(Mapping[str, Any], said)) if isinstance(said, Mapping) else {}
    extra: Any = fields.pop("extra_body", None) or {}
    if not isinstance(extra, Mapping):
        raise RequestError(
            f"agent config: model.model_kwargs.extra_body: expected keys and values, got {extra!r}"
        )
    fields |= cast(Mapping[str, Any], extra)
    fields = {
        name: value for name, value in fields.items() if value is not None and name not in CLIENT_KWARGS
    }
    for name, value in fields.items():
        try:
            json.dumps(value, allow_nan=False)
            msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(
                f"agent config: model.model_kwargs.{name}: no request can carry it: {error}"
            ) from error
    return fields


def _number(agent: Mapping[str, Any], flavour: Flavour, key: str) -> float | None:
    """A limit of the agent; None for no limit."""
    return number(f"agent.{key}", agent.get(key, flavour.agent.get(key, 0)), flavour.version, whole=True)


def _flag(tree: Tree, name: str) -> bool:
    value = section(tree, "swerve").get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"agent config: swerve.{name}: expected true or false, got {value!r}")
    return value


def _tried(config: AgentConfig) -> AgentConfig:
    """`config` with the observation template's own limit measured. Raises RequestError if a template cannot be rendered."""
    live: Names = dict.fromkeys(_LIVE | _EFFECTIVE, 1) | {"task": "", "cwd": "/", "image": ""}
    config.opening(live)
    config.format_error(live, reason="", actions=(), finish_reason="stop")
    config.format_error(
        live, reason="", actions=("true", "true"), finish_reason="length", has_tool_calls=True
    )
    config.observation(live, command="true", exit_code=0, output="")
    config.observation(live, command="true", exit_code=None, output="")
    config.not_executed(live, command="true")
    return replace(config, shows_chars=_shown_chars(config, live))


def _shown_chars(config: AgentConfig, live: Names) -> int | None:
    """The number of characters of a long output that the observation template prints;

    None if it prints all. The output consists of a character that the template does not contain.
    """
    letter = next((char for char in string.punctuation if char not in config.after_command.source), "~")
    told = config.observation(live, command="true", exit_code=1, output=letter * _PROBE_CHARS)
    shown = told.count(letter)
    return shown if shown < _PROBE_CHARS else None
