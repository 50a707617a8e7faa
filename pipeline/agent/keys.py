"""The fate of each key of an agent file: it is used, it has no effect here (with the reason), or it is refused.

Keys are refused if upstream refuses them, too, or if they can only be a mistake: a misspelt key, a class that does not exist, two keys that
contradict each other. 1.x raises a TypeError for any key that its classes do not have; 2.x ignores such keys.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from pipeline.agent.upstream import (
    AGENT,
    ENVIRONMENTS,
    INTERACTIVE,
    MODEL_CLASSES,
    MODELS,
    VERSIONS,
    Flavour,
    Tree,
    section,
)

Fate = Literal["used", "without effect", "refused"]

_NEAR: Final = 0.8  # two keys with at least this similarity count as one key and a misspelling of it

_USED: Final[Mapping[str, str]] = {
    "agent.system_template": "the system message",
    "agent.instance_template": "the first user message",
    "agent.action_observation_template": "the message to the policy when a command ends",
    "agent.format_error_template": "the message to the policy about a reply that cannot be carried out",
    "agent.timeout_template": "the message to the policy when a command runs out of time",
    "agent.action_regex": "finds the command in a reply",
    "agent.step_limit": "turns, within the request's limit",
    "agent.wall_time_limit_seconds": "wall time of an episode, within the request's limit",
    "agent.max_consecutive_format_errors": "format errors in a row that end an episode",
    "environment.timeout": "wall time of one command, within the request's limit",
    "environment.env": "variables of the agent's commands; those of the task win",
    "environment.forward_env": "variables of the worker's process that the agent's commands get too",
    "environment.interpreter": "what each command is handed to",
    "model.observation_template": "the message to the policy when a command ends",
    "model.format_error_template": "the message to the policy about a reply that cannot be carried out",
    "model.action_regex": "finds the command in a reply",
    "model.model_kwargs.temperature": "sampling parameter, unless a recipe or an option says otherwise",
    "model.model_kwargs.top_p": "sampling parameter, unless a recipe or an option says otherwise",
    "model.model_kwargs.max_tokens": "largest number of tokens of one reply, unless a recipe or an option says otherwise",
    "model.model_kwargs.max_completion_tokens": "largest number of tokens of one reply, unless a recipe or an option says otherwise",
    "run.env_startup_command": "runs in the sandbox before the first turn, and has to succeed",
    "swerve.exact": "upstream's behaviour wherever ours differs",
    "swerve.upstream": "whose defaults and behaviours hold",
    "swerve.dialect": "how commands are read from a reply",
    "swerve.reminders": "how many turns are left is appended to each observation",
    "swerve.facts": "what templates may use of the machine that made the request",
}
_SANDBOX: Final = "a worker starts its sandboxes itself, within its own limits"
_PRICE: Final = "nothing here has a price"
_PERSON: Final = "no person confirms commands"
_API: Final = "a parameter of an API of others; the policy's engines are not asked with it"
_SENT: Final = "sent with each request to a server of --api-base; our own engines are not asked with it"
_CLIENT: Final = "a parameter of litellm, which no server gets"
# Keys of `model.model_kwargs` that litellm keeps to itself.
CLIENT_KWARGS: Final = frozenset(
    {
        *("api_base", "api_key", "api_version", "base_url", "custom_llm_provider", "organization"),
        *("drop_params", "additional_drop_params", "allowed_openai_params", "mock_response"),
        *("timeout", "request_timeout", "num_retries", "max_retries", "fallbacks", "caching", "cache"),
        *("metadata", "headers", "extra_headers", "stream", "input_cost_per_token", "output_cost_per_token"),
    }
)
_OUTPUTS: Final = "the policy replies, no script"
_WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "agent.cost_limit": f"{_PRICE}; only templates can use it",
    "agent.output_path": "trajectories are written where the run or the command says",
    "agent.mode": _PERSON,
    "agent.whitelist_actions": _PERSON,
    "agent.confirm_exit": _PERSON,
    "agent.agent_class": "episodes are played by Swerve's own loop",
    "environment.image": "each task names its image",
    "environment.environment_class": "commands run in the task's sandbox",
    "model.model_name": "the policy is the model; only templates can use the name",
    "model.model_class": "the policy is the model",
    "model.litellm_model_registry": _PRICE,
    "model.litellm_model_name_override": _PRICE,
    "model.cost_tracking": _PRICE,
    "model.cost_per_call": _PRICE,
    "model.set_cache_control": "engines cache prefixes by themselves",
    "model.multimodal_regex": "the policy reads text only",
    "model.provider": _API,
    "model.sequence": "one policy replies",
    "model.outputs": _OUTPUTS,
    "model.model_kwargs": "one policy replies, not one of several models",
    "model.model_kwargs.api_key": "left out of what travels; an endpoint's key is in a variable or a file of its user",
    "model.model_kwargs.api_base": "the command or the recipe says where the policy is",
    "model.model_kwargs.base_url": "the command or the recipe says where the policy is",
    "model.model_kwargs.drop_params": "there are no parameters to drop",
    "run.task": "tasks come from the task file",
}
# Keys of 2.x that also help a file of 1.x, unless it is to be exact.
_LENT_TO_V1: Final = frozenset(
    {
        "agent.wall_time_limit_seconds",
        "agent.max_consecutive_format_errors",
        "environment.interpreter",
        "environment.forward_env",
    }
)
_OURS: Final = frozenset({"exact", "upstream", "dialect", "reminders", "facts"})
_SECTIONS: Final = ("agent", "environment", "model", "run", "swerve")
_AGENT_CLASSES: Final = frozenset({"default", "interactive"})


@dataclass(frozen=True, slots=True)
class KeyFate:
    key: str  # section and name, with a dot between them
    fate: Fate
    why: str


def fates(tree: Tree, flavour: Flavour) -> list[KeyFate]:
    """The fate of each key, in the file's order; for `model.model_kwargs`, of each key in it."""
    return list(_fates(tree, flavour))


def _fates(tree: Tree, flavour: Flavour) -> Iterator[KeyFate]:
    exact = section(tree, "swerve").get("exact") is True
    for name, keys in tree.items():
        if name not in _SECTIONS:
            yield _unknown_section(name)
            continue
        for key, value in keys.items():
            if f"{name}.{key}" == "model.model_kwargs" and isinstance(value, Mapping):
                yield from _of_model_kwargs(cast(Mapping[str, Any], value))
            else:
                yield _of_key(name, key, value, flavour, exact=exact)


def _of_key(name: str, key: str, value: Any, flavour: Flavour, *, exact: bool) -> KeyFate:
    full = f"{name}.{key}"
    if name == "swerve":
        if key in _OURS:
            return KeyFate(full, "used", _USED[full])
        return KeyFate(full, "refused", f"there is no such key{_suggestion(key, _OURS)}")
    if key.endswith("_class"):
        return _of_class(full, value, flavour)
    if not _is_known(name, key, flavour) and not (
        full in _LENT_TO_V1 and flavour.version != "2.4" and not exact
    ):
        return _unknown(name, key, flavour)
    if full == "environment.cwd":
        if exact:
            return KeyFate(full, "used", "commands start there")
        return KeyFate(
            full, "without effect", "commands start in the task's directory; with exact they start here"
        )
    if full == "model.action_regex" and flavour.dialect == "tool_calls":
        return KeyFate(full, "without effect", "commands are read from tool calls")
    if full in _USED:
        return KeyFate(full, "used", _USED[full])
    return KeyFate(
        full, "without effect", _WITHOUT_EFFECT.get(full, _SANDBOX if name == "environment" else _API)
    )


def _of_class(full: str, value: Any, flavour: Flavour) -> KeyFate:
    """The fate of a key that names a class: one of upstream's names, or an import path, which may be anybody's."""
    version = flavour.version
    known: Iterable[str] = {
        "agent.agent_class": _AGENT_CLASSES if version == "2.4" else (),
        "environment.environment_class": ENVIRONMENTS[version],
        "model.model_class": MODEL_CLASSES[version],
    }.get(full, ())
    if not known:
        name, _, key = full.partition(".")
        return _unknown(name, key, flavour)
    said = str(value or "")
    if said and "." not in said and said not in known:
        return KeyFate(full, "refused", f"mini-swe-agent {version} has no {said!r}{_suggestion(said, known)}")
    why = _WITHOUT_EFFECT[full]
    if full == "model.model_class":
        why = f"{why}; commands are read from {'text' if flavour.dialect == 'text' else 'tool calls'}"
        why += f": {flavour.why_dialect}" if flavour.why_dialect else ""
    return KeyFate(full, "without effect", why)


def _of_model_kwargs(said: Mapping[str, Any]) -> Iterator[KeyFate]:
    most = [said[key] for key in ("max_tokens", "max_completion_tokens") if key in said]
    used = [full.rpartition(".")[2] for full in _USED if full.startswith("model.model_kwargs.")]
    for key in said:
        full = f"model.model_kwargs.{key}"
        if key in used:
            if key.startswith("max_") and most[0] != most[-1]:
                yield KeyFate(full, "refused", "max_tokens and max_completion_tokens contradict each other")
            else:
                yield KeyFate(full, "used", _USED[full])
        elif key not in CLIENT_KWARGS and (near := _suggestion(str(key), used, cutoff=0.85)):
            yield KeyFate(full, "refused", f"no API has such a parameter{near}")
        elif key in CLIENT_KWARGS:
            yield KeyFate(full, "without effect", _WITHOUT_EFFECT.get(full, _CLIENT))
        else:
            yield KeyFate(full, "used", _SENT)


def _is_known(name: str, key: str, flavour: Flavour) -> bool:
    """Whether the configuration class for which upstream uses this section has the key."""
    match name:
        case "agent":
            return key in flavour.agent
        case "environment":
            return (
                not flavour.knows_environment or key in flavour.environment or _may_be_dockers(key, flavour)
            )
        case "model":
            return not flavour.knows_model or key in flavour.model
        case _:
            return key in ("env_startup_command", "task")


def _may_be_dockers(key: str, flavour: Flavour) -> bool:
    return not flavour.environment_class and key in ENVIRONMENTS[flavour.version]["docker"]


def _unknown(name: str, key: str, flavour: Flavour) -> KeyFate:
    """The fate of a key that upstream's class does not have: 1.x fails, 2.x ignores it."""
    full, version = f"{name}.{key}", flavour.version
    homes = [place for place in ("agent", "environment", "model") if place != name and key in _keys_of(place)]
    ever = key in _keys_of(name)
    if version == "2.4" and ever:
        return KeyFate(
            full, "without effect", "mini-swe-agent 2.x ignores it too: a key of 1.x or of another class"
        )
    hint = f"; it belongs under {homes[0]}" if homes else _suggestion(key, _keys_of(name))
    if ever:
        hint = ": a key of another version, or of another class"
    if version != "2.4":
        return KeyFate(full, "refused", f"mini-swe-agent {version} has no such key{hint}")
    if hint:
        return KeyFate(full, "refused", f"there is no such key{hint}")
    return KeyFate(full, "without effect", "mini-swe-agent 2.x ignores it too: it knows no such key")


def _unknown_section(name: str) -> KeyFate:
    if near := _suggestion(name, _SECTIONS):
        return KeyFate(name, "refused", f"there is no such section{near}")
    return KeyFate(name, "without effect", "mini-swe-agent ignores it too: it knows no such section")


def _keys_of(name: str) -> frozenset[str]:
    """All keys that a section has in any version and class."""
    match name:
        case "agent":
            parts = [*(AGENT[version] for version in VERSIONS), INTERACTIVE, {"agent_class": None}]
        case "environment":
            parts = [keys for version in VERSIONS for keys in ENVIRONMENTS[version].values()]
        case "model":
            parts = [keys for version in VERSIONS for keys in MODELS[version].values()]
        case _:
            parts = [{"env_startup_command": None, "task": None}]
    return frozenset(key for part in parts for key in part)


def _suggestion(said: str, known: Iterable[str], *, cutoff: float = _NEAR) -> str:
    near = difflib.get_close_matches(said, sorted(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""
