"""Tracing and metrics, through OpenTelemetry.

One rollout is one trace, from its enqueueing to the optimizer step and the publication that contain it. The trace context travels as a W3C
`traceparent` inside the messages. The ids of a rollout's trace, and of spans that one process writes and others refer to, are computed from
its request id. So no process keeps a span for another one: each writes its part of the trace as soon as it is known. A span that is written
twice, because work was done again after a restart, has the same id both times.

`span` measures a block; `record` writes a span whose times are known afterwards from stamps. Times are those of
each machine's wall clock; a wait between two machines whose clocks disagree so far that it would be negative becomes 0, and its
span says by how much. Spans are exported in batches off the hot path; none is made without an endpoint, a file, or a
port for metrics (which also measure their durations), but the context is carried on.

Values of metrics are pushed over OTLP and served to Prometheus. Code that measures something makes its instruments from `meter()`. Without
an endpoint and a port they do nothing. Names are lower-case words with dots, `swerve.worker.slots`; Prometheus shows them with underscores
and with their unit, `swerve_worker_slots`. A label has few values: never a request or a task.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry import context as otel_context
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import Link, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pipeline.settings import MetricsSettings, TelemetrySettings

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


def rollout(request_id: str) -> str:
    """The root span of a rollout's trace."""
    return _made(_digest(f"rollout/{request_id}", 16), "rollout")


def step(run_id: str, number: int) -> str:
    """The root span of the trace of an optimizer step."""
    return _made(_digest(f"step/{run_id}/{number}", 16), "step")


def publication(run_id: str, version: int) -> str:
    """The root span of the trace of a weight version."""
    return _made(_digest(f"publication/{run_id}/{version}", 16), "publication")


def named(trace: str, name: str) -> str:
    """The span with this name in the trace of `trace`. The trace has only one span with the name."""
    return _made(parts(trace)[0], name)


def queue_wait(trace: str, kind: str) -> str:
    """The wait for the attempt that ended a request of this kind of job; it contains the earlier attempts."""
    return named(trace, f"{kind}/queue wait")


def attempt(trace: str, kind: str, number: int) -> str:
    """One claim of a request of this kind of job."""
    return named(trace, f"{kind}/attempt {number}")


def group_wait(request_id: str) -> str:
    """The span of a rollout's wait for its group; the judging of the rollout is part of it."""
    return named(rollout(request_id), "group wait")


def parts(traceparent: str) -> tuple[str, str]:
    """Trace id and span id, in hexadecimal. Raises ValueError."""
    words = traceparent.split("-")
    if len(words) < 4 or len(words[1]) != 32 or len(words[2]) != 16:
        raise ValueError(f"{traceparent!r} is not a traceparent")
    return words[1], words[2]


def _made(trace_id: str, name: str) -> str:
    return f"00-{trace_id}-{_digest(f'{trace_id}/{name}', 8)}-01"


def _digest(name: str, num_bytes: int) -> str:
    return hashlib.blake2b(name.encode(), digest_size=num_bytes).hexdigest()


Attribute = str | int | float | bool | tuple[str, ...]
NONE: Mapping[str, Attribute] = {}

_PROPAGATOR = TraceContextTextMapPropagator()
_QUEUE_SPANS = 65_536  # a burst of episodes must not drop spans
_MAX_LINKS = 65_536  # a step links every rollout that it trained
_TRACER = trace.get_tracer("swerve")  # belongs to whatever provider the process has

_own_ids: ContextVar[tuple[int, int] | None] = ContextVar("own_ids", default=None)


class FileSpanExporter(SpanExporter):
    """One JSON object per span and line: name, ids, parent, times (Unix nanoseconds), attributes, links.

    Several processes may append to one file.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._file.write("".join(f"{json.dumps(_as_dict(span))}\n" for span in spans).encode())
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()


def start_telemetry(service: str, settings: TelemetrySettings) -> TracerProvider:
    """Make this process's tracer provider global; call its `shutdown()` at the end to flush."""
    provider = TracerProvider(
        sampler=None if settings.is_tracing else ALWAYS_OFF,
        resource=Resource.create({"service.name": service}),
        id_generator=_NamedIds(),
        span_limits=SpanLimits(max_links=_MAX_LINKS),
    )
    if settings.trace_file is not None:
        provider.add_span_processor(BatchSpanProcessor(FileSpanExporter(settings.trace_file), _QUEUE_SPANS))
    if settings.otlp_endpoint is not None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=f"{settings.otlp_endpoint.rstrip('/')}/v1/traces")
        provider.add_span_processor(BatchSpanProcessor(exporter, _QUEUE_SPANS))
    trace.set_tracer_provider(provider)
    return provider


@contextmanager
def span(
    name: str,
    *,
    traceparent: str = "",
    named: Mapping[str, Attribute] = NONE,
    **attributes: Attribute,
) -> Generator[trace.Span]:
    """A span under the current one, or under `traceparent` if given.

    Names of `attributes` gain the prefix `swerve.`; `named` have their whole names, such as those of OpenTelemetry's conventions.
    """
    context = _context_of(traceparent) if traceparent else None
    complete = _named(attributes, named)
    with _TRACER.start_as_current_span(name, context=context, attributes=complete) as current:
        yield current


def record(
    name: str,
    started_at: float,
    ended_at: float,
    *,
    parent: str | None = None,
    own: str = "",
    links: Iterable[str] = (),
    error: str = "",
    named: Mapping[str, Attribute] = NONE,
    **attributes: Attribute,
) -> None:
    """Write a span from `started_at` to `ended_at` (Unix s): under the current one, or under `parent`; "" makes it a root.

    `own` is the traceparent by which other spans refer to it. `links` are those of spans in other traces.
    """
    if ended_at < started_at:
        attributes |= {"clock_skew_s": started_at - ended_at}
        ended_at = started_at
    context = None if parent is None else _context_of(parent)
    token = _own_ids.set(_ids(own) if own else None)
    try:
        made = _TRACER.start_span(
            name,
            context=context,
            attributes=_named(attributes, named),
            links=[Link(_span_context(one)) for one in links],
            start_time=int(started_at * 1e9),
        )
    finally:
        _own_ids.reset(token)
    if error:
        made.set_status(Status(StatusCode.ERROR, error))
    made.end(int(ended_at * 1e9))


@contextmanager
def inside(traceparent: str) -> Generator[None]:
    """Makes the spans of the block children of the span with this context, which `record` writes at the end."""
    token = otel_context.attach(_context_of(traceparent))
    try:
        yield
    finally:
        otel_context.detach(token)


def current_traceparent() -> str:
    """The context of the current span as it travels in a message; empty outside any span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier.get("traceparent", "")


class _NamedIds(RandomIdGenerator):
    """Random ids, except for spans whose ids are given."""

    def generate_span_id(self) -> int:
        own = _own_ids.get()
        return super().generate_span_id() if own is None else own[1]

    def generate_trace_id(self) -> int:
        own = _own_ids.get()
        return super().generate_trace_id() if own is None else own[0]


def _named(attributes: Mapping[str, Attribute], named: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {f"swerve.{key}": value for key, value in attributes.items()} | dict(named)


@lru_cache(maxsize=256)  # the children of a span come one after another
def _context_of(traceparent: str) -> Context:
    """The context of the traceparent; empty for an invalid one: the span then begins a trace of its own."""
    try:
        return trace.set_span_in_context(trace.NonRecordingSpan(_span_context(traceparent)), Context())
    except ValueError:
        return Context()


def _span_context(traceparent: str) -> trace.SpanContext:
    """The parsed traceparent. Raises ValueError."""
    is_sampled = int(traceparent[-2:], 16) & trace.TraceFlags.SAMPLED
    return trace.SpanContext(*_ids(traceparent), is_remote=True, trace_flags=trace.TraceFlags(is_sampled))


def _ids(traceparent: str) -> tuple[int, int]:
    """The ids as numbers. Raises ValueError."""
    trace_id, span_id = parts(traceparent)
    return int(trace_id, 16), int(span_id, 16)


def _as_dict(span: ReadableSpan) -> dict[str, object]:
    context = span.get_span_context()
    assert context is not None
    return {
        "name": span.name,
        "service": span.resource.attributes.get("service.name"),
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else None,
        "started_ns": span.start_time,
        "ended_ns": span.end_time,
        "status": span.status.status_code.name,
        "attributes": dict(span.attributes or {}),
        "links": [
            {"trace_id": f"{link.context.trace_id:032x}", "span_id": f"{link.context.span_id:016x}"}
            for link in span.links
        ],
    }


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
