"""The agent's prompts, from a mini-swe-agent YAML of either dialect.

    both dialects    agent.{system_template, instance_template, step_limit}, environment.{timeout, env}
    the first        agent.{action_observation_template, format_error_template, timeout_template}
    the second       model.{observation_template, format_error_template, action_regex}

Prompts travel as text inside a request, so everything wrong with them is a RequestError that names the key:
malformed YAML, a template that uses a name nobody defines, an observation that cannot be rendered. Keys that
steer what is not ours (models, images, costs) are accepted, and are names that the templates may use, as all
scalars of the file are. Limits in the file only tighten the request's.
"""

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jinja2
import msgspec
from jinja2 import meta, nodes
from jinja2.sandbox import SandboxedEnvironment

from pipeline.errors import RequestError

BASH_BLOCK = r"```bash\s*\n(.*?)\n```"
MSWEA_BLOCK = r"```mswea_bash_command\s*\n(.*?)\n```"
MSWEA_TAG = r"<mswea_bash_command>(.*?)</mswea_bash_command>"

_ENVIRONMENT = SandboxedEnvironment(undefined=jinja2.StrictUndefined)
_TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
# A long output in a character that no prompt uses, to see how much a template shows.
_PROBE = "\u2588" * 200_000

# Names of the merged upstream configuration that a file need not mention.
_DEFAULTS: Mapping[str, object] = {
    "cost_limit": 0.0,
    "wall_time_limit_seconds": 0,
    "env": {},
    "model_name": "policy",
}
_LIVE = frozenset({"task", "cwd", "timeout", "step_limit", "n_model_calls", "model_cost", "elapsed_seconds"})

Names = Mapping[str, object]


class _Agent(msgspec.Struct, frozen=True):
    system_template: str
    instance_template: str
    action_observation_template: str | None = None
    format_error_template: str | None = None
    timeout_template: str | None = None
    action_regex: str | None = None
    step_limit: int = 0


class _Model(msgspec.Struct, frozen=True):
    observation_template: str | None = None
    format_error_template: str | None = None
    action_regex: str | None = None


class _Environment(msgspec.Struct, frozen=True):
    timeout: float | None = None
    env: dict[str, str] = {}


class _File(msgspec.Struct, frozen=True):
    agent: _Agent
    model: _Model = _Model()
    environment: _Environment = _Environment()


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One template of the file and the key it stands under."""

    key: str
    template: jinja2.Template

    def render(self, names: Names) -> str:
        try:
            return self.template.render(names)
        except _TEMPLATE_FAULTS as error:
            raise RequestError(f"agent config: {self.key}: {error}") from error


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """What an agent says, and how its replies are read.

    Every rendering takes the episode's live names: task, cwd, timeout, step_limit, n_model_calls, model_cost,
    elapsed_seconds.
    """

    action: re.Pattern[str]  # one group: the command
    step_limit: int | None
    command_s: float | None
    env: Mapping[str, str]  # of the agent's commands
    shows_chars: int | None  # the observation template's own limit; None: it shows any output in full
    system: _Prompt
    instance: _Prompt
    after_command: _Prompt
    after_format_error: _Prompt
    after_timeout: _Prompt | None  # None: rendered as an observation with return code -1
    names: Names

    def opening(self, live: Names) -> tuple[str, str]:
        """The system message and the first user message."""
        names = {**self.names, **live}
        return self.system.render(names), self.instance.render(names)

    def observation(self, live: Names, *, command: str, exit_code: int | None, output: str) -> str:
        """What the policy is told of a command's end. `exit_code` None: killed at its deadline."""
        action = {"action": command, "command": command}
        if exit_code is None and self.after_timeout is not None:
            return self.after_timeout.render({**self.names, **live, "action": action, "output": output})
        ended = {"output": output, "returncode": exit_code, "exception_info": ""}
        if exit_code is None:
            stopped = f"the command was stopped after {live['timeout']} seconds"
            ended |= {"returncode": -1, "exception_info": stopped}
        return self.after_command.render({**self.names, **live, "action": action, "output": ended})

    def format_error(self, live: Names, *, reason: str, actions: tuple[str, ...], finish_reason: str) -> str:
        """What the policy is told after a reply that is not exactly one command."""
        wrong = {"error": reason, "actions": actions, "finish_reason": finish_reason, "has_tool_calls": False}
        return self.after_format_error.render({**self.names, **live, **wrong})


@lru_cache(maxsize=16)
def load_agent(text: str) -> AgentConfig:
    """The agent that `text` describes, every template tried once. Raises RequestError naming the key that is
    at fault.
    """
    tree, file = _parse(text)
    names: dict[str, object] = {**_DEFAULTS, **platform.uname()._asdict()}
    for section in ("model", "environment", "agent"):
        names |= {str(name): value for name, value in tree.get(section, {}).items()}
    known = frozenset(names) | _LIVE
    agent, model = file.agent, file.model
    prompts = {
        "system": _compile("agent.system_template", agent.system_template, known),
        "instance": _compile("agent.instance_template", agent.instance_template, known),
        "after_command": _either(
            ("model.observation_template", model.observation_template),
            ("agent.action_observation_template", agent.action_observation_template),
            known | {"output", "action"},
        ),
        "after_format_error": _either(
            ("model.format_error_template", model.format_error_template),
            ("agent.format_error_template", agent.format_error_template),
            known | {"error", "actions", "finish_reason", "has_tool_calls"},
        ),
    }
    after_timeout = None
    if agent.timeout_template is not None:
        after_timeout = _compile(
            "agent.timeout_template", agent.timeout_template, known | {"output", "action"}
        )
    config = AgentConfig(
        action=_action(file),
        step_limit=agent.step_limit or None,
        command_s=file.environment.timeout or None,
        env=file.environment.env,
        shows_chars=None,
        **prompts,
        after_timeout=after_timeout,
        names=names,
    )
    return _tried(config)


def _parse(text: str) -> tuple[dict[str, dict[str, Any]], _File]:
    try:
        tree = msgspec.yaml.decode(text)
        return tree, msgspec.convert(tree, _File)
    except msgspec.ValidationError as error:
        raise RequestError(f"agent config: {error}") from error
    except msgspec.DecodeError as error:
        raise RequestError(f"agent config is not YAML: {error}") from error


def _action(file: _File) -> re.Pattern[str]:
    """The file's own expression; else the one of the dialect that it speaks."""
    prompts = file.agent.system_template + file.agent.instance_template
    key, pattern = "agent.action_regex", file.agent.action_regex
    if file.model.action_regex:
        key, pattern = "model.action_regex", file.model.action_regex
    if pattern is None and file.model.observation_template is None:
        pattern = BASH_BLOCK
    if pattern is None and "<mswea_bash_command>" in prompts:
        pattern = MSWEA_TAG
    if pattern is None and "```mswea_bash_command" in prompts:
        pattern = MSWEA_BLOCK
    if pattern is None:
        raise RequestError(
            "agent config: model.action_regex is missing; commands are read from text, not tool calls"
        )
    try:
        action = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise RequestError(f"agent config: {key}: {error}") from error
    if action.groups != 1:
        raise RequestError(f"agent config: {key}: {action.groups} groups; it needs exactly one, the command")
    return action


def _either(second: tuple[str, str | None], first: tuple[str, str | None], known: frozenset[str]) -> _Prompt:
    """The second dialect's template if the file has it, else the first's; each with its key."""
    key, source = second if second[1] else first
    if source is None:
        raise RequestError(f"agent config: {first[0]} is missing, and so is {second[0]}")
    return _compile(key, source, known)


def _compile(key: str, source: str, known: frozenset[str]) -> _Prompt:
    """The template, if it uses known names only. One that it tests for with `is defined` may be unknown."""
    try:
        syntax = _ENVIRONMENT.parse(source)
        template = _ENVIRONMENT.from_string(source)
    except jinja2.TemplateError as error:
        raise RequestError(f"agent config: {key}: {error}") from error
    tested = {test.node.name for test in syntax.find_all(nodes.Test) if isinstance(test.node, nodes.Name)}
    # One that only some branch sets counts as undeclared; missing where it is used, it fails in rendering.
    assigned = {name.name for name in syntax.find_all(nodes.Name) if name.ctx == "store"}
    unknown = sorted(meta.find_undeclared_variables(syntax) - known - tested - assigned)
    if unknown:
        names = ", ".join(sorted(known))
        raise RequestError(f"agent config: {key}: unknown variable {unknown[0]!r}; known: {names}")
    return _Prompt(key, template)


def _tried(config: AgentConfig) -> AgentConfig:
    """`config` with the observation template's own limit measured. Raises RequestError if a template cannot
    be rendered.
    """
    live: Names = dict.fromkeys(_LIVE, 1) | {"task": "", "cwd": "/"}
    config.opening(live)
    config.format_error(live, reason="", actions=(), finish_reason="stop")
    config.format_error(live, reason="", actions=("true", "true"), finish_reason="length")
    config.observation(live, command="true", exit_code=0, output="")
    config.observation(live, command="true", exit_code=None, output="")
    shown = config.observation(live, command="true", exit_code=1, output=_PROBE).count(_PROBE[0])
    return replace(config, shows_chars=shown if shown < len(_PROBE) else None)
