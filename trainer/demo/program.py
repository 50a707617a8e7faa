"""The demonstration's agent program: mini-swe-agent's own package, with the prompts of the demo's agent file, on which the demo's policy
was trained.

It uses the shipped image.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from pipeline.harness import Harness, read_harness
from trainer.demo.lessons import RECIPE

PROGRAM = "mini"
ACTION = r"```bash\s*\n(.*?)\n```"


def write_program(path: Path) -> Harness:
    """Write the harness file. Raises ValueError."""
    shipped = read_harness(PROGRAM)
    words = (*shipped.harness.command, "--config={home}/agent.yaml", "--model-class=litellm_textbased")
    keys = {
        "name": PROGRAM,
        "version": shipped.harness.version,
        "licence": shipped.licence,
        "dialect": shipped.harness.dialect,
        "command": words,
        "version_command": shipped.version_command,
        "image": shipped.harness.image,
        "uses_tools": False,
        "command_pattern": ACTION,
    }
    tables: dict[str, Mapping[str, object]] = {
        "env": shipped.harness.env,
        "files": {"agent.yaml": json.dumps(_agent())},
        "build": {"pip": shipped.build.pip},
    }
    # The JSON of texts, lists and booleans is valid TOML, too.
    lines = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in keys.items()]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in table.items())]
    path.write_text("\n".join(lines) + "\n")
    return read_harness(path).harness


def _agent() -> dict[str, dict[str, object]]:
    """The demo's agent file under mini-swe-agent 2's keys."""
    file = yaml.safe_load(RECIPE.read_text())
    agent = file["agent"]
    return {
        "agent": {
            key: agent[key] for key in ("system_template", "instance_template", "step_limit", "cost_limit")
        },
        "model": {
            "action_regex": ACTION,
            "observation_template": agent["action_observation_template"],
            "format_error_template": agent["format_error_template"],
        },
        "environment": {"timeout": file["environment"]["timeout"]},
    }
