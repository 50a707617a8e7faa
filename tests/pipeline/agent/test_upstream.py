"""Our tables of mini-swe-agent's configuration classes, against the classes of the real releases."""

from collections.abc import Mapping
from typing import Any

import pytest

from pipeline.agent.upstream import (
    AGENT,
    BASH_TOOL,
    ENVIRONMENTS,
    INTERACTIVE,
    MODEL_CLASSES,
    MODELS,
    VERSIONS,
)
from tests.pipeline.agent.releases import asked

ALL = pytest.mark.parametrize("version", VERSIONS)


def plain(defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {key: dict(value) if isinstance(value, Mapping) else value for key, value in defaults.items()}


@ALL
def test_the_agents_keys_and_defaults_are_upstreams(version: Any) -> None:
    classes = asked(version, "classes")
    assert plain(AGENT[version]) == classes["AgentConfig"]
    assert plain({**AGENT[version], **INTERACTIVE}) == classes["InteractiveAgentConfig"]


@ALL
def test_the_environments_keys_and_defaults_are_upstreams(version: Any) -> None:
    def name(config_class: str) -> str:
        words = config_class.removesuffix("EnvironmentConfig")
        return "".join(f"_{char.lower()}" if char.isupper() else char for char in words).lstrip("_")

    classes = asked(version, "classes")
    found = {name(one): fields for one, fields in classes.items() if one.endswith("EnvironmentConfig")}
    found["bubblewrap"]["wrapper_args"] = []  # thirty words, which ours leaves out
    assert {key: plain(value) for key, value in ENVIRONMENTS[version].items()} == found
    assert sorted(ENVIRONMENTS[version]) == asked(version, "class_names")["environments"]


@ALL
def test_the_models_keys_and_defaults_are_upstreams(version: Any) -> None:
    classes = asked(version, "classes")
    found = {
        name.removesuffix("ModelConfig"): fields
        for name, fields in classes.items()
        if name.endswith("ModelConfig")
    }
    for name in ("DeterministicToolcall", "DeterministicResponseAPIToolcall"):  # no name of model_class
        found.pop(name, None)
    for fields in found.values():
        fields.pop("set_cache_control", None)  # AnthropicModel's is another default of a key without effect
    ours = {name: plain(keys) for name, keys in MODELS[version].items()}
    for keys in ours.values():
        keys.pop("set_cache_control", None)
    if version == "1.12":
        ours.pop("Anthropic")  # LitellmModel's own class
    assert ours == found


@ALL
def test_the_names_of_model_classes_are_upstreams(version: Any) -> None:
    found = asked(version, "class_names")["models"]
    assert {name: f"{ours}Model" for name, ours in MODEL_CLASSES[version].items()} == found


def test_the_tool_is_upstreams() -> None:
    assert asked("2.4", "constants") == BASH_TOOL
