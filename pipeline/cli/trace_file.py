"""Traces as they stand in the files that SWERVE_TRACE_FILE names: one span a line (`pipeline/telemetry.py`)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class SpanLine:
    """A finished span; times in Unix seconds."""

    name: str
    service: str
    span_id: str
    parent_id: str | None
    started_at: float
    ended_at: float
    is_error: bool
    attributes: Mapping[str, Any]
    links: tuple[str, ...]  # trace ids

    @property
    def duration_s(self) -> float:
        return self.ended_at - self.started_at


@dataclass(slots=True)
class SpanNode:
    """A span with those under it, in the order in which they began."""

    span: SpanLine
    children: list["SpanNode"] = field(default_factory=list["SpanNode"])

    @property
    def children_s(self) -> float:
        """The durations of its children, added up."""
        return sum(child.span.duration_s for child in self.children)

    @property
    def uncovered_s(self) -> float:
        """Of its duration: time at which none of its children was under way."""
        covered_s, reached = 0.0, self.span.started_at
        for child in self.children:
            begin, end = max(child.span.started_at, reached), min(child.span.ended_at, self.span.ended_at)
            covered_s += max(0.0, end - begin)
            reached = max(reached, end)
        return max(0.0, self.span.duration_s - covered_s)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, "SpanNode"]]:
        """Itself and everything below it, each with its depth."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


def read_spans(files: Sequence[Path], trace_id: str) -> list[SpanLine]:
    """The spans of a trace. Of a span that was written twice, because work was done again, the last one counts."""
    found: dict[str, SpanLine] = {}
    for row in _rows(files, f'"trace_id": "{trace_id}"'):
        if row["trace_id"] == trace_id:
            found[row["span_id"]] = _span(row)
    return list(found.values())


def trees(spans: Sequence[SpanLine]) -> list[SpanNode]:
    """The spans under their parents. More than one tree if a parent is not there, because a process died or still runs."""
    nodes = {span.span_id: SpanNode(span) for span in sorted(spans, key=lambda span: span.started_at)}
    roots: list[SpanNode] = []
    for node in nodes.values():
        above = nodes.get(node.span.parent_id or "")
        (roots if above is None else above.children).append(node)
    return roots


def request_ids(files: Sequence[Path], trace_ids: Sequence[str]) -> dict[str, str]:
    """By trace id: the request ids of those traces that are of rollouts."""
    wanted = set(trace_ids)
    rows = _rows(files, '"name": "rollout"')
    return {
        row["trace_id"]: row["attributes"]["swerve.request"]
        for row in rows
        if row["trace_id"] in wanted and "swerve.request" in row["attributes"]
    }


def _rows(files: Sequence[Path], needle: str) -> Iterator[dict[str, Any]]:
    """Lines with this text in them. A last line that a crash cut short is passed over."""
    marked = needle.encode()
    for file in files:
        with file.open("rb") as lines:
            for line in lines:
                if marked in line and line.endswith(b"\n"):
                    yield json.loads(line)


def _span(row: dict[str, Any]) -> SpanLine:
    return SpanLine(
        name=row["name"],
        service=row["service"],
        span_id=row["span_id"],
        parent_id=row["parent_id"],
        started_at=row["started_ns"] / 1e9,
        ended_at=row["ended_ns"] / 1e9,
        is_error=row["status"] == "ERROR",
        attributes=row["attributes"],
        links=tuple(link["trace_id"] for link in row.get("links", ())),
    )
