"""Tracing: one rollout is one trace, from its enqueueing to the optimizer step and the publication that contain it.

The trace context travels as a W3C `traceparent` inside the messages. The ids of a rollout's trace, and of spans that one process writes and
others refer to, are computed from its request id. So no process keeps a span for another one: each writes its part of the trace as soon as
it is known. A span that is written twice, because work was done again after a restart, has the same id both times.

`span` measures a block; `record` writes a span whose times are known afterwards from stamps. Times are those of
each machine's wall clock; a wait between two machines whose clocks disagree so far that it would be negative becomes 0, and its
span says by how much. Spans are exported in batches off the hot path; none is made without an endpoint, a file, or a
port for metrics (`metrics.py` measures their durations), but the context is carried on.
"""

import hashlib
import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import Link, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pipeline.settings import TelemetrySettings


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
