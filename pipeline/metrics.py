"""Metrics of a process: OpenTelemetry's instruments, whose values are pushed over OTLP and served to Prometheus.

Code that measures something makes its instruments from `meter()`. Without an endpoint and a port they do nothing. Names are lower-case
words with dots, `swerve.worker.slots`; Prometheus shows them with underscores and with their unit, `swerve_worker_slots`. A label has few
values: never a request or a task.
"""

import contextlib
import errno
import logging
import os
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from pipeline.settings import MetricsSettings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

log = logging.getLogger("swerve.metrics")

NUM_PORTS = 16
"""Largest number of processes of one machine that may share a setting."""

RUN = "swerve.run"
LABELS = ("service.name", RUN)
"""Facts about a process that become labels of each of its series in Prometheus."""

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""Upper bounds of the buckets of histograms that measure seconds."""

OUTCOME = "swerve.outcome"


def meter() -> metrics.Meter:
    """The meter from which instruments are made."""
    return metrics.get_meter("swerve")


@contextlib.contextmanager
def exported_metrics(service: str, settings: MetricsSettings, *, run: str = "") -> Generator[None]:
    """Export what this process measures, and the durations of its spans, until the block ends.

    Call it once in a process, after `start_telemetry`. Raises ValueError if no port is free.
    """
    with contextlib.ExitStack() as stack:
        resource = Resource.create({"service.name": service} | ({RUN: run} if run else {}))
        readers = [*_pushing(settings.otlp_endpoint), *_served(settings, stack)]
        if readers:
            provider = MeterProvider(readers, resource)
            stack.callback(provider.shutdown)
            metrics.set_meter_provider(provider)
            _observe_process()
            tracing = trace.get_tracer_provider()
            if isinstance(tracing, TracerProvider):
                tracing.add_span_processor(SpanDurations())
        yield


class SpanDurations(SpanProcessor):
    """Measures how long the spans of each name last."""

    def __init__(self) -> None:
        self._durations = meter().create_histogram(
            "swerve.span.duration",
            unit="s",
            description="How long spans of a name lasted; docs/traces.md says what each is",
            explicit_bucket_boundaries_advisory=SECONDS,
        )

    def on_end(self, span: ReadableSpan) -> None:
        if span.start_time is None or span.end_time is None:
            return
        labels = {"swerve.span": span.name}
        if outcome := (span.attributes or {}).get(OUTCOME):
            labels[OUTCOME] = str(outcome)
        self._durations.record((span.end_time - span.start_time) / 1e9, labels)


def _pushing(endpoint: str | None) -> Iterator[MetricReader]:
    """A reader that pushes every minute, or at the interval in OTEL_METRIC_EXPORT_INTERVAL, in milliseconds."""
    if endpoint is None:
        return
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    yield PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=f"{endpoint.rstrip('/')}/v1/metrics"))


def _served(settings: MetricsSettings, stack: contextlib.ExitStack) -> Iterator[MetricReader]:
    if settings.port is None:
        return
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    port = _serve(settings.host, settings.port, registry, stack)
    log.info("metrics are served at http://%s:%d/metrics", settings.host, port)
    yield PrometheusMetricReader(
        scope_info_enabled=False, resource_attribute_filter=LABELS.__contains__, registry=registry
    )


def _serve(host: str, first: int, registry: "CollectorRegistry", stack: contextlib.ExitStack) -> int:
    """Serves on the first free port, and returns it."""
    from prometheus_client import start_http_server

    last = min(first + NUM_PORTS - 1, 65535)
    for port in range(first, last + 1):
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise ValueError(
                f"SWERVE_METRICS_HOST={host!r}, SWERVE_METRICS_PORT={first}: {error}: give an address of this machine"
            ) from error
        stack.callback(thread.join)
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        return port
    raise ValueError(
        f"SWERVE_METRICS_PORT={first}: the ports from {first} to {last} are in use on {host}: give another one, or remove it"
    )


def _observe_process() -> None:
    """Metrics of this process, by OpenTelemetry's conventions for processes."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")

    def resident(options: CallbackOptions) -> Iterable[Observation]:
        yield Observation(int(Path("/proc/self/statm").read_text().split()[1]) * page_bytes)

    def cpu(options: CallbackOptions) -> Iterable[Observation]:
        yield Observation(time.process_time())

    meter().create_observable_up_down_counter(
        "process.memory.usage", [resident], unit="By", description="Memory of the process that is in RAM"
    )
    meter().create_observable_counter(
        "process.cpu.time", [cpu], unit="s", description="CPU time of the process, in user and system mode"
    )
