"""What a process measures is pushed over OTLP and served to Prometheus, or goes nowhere at no cost."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from tests.conftest import free_ports
from tests.pipeline.scraping import scraped, values

CHILD = """
import sys
from pipeline.telemetry import exported_metrics, meter
from pipeline.settings import metrics_settings, telemetry_settings
from pipeline.telemetry import span, start_telemetry
rounds = meter().create_counter("swerve.test.rounds", unit="{round}")
start_telemetry("worker", telemetry_settings())
with exported_metrics("worker", metrics_settings(), run="run-1"):
    rounds.add(2, {"swerve.phase": "agent"})
    meter().create_histogram("swerve.test.duration", unit="s").record(0.5)
    with span("claim") as current:
        current.set_attribute("swerve.outcome", "submitted")
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def child(**environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has measured something and waits until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()
        yield process


def test_prometheus_reads_names_with_units_and_labels_of_the_process() -> None:
    (port,) = free_ports(1)
    with child(SWERVE_METRICS_PORT=str(port)):
        found = scraped(f"http://127.0.0.1:{port}/metrics")
    mine = {"service_name": "worker", "swerve_run": "run-1"}
    assert values(found, "swerve_test_rounds_total", **mine, swerve_phase="agent") == [2]
    assert values(found, "swerve_test_duration_seconds_sum", **mine) == [0.5]
    (lasted,) = (one for one in found if one.name == "swerve_span_duration_seconds_count")
    assert (lasted.labels, lasted.value) == (
        mine | {"swerve_span": "claim", "swerve_outcome": "submitted"},
        1,
    )
    assert min(values(found, "process_memory_usage_bytes", **mine)) > 1e6
    assert len(values(found, "process_cpu_time_seconds_total", **mine)) == 1


@pytest.mark.slow
def test_processes_with_the_same_setting_take_one_port_after_the_other() -> None:
    (port,) = free_ports(1)
    with child(SWERVE_METRICS_PORT=str(port)), child(SWERVE_METRICS_PORT=str(port)):
        for each in (port, port + 1):
            assert values(scraped(f"http://127.0.0.1:{each}/metrics"), "swerve_test_rounds_total") == [2]


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"SWERVE_METRICS_PORT": "many"}, "SWERVE_METRICS_PORT='many': give a port from 1 to 65535"),
        ({"SWERVE_METRICS_PORT": "70000"}, "SWERVE_METRICS_PORT='70000': give a port from 1 to 65535"),
        (
            {"SWERVE_METRICS_PORT": "29464", "SWERVE_METRICS_HOST": "192.0.2.1"},
            "SWERVE_METRICS_HOST='192.0.2.1', SWERVE_METRICS_PORT=29464: ",
        ),
        ({"SWERVE_OTLP_METRICS": "no"}, "SWERVE_OTLP_METRICS='no': give 0 to push no metrics, or 1"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(variables: dict[str, str], complaint: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "workers.judge"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(complaint)


class Collector(BaseHTTPRequestHandler):
    """Notes what is pushed to it."""

    received: tuple[list[str], list[ExportMetricsServiceRequest]]

    def do_POST(self) -> None:
        paths, pushes = self.received
        data = self.rfile.read(int(self.headers["Content-Length"]))
        paths.append(self.path)
        if self.path == "/v1/metrics":
            pushes.append(ExportMetricsServiceRequest.FromString(data))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def collector() -> Iterator[tuple[str, list[str], list[ExportMetricsServiceRequest]]]:
    """Its address, the paths that were posted to, and the pushes of metrics."""
    paths, pushes = list[str](), list[ExportMetricsServiceRequest]()
    handler = type("Handler", (Collector,), {"received": (paths, pushes)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}", paths, pushes
        server.shutdown()
        serving.join()


def test_what_was_measured_is_pushed_at_the_end_at_the_latest() -> None:
    with collector() as (endpoint, paths, pushes), child(SWERVE_OTLP_ENDPOINT=endpoint) as process:
        process.communicate()
    assert set(paths) == {"/v1/metrics", "/v1/traces"}
    (resource,) = pushes[-1].resource_metrics
    attributes = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert (attributes["service.name"], attributes["swerve.run"]) == ("worker", "run-1")
    found = {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
    assert found["swerve.test.rounds"].sum.data_points[0].as_int == 2
    assert found["swerve.test.duration"].unit == "s"
    assert "swerve.span.duration" in found


def test_metrics_can_be_left_out_where_spans_are_pushed() -> None:
    settings = {"SWERVE_OTLP_METRICS": "0"}
    with collector() as (endpoint, paths, _), child(SWERVE_OTLP_ENDPOINT=endpoint, **settings) as process:
        process.communicate()
    assert "/v1/metrics" not in paths
