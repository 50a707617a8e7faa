"""The judge of a run on one machine: which one the recipe wants, and what its processes are told."""

import argparse
import json
import os
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from infra.local import commands
from infra.local.__main__ import wait_for_engine
from infra.local.commands import parse_arguments
from infra.processes import Supervisor
from tests.conftest import free_ports
from tests.workers.judge.reward_checkpoint import write_reward_checkpoint


def arguments(tmp_path: Path, recipe: str, *more: str) -> argparse.Namespace:
    (tmp_path / "recipe.toml").write_text(recipe)
    return parse_arguments(None, [str(tmp_path / "recipe.toml"), f"--run-dir={tmp_path / 'run'}", *more])


RULE = "[judge]\nmethod = 'rule'\nname = 'commands'\n"


@pytest.mark.parametrize(
    ("recipe", "flags", "is_on"),
    [
        ("", [], False),
        ("[judge]\nmethod = 'none'\n", [], False),
        (RULE, [], True),
        (RULE, ["--set", "judge.method=none"], False),
        ("", ["--set=judge.method=rule", "--resume", "--set", "judge.name=commands"], True),
        ("", ["--set", 'judge.method="function"'], True),
        ("", ["--set", "learner.lr=1e-6"], False),
    ],
)
def test_a_judge_runs_if_the_recipe_with_the_trainers_overrides_names_one(
    tmp_path: Path, recipe: str, flags: list[str], is_on: bool
) -> None:
    judge = commands.wanted_judge(arguments(tmp_path, recipe, "--judges=2", "--", *flags))
    assert (judge is not None) == is_on
    if judge is not None:
        assert (judge.num_processes, judge.model) == (2, None)


def test_a_judge_behind_an_endpoint_needs_no_engine_of_ours(tmp_path: Path) -> None:
    recipe = "[judge]\nmethod = 'votes'\nendpoint = {api_base = 'http://judge/v1', model = 'judge'}\n"
    judge = commands.wanted_judge(arguments(tmp_path, recipe))
    assert judge is not None
    assert judge.model is None
    flags = ["--set", "judge.method=votes", "--set", "judge.endpoint.api_base=http://judge/v1"]
    assert commands.wanted_judge(arguments(tmp_path, "", "--", *flags)) == judge


def test_a_judge_that_is_a_model_gets_an_engine_and_a_router_of_its_own(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERVE_JUDGE_NAME", "of another process")
    recipe = f"[judge]\nmethod = 'votes'\ntokenizer = '{os.path.relpath(tiny_model, tmp_path)}'\n"
    given = arguments(tmp_path, recipe, "--judge-router-port=4000", "--judge-engine-port=4001", "--judges=2")
    judge = commands.wanted_judge(given)
    assert judge is not None
    assert judge.model == tiny_model.resolve()
    engine, router = commands.judge_serving(given, judge)
    assert f"--model={tiny_model.resolve()}" in engine.command()
    assert "--port=4001" in engine.command()
    assert {"--port=4000", "--engine=http://127.0.0.1:4001"} <= {*router.command()}
    first, second = commands.judges(given, judge)
    assert [first.name, second.name] == ["judge-1", "judge-2"]
    assert first.environment["SWERVE_JUDGE_ROUTER_URL"] == "http://127.0.0.1:4000"
    assert "SWERVE_JUDGE_NAME" not in first.environment


def test_a_judge_that_is_a_language_model_is_served_as_one_by_either_method(
    tmp_path: Path, tiny_model: Path
) -> None:
    for method in ("votes", "reward_model", "teacher"):
        given = arguments(tmp_path, f"[judge]\nmethod = '{method}'\ntokenizer = '{tiny_model}'\n")
        judge = commands.wanted_judge(given)
        assert judge is not None
        engine, _ = commands.judge_serving(given, judge)
        assert "--is-embedding" not in engine.command()


def test_a_model_with_a_scalar_output_cannot_vote(tmp_path: Path) -> None:
    model = write_reward_checkpoint(tmp_path / "model")
    given = arguments(tmp_path, f"[judge]\nmethod = 'votes'\ntokenizer = '{model}'\n")
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification, .* cannot vote; set judge.method"):
        commands.wanted_judge(given)


def test_a_model_with_a_scalar_output_cannot_teach(tmp_path: Path) -> None:
    model = write_reward_checkpoint(tmp_path / "model")
    given = arguments(tmp_path, f"[judge]\nmethod = 'teacher'\ntokenizer = '{model}'\n")
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification, .* cannot teach; set judge.method"):
        commands.wanted_judge(given)


@pytest.mark.slow
def test_a_judge_with_a_scalar_output_gets_an_engine_that_returns_it(tmp_path: Path) -> None:
    model = write_reward_checkpoint(tmp_path / "model")
    engine_port, router_port = free_ports(2)
    given = arguments(
        tmp_path,
        f"[judge]\nmethod = 'reward_model'\ntokenizer = '{model}'\n",
        f"--judge-engine-port={engine_port}",
        f"--judge-router-port={router_port}",
    )
    judge = commands.wanted_judge(given)
    assert judge is not None
    supervisor = Supervisor(print)
    try:
        for process in commands.judge_serving(given, judge):
            assert ("--is-embedding" in process.command()) == (process.name == "judge-engine")
            supervisor.start(process)
        wait_for_engine(supervisor, "judge-engine", router_port)
        for port in (engine_port, router_port):
            body = {"model": str(model), "input": [5, 6, 7], "encoding_format": "float"}
            (one,) = asked(f"http://127.0.0.1:{port}/v1/embeddings", body)["data"]
            assert len(one["embedding"]) == 1
    finally:
        supervisor.stop()


def asked(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_a_judges_model_that_is_missing_is_named(tmp_path: Path) -> None:
    given = arguments(tmp_path, "[judge]\nmethod = 'votes'\ntokenizer = 'nowhere'\n")
    with pytest.raises(
        ValueError, match=r"judge.tokenizer in .*recipe.toml: .*nowhere: there is no such directory"
    ):
        commands.wanted_judge(given)


def test_the_ports_of_a_judges_model_are_checked(tmp_path: Path, tiny_model: Path) -> None:
    engine, router = free_ports(2)
    flags = [f"--judge-engine-port={engine}", f"--judge-router-port={router}"]
    given = arguments(tmp_path, f"[judge]\nmethod = 'votes'\ntokenizer = '{tiny_model}'\n", *flags)
    judge = commands.wanted_judge(given)
    assert judge is not None
    commands.check_judge_ports(given, judge)
    with socket.create_server(("127.0.0.1", engine)), pytest.raises(ValueError, match="--judge-engine-port"):
        commands.check_judge_ports(given, judge)
