"""`python -m pipeline trace`: a tree from files of spans, without Redis."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline import telemetry
from pipeline.__main__ import main
from pipeline.cli.trace import read_spans, trees

ROOT = telemetry.rollout("r1")
QUEUE = telemetry.queue_wait(ROOT, "rollout")
ATTEMPT = telemetry.attempt(ROOT, "rollout", 2)
STEP = telemetry.step("run", 7)


def line(name: str, own: str, above: str | None, start_s: float, end_s: float, **more: Any) -> str:
    trace_id, span_id = telemetry.parts(own)
    row = {
        "name": name,
        "service": "test",
        "trace_id": trace_id,
        "span_id": span_id,
        "parent_id": None if above is None else telemetry.parts(above)[1],
        "started_ns": int(start_s * 1e9),
        "ended_ns": int(end_s * 1e9),
        "status": "UNSET",
        "attributes": {},
        "links": [],
    }
    return json.dumps(row | more) + "\n"


def link(to: str) -> list[dict[str, str]]:
    trace_id, span_id = telemetry.parts(to)
    return [{"trace_id": trace_id, "span_id": span_id}]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A rollout whose first attempt was returned, and of whose ten seconds two are in no child of its root."""
    traces = tmp_path / "traces"
    traces.mkdir()
    requests = {"swerve.request": "r1"}
    (traces / "trainer.jsonl").write_text(
        line("rollout", ROOT, None, 100, 105, attributes=requests)  # as an earlier process wrote it
        + line("rollout", ROOT, None, 100, 110, attributes=requests)
        + line("trained", telemetry.named(ROOT, "trained"), ROOT, 108, 110, links=link(STEP))
        + line("step", STEP, None, 108, 110, links=link(ROOT))
        + line("rollout", telemetry.rollout("another"), None, 100, 101)
        + '{"name": "cut sho'
    )
    (traces / "worker.jsonl").write_text(
        line("queue wait", QUEUE, ROOT, 100, 104)
        + line("rollout attempt", telemetry.attempt(ROOT, "rollout", 1), QUEUE, 101, 102)
        + line("rollout attempt", ATTEMPT, ROOT, 104, 106, status="ERROR")
    )
    return tmp_path


def test_the_tree_says_what_lasted_how_long_and_what_is_in_no_span(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "r1", "--run-dir", str(file)]) == 0
    said = [one.split("  link=")[0].rstrip() for one in capsys.readouterr().out.splitlines()[1:]]
    assert said == [
        "     0.000    10.000  rollout  request=r1",
        "               2.000    (in no span)",
        "     0.000     4.000    queue wait",
        "     1.000     1.000      rollout attempt",
        "     4.000     2.000    rollout attempt",
        "     8.000     2.000    trained",
    ]


def test_a_step_names_the_rollouts_that_it_trained(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(one) for one in sorted((file / "traces").iterdir())]
    assert main(["trace", "run", "--step", "7", "--json", "--file", *files]) == 0
    (step,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (step["name"], step["requests"]) == ("step", ["r1"])


def test_children_that_overlap_are_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    path.write_text(
        line("rollout", ROOT, None, 0, 10)
        + line("a", telemetry.named(ROOT, "a"), ROOT, 1, 5)
        + line("b", telemetry.named(ROOT, "b"), ROOT, 2, 4)
        + line("c", telemetry.named(ROOT, "c"), ROOT, 6, 12)
    )
    (root,) = trees(read_spans([path], telemetry.parts(ROOT)[0]))
    assert (root.uncovered_s, root.children_s) == (2, 12)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["r2", "--run-dir", "."], "no file of spans"),
        (["r1"], "no file of spans: name some with --file"),
        (["r1", "--file", "missing.jsonl"], "missing.jsonl is not a file"),
    ],
)
def test_what_is_not_there_is_one_line_and_misuse(words: list[str], complaint: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeline", "trace", *words]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_unknown_request_is_said_with_the_files_that_were_read(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "r9", "--run-dir", str(file)]) == 2
    assert "no span of request r9 is in" in capsys.readouterr().err
