"""What tracing costs: CPU time spent in spans against the time of the step, or of the rollout, that they describe.

The shape is the demonstration's: a step of 37 s settles 82 rollouts, of which it trains 32; a rollout has 5 turns in 9 s. All rows of
steps are shown to the trainer's sink of traces; a rollout's spans are made as a worker makes them. CPU time of the exporting
thread counts. Each mode runs in a process of its own. `python -m benchmarks.tracing [--json] [--short]`
"""

import asyncio
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.report import Comparison, main
from pipeline.journal.rows import EpisodeRow, EpisodeStamps, PublicationRow, StepRow
from pipeline.settings import TelemetrySettings
from pipeline.telemetry import record, span, start_telemetry
from trainer.records.traces import TraceSink

STEP_S, NUM_SETTLED, NUM_TRAINED = 37.0, 82, 32
ROLLOUT_S, NUM_TURNS = 9.0, 5
NOWHERE, FILE, ENDPOINT = "spans go nowhere", "spans go to a file", "spans go to an OTLP endpoint"
NUM_LONG, NUM_SHORT = 200, 5  # steps, and as many rollouts


async def tracing(short: bool) -> list[Comparison]:
    found: list[Comparison] = []
    for mode in (NOWHERE, FILE, ENDPOINT):
        step_s, rollout_s = await _measured(mode, NUM_SHORT if short else NUM_LONG)
        found.append(_compared(step_s, STEP_S, f"s of the trainer's CPU a step, {mode}", "the step's time"))
        found.append(
            _compared(rollout_s, ROLLOUT_S, f"s of a worker's CPU a rollout, {mode}", "the rollout's time")
        )
    return found


def _compared(ours: float, rival: float, unit: str, rival_name: str) -> Comparison:
    return Comparison("tracing", ours=ours, rival=rival, rival_name=rival_name, unit=unit)


async def _measured(mode: str, number: int) -> tuple[float, float]:
    """Measures in a child process, because a process has one destination of spans."""
    with _Collector() as url, tempfile.TemporaryDirectory() as folder:
        words = (sys.executable, "-m", "benchmarks.tracing", "--child", mode, str(number), url, folder)
        child = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
        out, _ = await child.communicate()
        assert child.returncode == 0
    step_s, rollout_s = json.loads(out)
    return step_s, rollout_s


class _Collector:
    """Takes everything that is posted to it; its own CPU time is this process's."""

    def __enter__(self) -> str:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Taking)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Taking(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""


def child(mode: str, number: int, url: str, folder: str) -> None:
    """Print the CPU seconds of a step and of a rollout."""
    settings = TelemetrySettings(
        otlp_endpoint=url if mode == ENDPOINT else None,
        trace_file=Path(folder) / "spans.jsonl" if mode == FILE else None,
    )
    provider = start_telemetry("benchmark", settings)
    sink = TraceSink("bench") if settings.is_tracing else None  # as trainer/records/sinks.py decides
    step_s = _cpu_s(lambda step: _step(sink, step), number, provider.force_flush)
    rollout_s = _cpu_s(lambda _: _rollout(), number, provider.force_flush)
    provider.shutdown()
    print(json.dumps([step_s, rollout_s]))


def _cpu_s(work: Callable[[int], object], number: int, flush: Callable[[], object]) -> float:
    """CPU seconds of one call of `work`, its exporting included."""
    began_s = time.process_time()
    for one in range(1, number + 1):
        work(one)
        flush()
    return (time.process_time() - began_s) / number


def _step(sink: TraceSink | None, number: int) -> None:
    """The rows of a step as a run writes them."""
    at = 1e9 + STEP_S * number
    ids = [f"{number}-{member}" for member in range(NUM_SETTLED)]
    if sink is None:
        return
    sink.show(PublicationRow(version=number, step=number, num_bytes=1, began_at=at + 5, at=at + 6))
    sink.show(_step_row(number, tuple(ids[:NUM_TRAINED]), at))
    stamps = EpisodeStamps(
        published_at=at - 9, read_at=at - 8, joined_at=at - 7, closed_at=at - 2, released_at=at - 2
    )
    for member, request_id in enumerate(ids):
        sink.show(
            EpisodeRow(
                request_id=request_id,
                group_id="g00000000",
                task_id="demo:task",
                purpose="train",
                member=member,
                group_size=8,
                fate="trained" if member < NUM_TRAINED else "zero_variance",
                attempt=1,
                worker="worker/1",
                outcome="submitted",
                reward=1.0,
                enqueued_at=at - 30,
                claimed_at=at - 20,
                finished_at=at - 10,
                at=at + 7,
                stamps=stamps,
            )
        )


def _step_row(number: int, request_ids: tuple[str, ...], at: float) -> StepRow:
    return StepRow(
        step=number,
        version=number - 1,
        loss=0.0,
        grad_norm=1.0,
        lr=1e-4,
        reward_mean=0.5,
        num_trajectories=len(request_ids),
        request_ids=request_ids,
        num_trained_tokens=1,
        num_unique_sampled_tokens=1,
        began_at=at,
        trained_at=at + 5,
        at=at + 7,
    )


def _rollout() -> None:
    """Makes as many spans as a worker makes of a rollout that is graded and controlled."""
    now = time.time()
    with span("agent"), span("container"):
        for name in ("container open", "set up", "container close"):
            with span(name):
                pass
        for number in range(NUM_TURNS):
            with span("turn", number=number):
                for name in ("render prompt", "read reply", "read commands", "command"):
                    with span(name):
                        pass
                record("engine wait", now, now + 1)
                record("generate", now + 1, now + 2, version=1)
    with span("grade"):
        for _ in ("run", "control"):
            with span("container"):
                for name in (
                    "container open",
                    "set up",
                    "apply patch",
                    "place tests",
                    "run tests",
                    "container close",
                ):
                    with span(name):
                        pass
    for name in ("claim", "queue wait", "rollout attempt"):
        record(name, now, now + 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
    else:
        sys.exit(main("tracing", __doc__, tracing))
