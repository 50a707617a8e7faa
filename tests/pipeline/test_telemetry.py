"""One rollout is one trace, across processes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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
