"""Which version of mini-swe-agent an agent file is for, and whether it speaks in text or in tool calls.

The file may say so itself: `swerve: {upstream: "1.12", dialect: text}`. Otherwise its keys tell.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipeline.agent.upstream import (
    AGENT,
    ENVIRONMENTS,
    INTERACTIVE,
    MODEL_CLASSES,
    MODELS,
    TEXT_MODEL,
    VERSIONS,
    Defaults,
    Dialect,
    Version,
)
from pipeline.errors import RequestError

Tree = Mapping[str, Mapping[str, Any]]  # an agent file: sections of keys

# Keys that decide: only this generation of mini-swe-agent reads them, and the prompts depend on them.
_OF_V1: Final = ("action_observation_template", "format_error_template", "timeout_template", "action_regex")
_OF_V2: Final = ("observation_template", "format_error_template", "action_regex", "multimodal_regex")
# Keys of 2.x that decide only where those are silent.
_HINTS_OF_V2: Final = (
    ("agent", "wall_time_limit_seconds"),
    ("agent", "max_consecutive_format_errors"),
    ("agent", "output_path"),
    ("agent", "agent_class"),
    ("environment", "interpreter"),
)
# Where no key says it. `/bin/sh -c` is Python's `shell=True`.
_INTERPRETERS: Final = {
    "docker": ("bash", "-lc"),
    "singularity": ("bash", "-c"),
    "bubblewrap": ("bash", "-c"),
    "local": ("/bin/sh", "-c"),
    "swerex_docker": ("/bin/sh", "-c"),
    "swerex_modal": ("/bin/sh", "-c"),
    "contree": ("bash", "-c"),
}
_TEXT_SIGNS: Final = ("```mswea_bash_command", "<mswea_bash_command>")
_CAMEL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True, slots=True)
class Flavour:
    """What an agent file is, and the defaults of its sections under that version."""

    version: Version
    dialect: Dialect
    why_dialect: str  # in words, where upstream itself would take another; else empty
    environment_class: str  # upstream's name for it; "" if the file names none, or one that is not upstream's
    knows_environment: bool  # False: the file names a class that is not upstream's, which may have any keys
    knows_model: bool  # likewise
    agent: Defaults
    environment: Defaults
    model: Defaults
    interpreter: tuple[str, ...]  # argv before a command


def flavour_of(tree: Tree) -> Flavour:
    """Raises RequestError for a version or dialect that does not exist."""
    version = _version(tree)
    dialect, why_dialect = _dialect(tree, version)
    environment_class = _environment_class(tree, version)
    model_class = _model_class(tree, version)
    model = MODELS[version][model_class or "Litellm"]
    if version == "2.4" and dialect == "text":
        model = {**model, **TEXT_MODEL}
    environments = ENVIRONMENTS[version]
    # A file that names no class is run in Docker by some of upstream's commands and locally by others.
    place = environment_class or ("docker" if _is_for_docker(tree) else "local")
    return Flavour(
        version=version,
        dialect=dialect,
        why_dialect=why_dialect,
        environment_class=environment_class,
        knows_environment=bool(environment_class)
        or not section(tree, "environment").get("environment_class"),
        knows_model=bool(model_class) or not section(tree, "model").get("model_class"),
        agent={**AGENT[version], **INTERACTIVE},
        environment=environments[place],
        model=model,
        interpreter=tuple(environments[place].get("interpreter", _INTERPRETERS[place])),
    )


def section(tree: Tree, name: str) -> Mapping[str, Any]:
    return tree.get(name, {})


def prompts_of(tree: Tree) -> str:
    agent = section(tree, "agent")
    return f"{agent.get('system_template', '')}\n{agent.get('instance_template', '')}"


def _version(tree: Tree) -> Version:
    said = section(tree, "swerve").get("upstream")
    if said is not None:
        for version in VERSIONS:
            if str(said) == version:
                return version
        raise RequestError(f"agent config: swerve.upstream: {said!r} is none of {', '.join(VERSIONS)}")
    agent, model = section(tree, "agent"), section(tree, "model")
    if any(key in model for key in _OF_V2) or _is_of_v2(str(model.get("model_class", ""))):
        return "2.4"
    if any(key in agent for key in _OF_V1):
        return "1.17"
    if any(key in section(tree, name) for name, key in _HINTS_OF_V2):
        return "2.4"
    # 2.x has no default for the first two prompts; 1.x has, and a fence of its own.
    has_prompts = "system_template" in agent and "instance_template" in agent
    is_v1 = "agent" in tree and (not has_prompts or "```bash" in prompts_of(tree))
    return "1.17" if is_v1 else "2.4"


def _is_of_v2(model_class: str) -> bool:
    return (
        model_class in MODEL_CLASSES["2.4"].keys() - MODEL_CLASSES["1.17"].keys()
        or "Textbased" in model_class
    )


def _dialect(tree: Tree, version: Version) -> tuple[Dialect, str]:
    said = section(tree, "swerve").get("dialect")
    model = section(tree, "model")
    if said not in (None, "text", "tool_calls"):
        raise RequestError(f'agent config: swerve.dialect: {said!r} is neither "text" nor "tool_calls"')
    if version != "2.4":
        if said == "tool_calls":
            raise RequestError(f"agent config: swerve.dialect: mini-swe-agent {version} has no tool calls")
        return "text", ""
    if said is not None:
        return said, ""
    if "textbased" in str(model.get("model_class", "")).lower():
        return "text", ""
    signs = ["model.action_regex is set"] if model.get("action_regex") else []
    signs += [f"the prompts show {sign}" for sign in _TEXT_SIGNS if sign in prompts_of(tree)]
    if signs:
        return (
            "text",
            f"{signs[0]}, though model.model_class names no text model, with which upstream declares its tool",
        )
    return "tool_calls", ""


def _environment_class(tree: Tree, version: Version) -> str:
    said = str(section(tree, "environment").get("environment_class") or "")
    name = said.rpartition(".")[2].removesuffix("Environment")
    short = said if "." not in said else _CAMEL.sub("_", name).lower()
    return short if short in ENVIRONMENTS[version] else ""


def _model_class(tree: Tree, version: Version) -> str:
    said = str(section(tree, "model").get("model_class") or "")
    name = MODEL_CLASSES[version].get(said) or said.rpartition(".")[2].removesuffix("Model")
    return name if name in MODELS[version] else ""


def _is_for_docker(tree: Tree) -> bool:
    keys = section(tree, "environment").keys()
    return bool(keys & (ENVIRONMENTS["2.4"]["docker"].keys() - ENVIRONMENTS["2.4"]["local"].keys()))
