"""mini-swe-agent's configuration classes: their keys and defaults, by version.

Only data, copied from the packages; a test compares every table with the classes of the real packages.

"1.12" and "1.17" stand for 1.x before and from the release on that reads `agent.action_regex`; "2.4" for 2.x.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

Version = Literal["1.12", "1.17", "2.4"]
Dialect = Literal["text", "tool_calls"]
Defaults = Mapping[str, Any]

VERSIONS: Final[tuple[Version, ...]] = ("1.12", "1.17", "2.4")
REQUIRED: Final = MappingProxyType({"required": True})  # stands for the default of a key that has none

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
# Of the agent that puts a person in the loop.
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
# By `environment.environment_class`. The default of wrapper_args, a list of 30 words, is left out.
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
# What 2.x's text models have in place of the defaults of those with tool calls.
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
# By the name of the class of the model, without the word Model at its end.
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
# What `model.model_class` may say instead of an import path.
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
