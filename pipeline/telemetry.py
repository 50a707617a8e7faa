"""Tracing: one rollout is one trace, from the trainer's enqueue to the optimizer step, across processes.

The trace context travels as a W3C `traceparent` inside the messages. Spans are exported in batches off the
hot path; without an endpoint or a file nothing is exported and spans cost microseconds.
"""

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pipeline.settings import TelemetrySettings

_PROPAGATOR = TraceContextTextMapPropagator()
_QUEUE_SPANS = 65_536  # a burst of episodes must not drop spans

Attribute = str | int | float | bool


class FileSpanExporter(SpanExporter):
    """One JSON object per span and line: name, ids, parent, times (Unix nanoseconds), attributes."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            self._file.write(json.dumps(_as_dict(span)) + "\n")
        self._file.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()


def start_telemetry(service: str, settings: TelemetrySettings) -> TracerProvider:
    """Make this process's tracer provider global; call its `shutdown()` at the end to flush."""
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    if settings.trace_file is not None:
        provider.add_span_processor(BatchSpanProcessor(FileSpanExporter(settings.trace_file), _QUEUE_SPANS))
    if settings.otlp_endpoint is not None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=f"{settings.otlp_endpoint.rstrip('/')}/v1/traces")
        provider.add_span_processor(BatchSpanProcessor(exporter, _QUEUE_SPANS))
    trace.set_tracer_provider(provider)
    return provider


@contextmanager
def span(name: str, *, traceparent: str = "", **attributes: Attribute) -> Generator[trace.Span]:
    """A span under the current one, or under `traceparent` if given.

    Attribute names gain the prefix `swerve.`.
    """
    context = _PROPAGATOR.extract({"traceparent": traceparent}) if traceparent else None
    named = {f"swerve.{key}": value for key, value in attributes.items()}
    with trace.get_tracer("swerve").start_as_current_span(name, context=context, attributes=named) as current:
        yield current


def current_traceparent() -> str:
    """The context of the current span as it travels in a message; empty outside any span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier.get("traceparent", "")


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
    }
