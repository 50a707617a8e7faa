"""Every YAML that the releases of mini-swe-agent ship, and those of the older systems: each loads, or fails for upstream too."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.agent.config import load_agent
from pipeline.agent.files import merged, pinned, to_text
from pipeline.agent.keys import fates
from pipeline.agent.option import read_agent
from pipeline.agent.upstream import VERSIONS, flavour_of
from pipeline.errors import RequestError
from tests.pipeline.agent.releases import asked
from tests.workers.agent.fidelity.packages import directory_of, shipped_files

SHIPPED = [(version, path) for version in VERSIONS for path in shipped_files(version)]
IDS = [f"{version}-{path.stem}" for version, path in SHIPPED]
LIVE: dict[str, Any] = {
    "task": "it {{fails}}",
    "cwd": "/testbed",
    "timeout": 60,
    "step_limit": 10,
    "n_model_calls": 0,
    "model_cost": 0.0,
    "elapsed_seconds": 1.5,
    "image": "image",
}
FAIL = {
    ("1.12", "swebench_roulette"): r"agent\.instance_template: unknown variable 'working_dir'",
    ("2.4", "swebench_modal"): r"agent\.system_template is missing",  # to be merged with another
}
TOOL_CALLS = {"mini", "swebench", "programbench"}  # of 2.x
# A file of the older systems' form: their keys, and their limits.
OLDER_SYSTEMS = """
agent:
  system_template: "You are a helpful assistant. Reply with one ```bash block."
  instance_template: "<pr_description>{{task}}</pr_description>"
  action_observation_template: |
    <returncode>{{output.returncode}}</returncode>
    <output>{{ output.output -}}</output>
  format_error_template: "EXACTLY ONE action, found {{actions|length}} actions."
  step_limit: 20
  cost_limit: 3.
environment:
  cwd: "/testbed"
  timeout: 180
  pull_timeout: 1200
  env: {PAGER: cat, TQDM_DISABLE: '1'}
  environment_class: docker
  executable: podman
model:
  model_name: ""
  model_kwargs: {drop_params: true}
"""


def exactly(version: str, path: Path) -> str:
    tree = pinned(merged([str(path)]))
    tree["swerve"] |= {"exact": True, "upstream": version}
    return to_text(tree)


@pytest.mark.slow_but_for("1.12-default", "1.12-swebench")
@pytest.mark.parametrize(("version", "path"), SHIPPED, ids=IDS)
def test_a_shipped_file_opens_an_episode_as_upstream_does_or_fails_as_upstream_does(
    version: str, path: Path
) -> None:
    found = asked(version, "opening", json.dumps(yaml.safe_load(path.read_text())))
    complaint = FAIL.get((version, path.stem))
    if complaint is not None:
        assert "error" in found
        with pytest.raises(RequestError, match=complaint):
            load_agent(exactly(version, path))
        return
    agent = load_agent(exactly(version, path))
    assert list(agent.opening(LIVE)) == found["messages"]
    assert agent.dialect == ("tool_calls" if version == "2.4" and path.stem in TOOL_CALLS else "text")


@pytest.mark.parametrize(("version", "path"), SHIPPED, ids=IDS)
def test_a_shipped_file_tells_its_generation_by_itself(version: str, path: Path) -> None:
    flavour = flavour_of(merged([str(path)]))
    assert (flavour.version == "2.4") == (version == "2.4")
    assert not [one for one in fates(merged([str(path)]), flavour) if one.fate == "refused"]


@pytest.mark.parametrize(("version", "path"), SHIPPED, ids=IDS)
def test_a_shipped_file_reads_the_same_after_it_was_written_into_a_request(version: str, path: Path) -> None:
    tree = merged([str(path)])
    assert yaml.safe_load(to_text(tree)) == tree


def test_an_overlay_of_models_and_places_is_merged_with_a_file_of_prompts() -> None:
    config = directory_of("2.4") / "minisweagent" / "config" / "benchmarks"
    agent = load_agent(read_agent([str(config / "swebench.yaml"), str(config / "swebench_modal.yaml")]))
    assert agent.dialect == "tool_calls"
    assert agent.step_limit == 250


@pytest.mark.parametrize("executable", ["podman", "docker"])
def test_the_older_systems_files_load_and_their_reminders_are_a_key(executable: str) -> None:
    text = OLDER_SYSTEMS.replace("podman", executable)
    agent = load_agent(text)
    assert (agent.upstream, agent.dialect) == ("1.17", "text")
    assert (agent.step_limit, agent.command_s, agent.cwd) == (20, 180, "/testbed")
    assert agent.reminder(5) == ""
    reminding = load_agent(text + "swerve: {reminders: true}\n")
    assert reminding.reminder(5) == "\nREMINDER: You have 5 turns left to arrive at the solution."
    assert reminding.reminder(1) == "\nREMINDER: You only have 1 turn left. Please provide the final answer"
    assert reminding.reminder(0) == ""


@pytest.mark.parametrize("version", ["1.12", "1.17"])
def test_an_empty_agent_of_1x_has_the_defaults_of_its_release(version: str) -> None:
    found = asked(version, "opening", json.dumps({"agent": {}}))
    agent = load_agent(to_text({"agent": {}, "swerve": {"upstream": version, "exact": True}}))
    assert list(agent.opening(LIVE)) == found["messages"]
    assert agent.interpreter == ("/bin/sh", "-c")


def test_a_variable_of_the_environment_is_pinned_only_if_a_prompt_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDITOR_OF_CHOICE", "ed")
    file = tmp_path / "agent.yaml"
    file.write_text('agent: {system_template: "Use {{EDITOR_OF_CHOICE}} on {{node}}."}\n')
    text = read_agent([str(file)])
    monkeypatch.delenv("EDITOR_OF_CHOICE")
    load_agent.cache_clear()
    assert load_agent(text).opening(LIVE)[0] == f"Use ed on {os.uname().nodename}."
    assert "HOME" not in yaml.safe_load(text)["swerve"]["facts"]
