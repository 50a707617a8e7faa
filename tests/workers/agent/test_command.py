"""`python -m workers.agent FILE…` says what becomes of each key."""

import json
from pathlib import Path

import pytest

from benchmarks.scripted_fleet import task
from pipeline.taskfile import write_tasks
from tests.workers.agent.episode import AGENT
from workers.agent.__main__ import main


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "agent.yaml"
    path.write_text(AGENT + "  cost_limit: 3.\n")
    return str(path)


def test_each_key_is_a_row_with_its_fate_and_the_reason(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([file, "agent.step_limit=5"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.startswith("mini-swe-agent 1.17: behaves as it")
    assert "commands are read from text" in heading
    fates = {row.split()[0]: " ".join(row.split()[1:3]) for row in rows}
    assert fates["agent.cost_limit"] == "without effect"
    assert fates["agent.step_limit"].startswith("used")


def test_a_refused_key_is_a_row_and_the_error(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([file, "--exact", "agent.steplimit=5"]) == 2
    written = capsys.readouterr()
    assert "agent.steplimit" in written.out
    assert written.err.strip().endswith("did you mean step_limit?")
    assert written.err.count("\n") == 1


def test_an_example_and_its_warnings_are_shown_for_a_task(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tasks(tmp_path / "tasks.jsonl", [task("t0", problem="it {{fails}}")])
    assert main([file, "environment.cwd=/testbed", "--tasks", str(tmp_path / "tasks.jsonl")]) == 0
    out = capsys.readouterr().out
    assert "warning: environment.cwd is /testbed, the directory of task t0 is /w" in out
    assert "Fix this: it {{fails}}" in out


def test_the_merged_file_is_one_that_loads_again(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([file, "agent.step_limit=5", "--merged"]) == 0
    again = tmp_path / "merged.yaml"
    again.write_text(capsys.readouterr().out)
    assert main([str(again), "--json"]) == 0
    found = {row["key"]: row["fate"] for row in json.loads(capsys.readouterr().out)}
    assert found["agent.step_limit"] == "used"


@pytest.mark.parametrize("name", ["absent.yaml", "../absent"])
def test_a_file_that_cannot_be_read_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert capsys.readouterr().err.startswith(f"error: {name}")


@pytest.mark.parametrize("text", ["", "agent: {'fo\\no': 1}\n", 'agent: {"fo\\no": 1}\n'])
def test_a_file_without_keys_or_with_a_line_end_in_one_is_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "agent.yaml").write_text(text)
    assert main([str(tmp_path / "agent.yaml")]) == 2
    written = capsys.readouterr()
    assert written.err.count("\n") == 1
    assert "max()" not in written.err
    assert written.out.count("\n") <= 2
