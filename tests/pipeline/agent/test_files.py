"""Files and values merged as mini-swe-agent merges them, and what of them travels."""

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeline.agent.config import load_agent
from pipeline.agent.files import merged, recursive_merge, to_text
from pipeline.agent.option import add_agent_options, agent_digest, read_agent, sampling_for
from pipeline.errors import RequestError
from pipeline.request import Sampling
from tests.pipeline.agent.releases import asked
from tests.workers.agent.fidelity.packages import directory_of

BASE = """
agent:
  system_template: "Reply with ```bash"
  instance_template: "{{task}}"
  action_observation_template: "{{output.output}}"
  step_limit: 0.
environment: {env: {A: "1", B: "2"}, timeout: 60}
model: {model_kwargs: {temperature: 0.0, drop_params: true}}
"""
OVERLAY = "environment: {env: {B: '3'}, run_args: [--rm]}\nmodel: {model_name: x}\n"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "a.yaml").write_text(BASE)
    (tmp_path / "b.yaml").write_text(OVERLAY)
    return [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]


@pytest.mark.parametrize(
    "values",
    [
        [],
        ["agent.step_limit=50"],
        ["model.model_kwargs.temperature=0.7", 'model.model_kwargs.stop=["a", "b"]'],
        ["environment.env.A=text with = in it", 'environment.env.C="5"'],
        ["agent.instance_template=say {{task}}", "environment.env=null"],
        ["model.model_kwargs=1", "model.model_kwargs.temperature=1"],
        ["run.a.b.c=true", "x=y"],
    ],
)
def test_several_files_and_values_are_merged_as_upstream_merges_them(
    files: list[str], values: list[str]
) -> None:
    specs = [*files, *values]
    assert merged(specs) == asked("2.4", "config_of", json.dumps(specs))


def test_the_merged_agent_is_the_one_that_is_used(files: list[str]) -> None:
    agent = load_agent(read_agent([*files, "agent.step_limit=50", "model.model_kwargs.temperature=0.7"]))
    assert agent.step_limit == 50
    assert agent.env == {"A": "1", "B": "3"}
    assert agent.sampling.temperature == 0.7
    assert agent.command_s == 60


def test_a_name_without_its_ending_is_completed(files: list[str]) -> None:
    assert merged([files[0].removesuffix(".yaml")]) == yaml.safe_load(BASE)


@pytest.mark.parametrize(
    ("specs", "complaint"),
    [
        (["absent.yaml"], "absent.yaml: No such file"),
        (["agent..x=1"], "an empty key"),
        (["=1"], "an empty key"),
        (["agent.step_limit=1"], "give the agent's YAML file"),
    ],
)
def test_a_spec_that_cannot_be_read_is_named(specs: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_agent(specs)


@pytest.mark.parametrize("text", ["- a list", "just words", "a: [", "\tx: 1"])
def test_a_file_that_is_no_agent_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(text)
    with pytest.raises((ValueError, RequestError), match=r"agent\.yaml") as caught:
        read_agent([str(file)])
    assert "\n" not in str(caught.value)


def test_no_password_travels(files: list[str]) -> None:
    secrets = [
        "model.model_kwargs.api_key=hidden",
        'model.model_kwargs.extra_headers={"Authorization": "hidden"}',
        'model.model_kwargs.extra_body={"api_key": "hidden", "kept": 1}',
    ]
    text = read_agent([*files, *secrets])
    assert "hidden" not in text
    assert yaml.safe_load(text)["model"]["model_kwargs"]["extra_body"] == {"kept": 1}


def test_the_digest_is_of_the_files_and_not_of_the_machine(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = agent_digest(read_agent(files))
    monkeypatch.setattr("platform.uname", lambda: __import__("collections").namedtuple("U", "node")("other"))
    assert agent_digest(read_agent(files)) == here
    assert agent_digest(read_agent([*files, "agent.step_limit=9"])) != here
    assert agent_digest(read_agent(files, exact=True)) != here


def test_sampling_is_the_files_where_it_says_something() -> None:
    said = BASE.replace("drop_params: true", "top_p: 0.9, max_tokens: 77")
    assert sampling_for(said, Sampling(temperature=1.0)) == Sampling(
        temperature=0.0, top_p=0.9, max_new_tokens=77
    )
    silent = BASE.replace("temperature: 0.0, ", "")
    assert sampling_for(silent, Sampling(temperature=0.3)) == Sampling(temperature=0.3)


@pytest.mark.parametrize(
    ("words", "agent"),
    [([], ["ours.yaml"]), (["--agent", "a"], ["a"]), (["--agent", "a", "--agent", "b.c=1"], ["a", "b.c=1"])],
)
def test_the_option_may_be_repeated_and_replaces_its_default(words: list[str], agent: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_agent_options(parser, default=Path("ours.yaml"))
    assert parser.parse_args(words).agent == agent
    assert parser.parse_args(words).exact is False


def test_an_agent_without_a_default_has_to_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_agent_options(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([])
    assert "--agent" in capsys.readouterr().err


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@pytest.mark.slow
@given(st.dictionaries(st.text(), TREES))
def test_any_tree_reads_again_as_it_was_written(tree: dict[str, Any]) -> None:
    assert yaml.safe_load(to_text(tree)) == tree


@pytest.mark.slow
@given(st.dictionaries(st.text(), TREES), st.dictionaries(st.text(), TREES))
def test_a_merged_tree_has_all_of_the_second(first: dict[str, Any], second: dict[str, Any]) -> None:
    result = recursive_merge(first, second)
    assert recursive_merge(result, second) == result
    assert result.keys() == first.keys() | second.keys()
    assert all(result[key] == first[key] for key in first.keys() - second.keys())


def test_the_releases_are_installed() -> None:
    assert (directory_of("1.12") / "minisweagent").is_dir()


KEYS = st.sampled_from(
    [
        *("system_template", "instance_template", "action_observation_template", "observation_template"),
        *("action_regex", "step_limit", "agent_class", "environment_class", "model_class", "interpreter"),
        *("env", "forward_env", "cwd", "timeout", "model_kwargs", "max_tokens", "temperature", "image"),
        *("env_startup_command", "exact", "upstream", "dialect", "reminders", "facts"),
    ]
)
SECTIONS = st.sampled_from(["agent", "environment", "model", "run", "swerve", "x"])
VALUES = st.recursive(
    LEAVES | st.sampled_from(["{{task}}", "{{x}}", "(", "text", "2.4", "docker"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@given(
    st.dictionaries(SECTIONS, st.dictionaries(KEYS | st.integers(), VALUES, max_size=5) | VALUES, max_size=5)
)
def test_any_tree_is_an_agent_or_refused_by_name(tree: dict[str, Any]) -> None:
    with contextlib.suppress(RequestError):  # nothing else is raised
        load_agent(to_text(tree))
