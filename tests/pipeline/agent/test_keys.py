"""Every key of an agent file has one fate, and the reason says why."""

from typing import Any

import pytest

from pipeline.agent.config import load_agent
from pipeline.agent.files import merged, to_text
from pipeline.agent.keys import KeyFate, fates
from pipeline.agent.upstream import VERSIONS, flavour_of
from pipeline.errors import RequestError
from tests.pipeline.agent.releases import asked
from tests.workers.agent.fidelity.packages import shipped_files

V1: dict[str, Any] = {
    "agent": {
        "system_template": "Reply with ```bash.",
        "instance_template": "{{task}}",
        "action_observation_template": "{{output.output}}",
    }
}
V2: dict[str, Any] = {
    "agent": {"system_template": "s", "instance_template": "{{task}}"},
    "model": {"observation_template": "{{output.output}}"},
}


def fate(base: dict[str, Any], key: str, value: Any, **swerve: Any) -> KeyFate:
    section, _, name = key.partition(".")
    tree = {**base, section: {**base.get(section, {}), name: value}}
    if swerve:
        tree["swerve"] = swerve
    found = {one.key: one for one in fates(tree, flavour_of(tree))}
    chosen = next((one for full, one in found.items() if full == key or full.startswith(key + ".")), None)
    assert chosen is not None
    if chosen.fate == "refused":
        with pytest.raises(RequestError, match=chosen.key.replace(".", r"\.")):
            load_agent(to_text(tree))
    return chosen


@pytest.mark.parametrize(
    ("base", "key", "value", "expected", "why"),
    [
        (V1, "agent.step_limit", 0.0, "used", "turns"),
        (V1, "agent.cost_limit", 3.0, "without effect", "price"),
        (V1, "agent.mode", "yolo", "without effect", "no person"),
        (V1, "agent.steplimit", 5, "refused", "did you mean step_limit?"),
        (V1, "agent.nonsense", 5, "refused", "mini-swe-agent 1.17 has no such key"),
        (V1, "agent.observation_template", "", "refused", "it belongs under model"),
        (V1, "agent.agent_class", "default", "refused", "has no such key"),
        (V1, "environment.forward_env", ["A"], "used", "worker's process"),
        (V1, "environment.interpreter", ["bash", "-lc"], "used", "handed to"),
        (V1, "environment.cwd", "/testbed", "without effect", "the task's directory"),
        (V1, "environment.environment_class", "dockr", "refused", "did you mean docker?"),
        (V1, "environment.environment_class", "my.own.Environment", "without effect", "sandbox"),
        # Which makes it a file of 2.x.
        (
            V1,
            "model.model_class",
            "litellm_textbased",
            "without effect",
            "text",
        ),
        (V1, "model.model_class", "anthropic", "without effect", "policy is the model"),
        (V1, "model.temperature", 1.0, "refused", "has no such key"),
        (V2, "agent.wall_time_limit_seconds", 60, "used", "wall time"),
        (V2, "agent.format_error_template", "", "without effect", "2.x ignores it too"),
        (V2, "agent.max_iterations", 50, "without effect", "2.x ignores it too: it knows no such key"),
        (V2, "agent.step_limt", 50, "refused", "did you mean step_limit?"),
        (V2, "environment.run_args", ["--rm"], "without effect", "its own limits"),
        (V2, "environment.container_timeout", "2h", "without effect", "its own limits"),
        (V2, "environment.modal_sandbox_kwargs", {}, "without effect", "2.x ignores it too"),
        (V2, "model.action_regex", "<a>(.*?)</a>", "used", "finds the command"),
        (V2, "model.model_class", "anthropic", "refused", "has no 'anthropic'"),
        (V2, "model.cost_tracking", "ignore_errors", "without effect", "price"),
        (V2, "model.model_kwargs", {"temperature": 0.5}, "used", "sampling parameter"),
        (V2, "model.model_kwargs", {"temprature": 0.5}, "refused", "did you mean temperature?"),
        (V2, "model.model_kwargs", {"api_key": "k"}, "without effect", "left out of what travels"),
        (V2, "model.model_kwargs", {"api_base": "http://x"}, "without effect", "where the policy is"),
        (V2, "model.model_kwargs", {"max_tokens": 5, "max_completion_tokens": 6}, "refused", "contradict"),
        (V2, "run.env_startup_command", "true", "used", "before the first turn"),
        (V2, "run.task", "fix it", "without effect", "task file"),
        (V2, "swerve.exakt", True, "refused", "did you mean exact?"),
    ],
)
def test_a_key_has_its_fate_and_the_reason(
    base: dict[str, Any], key: str, value: Any, expected: str, why: str
) -> None:
    found = fate(base, key, value)
    assert (found.fate, why in found.why) == (expected, True), found


def test_exactly_a_key_of_2x_is_refused_in_a_file_of_1x() -> None:
    found = fate(V1, "environment.interpreter", ["bash", "-c"], exact=True)
    assert found.fate == "refused"
    assert fate(V2, "environment.cwd", "/x", exact=True).fate == "used"


@pytest.mark.parametrize(("name", "expected"), [("enviroment", "refused"), ("my_notes", "without effect")])
def test_a_section_that_nobody_knows_is_ignored_but_a_misspelt_one_refused(name: str, expected: str) -> None:
    tree = {**V1, name: {"a": 1}}
    assert fates(tree, flavour_of(tree))[-1].fate == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_every_key_of_every_shipped_file_has_one_fate(version: str) -> None:
    for path in shipped_files(version):
        tree = merged([str(path)])
        found = [one.key for one in fates(tree, flavour_of(tree))]
        assert len(found) == len(set(found))
        assert {key.split(".")[0] for key in found} == set(tree)
        assert all(one.why for one in fates(tree, flavour_of(tree)))


@pytest.mark.parametrize("version", VERSIONS)
def test_no_key_of_upstreams_usual_classes_is_refused(version: Any) -> None:
    classes = asked(version, "classes")
    parts = {
        "agent": "InteractiveAgentConfig",
        "environment": "DockerEnvironmentConfig",
        "model": "LitellmTextbasedModelConfig" if version == "2.4" else "LitellmModelConfig",
    }
    tree = {
        part: {key: "x" if value == {"required": True} else value for key, value in classes[name].items()}
        for part, name in parts.items()
    }
    tree["environment"]["environment_class"] = "docker"
    tree["swerve"] = {"upstream": version, "exact": True}
    assert [one for one in fates(tree, flavour_of(tree)) if one.fate == "refused"] == []
    assert load_agent(to_text(tree)).upstream == version
