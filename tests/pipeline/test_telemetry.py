"""One rollout is one trace, across processes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipeline import telemetry

CHILD = """
import sys
from pipeline.settings import telemetry_settings
from pipeline.telemetry import current_traceparent, span, start_telemetry
provider = start_telemetry(sys.argv[1], telemetry_settings())
with span("outer", traceparent=sys.argv[2], request="r1", attempt=2):
    with span("inner"):
        pass
    print(current_traceparent())
provider.shutdown()
"""


def run_process(service: str, traceparent: str, **environment: str) -> str:
    """One process of ours; returns the trace context it would put into a message."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, service, traceparent],
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def spans(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {(row["service"], row["name"]): row for row in rows}


def test_one_trace_crosses_two_processes(tmp_path: Path) -> None:
    file = tmp_path / "traces" / "spans.jsonl"
    traceparent = run_process("trainer", "", SWERVE_TRACE_FILE=str(file))
    run_process("worker", traceparent, SWERVE_TRACE_FILE=str(file))
    found = spans(file)
    assert len({row["trace_id"] for row in found.values()}) == 1
    trainer, worker = found["trainer", "outer"], found["worker", "outer"]
    assert (trainer["parent_id"], worker["parent_id"]) == (None, trainer["span_id"])
    assert found["worker", "inner"]["parent_id"] == worker["span_id"]
    assert worker["attributes"] == {"swerve.request": "r1", "swerve.attempt": 2}
    assert trainer["started_ns"] < trainer["ended_ns"]


def test_without_a_destination_spans_still_carry_their_context() -> None:
    traceparent = run_process("trainer", "")
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", traceparent)


def test_a_context_that_is_none_begins_a_new_trace(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    run_process("worker", "rubbish", SWERVE_TRACE_FILE=str(file))
    assert spans(file)["worker", "outer"]["parent_id"] is None


RECORDING = """
import sys
from pipeline import telemetry
from pipeline.settings import telemetry_settings
from pipeline.telemetry import inside, record, span, start_telemetry
provider = start_telemetry("trainer", telemetry_settings())
root, step = telemetry.rollout("r1"), telemetry.step("run", 3)
with inside(telemetry.named(root, "attempt")):
    with span("live"):
        pass
record("attempt", 10.0, 12.0, parent=root, own=telemetry.named(root, "attempt"))
record("rollout", 10.0, 15.0, parent="", own=root, links=[step] * 200, named={"gen_ai.tool.name": "bash"}, step=3)
record("wait", 12.0, 11.0, parent=root)
provider.shutdown()
"""


def test_spans_are_written_afterwards_under_the_ids_that_others_know_already(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    environment = os.environ | {"SWERVE_TRACE_FILE": str(file)}
    subprocess.run([sys.executable, "-c", RECORDING], env=environment, check=True)
    found = {name: row for (_, name), row in spans(file).items()}
    root = telemetry.rollout("r1")
    assert (found["rollout"]["trace_id"], found["rollout"]["span_id"]) == telemetry.parts(root)
    assert found["rollout"]["parent_id"] is None
    assert found["rollout"]["attributes"] == {"swerve.step": 3, "gen_ai.tool.name": "bash"}
    assert len(found["rollout"]["links"]) == 200, "more than OpenTelemetry's default of 128"
    assert found["rollout"]["links"][0]["trace_id"] == telemetry.parts(telemetry.step("run", 3))[0]
    assert (found["attempt"]["started_ns"], found["attempt"]["ended_ns"]) == (10_000_000_000, 12_000_000_000)
    assert found["live"]["parent_id"] == found["attempt"]["span_id"]
    assert len({row["trace_id"] for row in found.values()}) == 1


def test_a_wait_that_clocks_make_negative_is_0_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    environment = os.environ | {"SWERVE_TRACE_FILE": str(file)}
    subprocess.run([sys.executable, "-c", RECORDING], env=environment, check=True)
    wait = spans(file)["trainer", "wait"]
    assert wait["started_ns"] == wait["ended_ns"] == 12_000_000_000
    assert wait["attributes"] == {"swerve.clock_skew_s": 1.0}
