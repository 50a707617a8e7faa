"""mini-swe-agent's configuration classes, their keys and defaults by version, and which version an agent file is for.

The tables are only data, copied from the packages; a test compares every one with the classes of the real packages. "1.12" and "1.17" mean
1.x before and from the release on that reads `agent.action_regex`; "2.4" for 2.x.

A file may declare which version it is for, and whether its agent uses text or tool calls: `swerve: {upstream: "1.12", dialect: text}`.
Otherwise its keys decide.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from pipeline.errors import RequestError

Version = Literal["1.12", "1.17", "2.4"]
Dialect = Literal["text", "tool_calls"]
Defaults = Mapping[str, Any]

VERSIONS: Final[tuple[Version, ...]] = ("1.12", "1.17", "2.4")
REQUIRED: Final = MappingProxyType({"required": True})  # means that a key has no default

BASH_BLOCK = r"```bash\s*\n(.*?)\n```"
MSWEA_BLOCK = r"```mswea_bash_command\s*\n(.*?)\n```"
MSWEA_TAG = r"<mswea_bash_command>(.*?)</mswea_bash_command>"

# The older systems' reminders, which they append to each observation.
REMINDER = "\nREMINDER: You have {turns_left} turns left to arrive at the solution."
LAST_REMINDER = "\nREMINDER: You only have 1 turn left. Please provide the final answer"

# The one tool that 2.x declares to the model.
BASH_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
            "required": ["command"],
        },
    },
}

_V1_AGENT: Final[Defaults] = {
    "system_template": "You are a helpful assistant that can do anything.",
    "instance_template": (
        "Your task: {{task}}. Please reply with a single shell command in triple backticks. "
        "To finish, the first line of the output of the shell command must be 'COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT'."
    ),
    "timeout_template": (
        "The last command <command>{{action['action']}}</command> timed out and has been killed.\n"
        "The output of the command was:\n <output>\n{{output}}\n</output>\n"
        "Please try another command and make sure to avoid those requiring interactive input."
    ),
    "format_error_template": "Please always provide EXACTLY ONE action in triple backticks.",
    "action_observation_template": "Observation: {{output}}",
    "step_limit": 0,
    "cost_limit": 3.0,
}
AGENT: Final[Mapping[Version, Defaults]] = {
    "1.12": _V1_AGENT,
    "1.17": {
        **_V1_AGENT,
        "timeout_template": (
            "The last command <command>{{action['action']}}</command> timed out and has been killed.\n"
            "The output of the command was:\n"
            "{% if output | length < 10000 -%}\n"
            "<output>\n{{output}}\n</output>\n"
            "{%- else -%}\n"
            "<warning>Output was too long and has been truncated.</warning>\n"
            "<output_head>\n{{ output[:5000] }}\n</output_head>\n"
            "<elided_chars>{{ output | length - 10000 }} characters elided</elided_chars>\n"
            "<output_tail>\n{{ output[-5000:] }}\n</output_tail>\n"
            "{%- endif %}\n"
            "Please try another command and make sure to avoid those requiring interactive input."
        ),
        "action_regex": BASH_BLOCK,
    },
    "2.4": {
        "system_template": REQUIRED,
        "instance_template": REQUIRED,
        "step_limit": 0,
        "cost_limit": 3.0,
        "wall_time_limit_seconds": 0,
        "max_consecutive_format_errors": 3,
        "output_path": None,
    },
}
# The defaults of the agent that puts a person in the loop.
INTERACTIVE: Final[Defaults] = {"mode": "confirm", "whitelist_actions": [], "confirm_exit": True}

_LOCAL: Final[Defaults] = {"cwd": "", "env": {}, "timeout": 30}
_DOCKER: Final[Defaults] = {
    "image": REQUIRED,
    "cwd": "/",
    "env": {},
    "forward_env": [],
    "timeout": 30,
    "executable": "docker",
    "run_args": ["--rm"],
    "container_timeout": "2h",
    "pull_timeout": 120,
}
_SINGULARITY: Final[Defaults] = {
    "image": REQUIRED,
    "cwd": "/",
    "env": {},
    "forward_env": [],
    "timeout": 30,
    "executable": "singularity",
    "sandbox_build_retries": 3,
}
_BUBBLEWRAP: Final[Defaults] = {**_LOCAL, "executable": "bwrap", "wrapper_args": []}
_SWEREX_DOCKER: Final[Defaults] = {
    "image": REQUIRED,
    "cwd": "/",
    "timeout": 30,
    "deployment_extra_kwargs": {},
}
_V1_ENVIRONMENTS: Final[Mapping[str, Defaults]] = {
    "docker": _DOCKER,
    "singularity": _SINGULARITY,
    "local": _LOCAL,
    "swerex_docker": _SWEREX_DOCKER,
    "bubblewrap": _BUBBLEWRAP,
}
# The defaults by `environment.environment_class`. The default of wrapper_args, a list of 30 words, is left out.
ENVIRONMENTS: Final[Mapping[Version, Mapping[str, Defaults]]] = {
    "1.12": _V1_ENVIRONMENTS,
    "1.17": _V1_ENVIRONMENTS,
    "2.4": {
        **_V1_ENVIRONMENTS,
        "docker": {**_DOCKER, "interpreter": ["bash", "-lc"]},
        "singularity": {
            **_SINGULARITY,
            "global_args": ["--quiet"],
            "exec_args": ["--contain", "--cleanenv", "--fakeroot"],
        },
        "swerex_modal": {
            "image": REQUIRED,
            "cwd": "/",
            "timeout": 30,
            "env": {},
            "startup_timeout": 60.0,
            "runtime_timeout": 3600.0,
            "deployment_timeout": 3600.0,
            "install_pipx": True,
            "modal_sandbox_kwargs": {},
        },
        "contree": {
            "contree_config": REQUIRED,
            "image": REQUIRED,
            "image_tag": None,
            "cwd": "/",
            "cwd_auto_create": True,
            "env": {},
            "forward_env": [],
            "interpreter": ["bash", "-c"],
            "timeout": 100,
            "import_username": None,
            "import_password": None,
        },
    },
}

_NAMED: Final[Defaults] = {"model_name": REQUIRED, "model_kwargs": {}}
_REGISTRY: Final[Defaults] = {"litellm_model_registry": None}
_CACHE: Final[Defaults] = {"set_cache_control": None}
_COSTS: Final[Defaults] = {"cost_tracking": "default"}
_OVERRIDE: Final[Defaults] = {"litellm_model_name_override": ""}
_TEMPLATES: Final[Defaults] = {
    "format_error_template": "{{ error }}",
    "observation_template": (
        "{% if output.exception_info %}<exception>{{output.exception_info}}</exception>\n{% endif %}"
        "<returncode>{{output.returncode}}</returncode>\n<output>\n{{output.output}}</output>"
    ),
    "multimodal_regex": "",
}
# Defaults that 2.x's text models have instead of those of models with tool calls.
TEXT_MODEL: Final[Defaults] = {
    **_TEMPLATES,
    "format_error_template": (
        "Please always provide EXACTLY ONE action in triple backticks, found {{actions|length}} actions."
    ),
    "action_regex": MSWEA_BLOCK,
}
_ROULETTE: Final[Defaults] = {"model_kwargs": REQUIRED, "model_name": "roulette"}
_INTERLEAVING: Final[Defaults] = {"model_kwargs": REQUIRED, "model_name": "interleaving", "sequence": None}
_DETERMINISTIC: Final[Defaults] = {"outputs": REQUIRED, "model_name": "deterministic", "cost_per_call": 1.0}
_V1_LITELLM: Final[Defaults] = {**_NAMED, **_REGISTRY, **_CACHE, **_COSTS}
_V2_LITELLM: Final[Defaults] = {**_V1_LITELLM, **_TEMPLATES}
# The defaults by the name of the model's class, without "Model" at its end.
MODELS: Final[Mapping[Version, Mapping[str, Defaults]]] = {
    "1.12": {
        "Litellm": {**_NAMED, **_REGISTRY},
        "Anthropic": {**_NAMED, **_REGISTRY},
        "OpenRouter": _NAMED,
        "Roulette": _ROULETTE,
        "Interleaving": _INTERLEAVING,
        "Deterministic": _DETERMINISTIC,
    },
    "1.17": {
        "Litellm": _V1_LITELLM,
        "Anthropic": _V1_LITELLM,
        "LitellmResponseAPI": _V1_LITELLM,
        "OpenRouter": {**_NAMED, **_CACHE, **_COSTS},
        "Portkey": {**_V1_LITELLM, **_OVERRIDE},
        "PortkeyResponseAPI": {**_V1_LITELLM, **_OVERRIDE},
        "Requesty": _NAMED,
        "Roulette": _ROULETTE,
        "Interleaving": _INTERLEAVING,
        "Deterministic": _DETERMINISTIC,
    },
    "2.4": {
        "Litellm": _V2_LITELLM,
        "LitellmResponse": _V2_LITELLM,
        "LitellmTextbased": {**_V2_LITELLM, **TEXT_MODEL},
        "OpenRouter": {**_NAMED, **_CACHE, **_COSTS, **_TEMPLATES},
        "OpenRouterResponse": {**_NAMED, **_CACHE, **_COSTS, **_TEMPLATES},
        "OpenRouterTextbased": {**_NAMED, **_CACHE, **_COSTS, **TEXT_MODEL},
        "Portkey": {**_V2_LITELLM, **_OVERRIDE, "provider": ""},
        "PortkeyResponseAPI": {**_NAMED, **_REGISTRY, **_COSTS, **_OVERRIDE, **_TEMPLATES},
        "Requesty": {**_NAMED, **_CACHE, **_TEMPLATES},
        "Roulette": _ROULETTE,
        "Interleaving": _INTERLEAVING,
        "Deterministic": {
            **_DETERMINISTIC,
            "observation_template": _TEMPLATES["observation_template"],
            "multimodal_regex": "",
        },
    },
}
# Names that `model.model_class` may have instead of an import path.
MODEL_CLASSES: Final[Mapping[Version, Mapping[str, str]]] = {
    "1.12": {
        "anthropic": "Anthropic",
        "litellm": "Litellm",
        "openrouter": "OpenRouter",
        "deterministic": "Deterministic",
    },
    "1.17": {
        "anthropic": "Anthropic",
        "litellm": "Litellm",
        "litellm_response": "LitellmResponseAPI",
        "openrouter": "OpenRouter",
        "portkey": "Portkey",
        "portkey_response": "PortkeyResponseAPI",
        "requesty": "Requesty",
        "deterministic": "Deterministic",
    },
    "2.4": {
        "litellm": "Litellm",
        "litellm_textbased": "LitellmTextbased",
        "litellm_response": "LitellmResponse",
        "openrouter": "OpenRouter",
        "openrouter_textbased": "OpenRouterTextbased",
        "openrouter_response": "OpenRouterResponse",
        "portkey": "Portkey",
        "portkey_response": "PortkeyResponseAPI",
        "requesty": "Requesty",
        "deterministic": "Deterministic",
    },
}


Tree = Mapping[str, Mapping[str, Any]]  # an agent file: sections of keys

# Deciding keys: only 1.x reads them, and the prompts depend on them.
_OF_V1: Final = ("action_observation_template", "format_error_template", "timeout_template", "action_regex")
_OF_V2: Final = ("observation_template", "format_error_template", "action_regex", "multimodal_regex")
# Keys of 2.x that decide only if none of the deciding keys occurs.
_HINTS_OF_V2: Final = (
    ("agent", "wall_time_limit_seconds"),
    ("agent", "max_consecutive_format_errors"),
    ("agent", "output_path"),
    ("agent", "agent_class"),
    ("environment", "interpreter"),
)
# The default interpreters. `/bin/sh -c` is Python's `shell=True`.
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
    """The version and dialect of an agent file, and the defaults of its sections under that version."""

    version: Version
    dialect: Dialect
    why_dialect: str  # the reason, where upstream itself would choose another dialect; else empty
    environment_class: str  # upstream's name for it; "" if the file names none, or one that is not upstream's
    knows_environment: bool  # False: the file names a class that is not upstream's, which may have any keys
    knows_model: bool  # False: the same for the model's class
    agent: Defaults
    environment: Defaults
    model: Defaults
    interpreter: tuple[str, ...]  # argv before a command


def flavour_of(tree: Tree) -> Flavour:
    """The flavour of the file. Raises RequestError for a version or dialect that does not exist."""
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
        raise RequestError(f"agent config: swerve.upstream: {said!r} is not one of {', '.join(VERSIONS)}")
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
