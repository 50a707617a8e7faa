"""`trace`: where the time of one rollout went, from its enqueueing to the step and the publication that contain it.

It needs no Redis and no collector, only the files of spans that SWERVE_TRACE_FILE names, with one span per line (`pipeline/telemetry.py`).
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import telemetry
from pipeline.judge import judged_rollout_id
from pipeline.screen import Ink, has_colours, one_line


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
    """A span with its child spans, in the order in which they began."""

    span: SpanLine
    children: list["SpanNode"] = field(default_factory=list["SpanNode"])

    @property
    def children_s(self) -> float:
        """The durations of its children, added up."""
        return sum(child.span.duration_s for child in self.children)

    @property
    def uncovered_s(self) -> float:
        """The part of its duration in which none of its children was running."""
        covered_s, reached = 0.0, self.span.started_at
        for child in self.children:
            begin, end = max(child.span.started_at, reached), min(child.span.ended_at, self.span.ended_at)
            covered_s += max(0.0, end - begin)
            reached = max(reached, end)
        return max(0.0, self.span.duration_s - covered_s)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, "SpanNode"]]:
        """The span and everything below it, each with its depth."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


def read_spans(files: Sequence[Path], trace_id: str) -> list[SpanLine]:
    """The spans of a trace. If a span was written several times, because work was done again, the last one counts."""
    found: dict[str, SpanLine] = {}
    for row in _rows(files, f'"trace_id": "{trace_id}"'):
        if row["trace_id"] == trace_id:
            found[row["span_id"]] = _span(row)
    return list(found.values())


def trees(spans: Sequence[SpanLine]) -> list[SpanNode]:
    """The spans under their parents. There is more than one tree if a parent is missing, because a process died or still runs."""
    nodes = {span.span_id: SpanNode(span) for span in sorted(spans, key=lambda span: span.started_at)}
    roots: list[SpanNode] = []
    for node in nodes.values():
        above = nodes.get(node.span.parent_id or "")
        (roots if above is None else above.children).append(node)
    return roots


def request_ids(files: Sequence[Path], trace_ids: Sequence[str]) -> dict[str, str]:
    """The request ids of those traces that are of rollouts, by trace id."""
    wanted = set(trace_ids)
    rows = _rows(files, '"name": "rollout"')
    return {
        row["trace_id"]: row["attributes"]["swerve.request"]
        for row in rows
        if row["trace_id"] in wanted and "swerve.request" in row["attributes"]
    }


def _rows(files: Sequence[Path], needle: str) -> Iterator[dict[str, Any]]:
    """The lines that contain this text. A last line that a crash cut short is skipped."""
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


FILE_VARIABLE = "SWERVE_TRACE_FILE"
TRACES = "traces"  # name of the directory, within that of a run that make demo has started
# The time of a span that no child covers is shown if it is at least this share and this long
GAP_SHARE, GAP_S = 0.01, 0.005
# The children of these spans run in parallel to the wait, and need not cover it
PARALLEL = ("queue wait", "group wait")


def run(arguments: argparse.Namespace) -> int:
    """Print one trace; returns the exit status."""
    try:
        files = _files(arguments.file, arguments.run_dir)
        roots = trees(read_spans(files, telemetry.parts(_trace_of(arguments))[0]))
    except (ValueError, OSError) as error:
        print(one_line(str(error)), file=sys.stderr)
        return 2
    if not roots:
        what = f"step {arguments.step} of run {arguments.id}" if arguments.step else f"request {arguments.id}"
        print(one_line(f"no span of {what} is in {', '.join(map(str, files))}"), file=sys.stderr)
        return 2
    known = request_ids(files, [one for root in roots for _, node in root.walk() for one in node.span.links])
    lines = as_json(roots, known) if arguments.json else as_text(roots, known, _ink())
    for line in lines:
        print(line)
    return 0


def as_text(roots: Sequence[SpanNode], known: dict[str, str], ink: Ink) -> list[str]:
    """A line for each span: when it began, how long it lasted, its name by depth, and its attributes. `known` has the request ids of
    linked traces.
    """
    zero = min(root.span.started_at for root in roots)
    found = [ink.faint(f"{'at s':>10} {'s':>9}  span")]
    for root in roots:
        for depth, node in root.walk():
            span = node.span
            name = ink.bad(span.name) if span.is_error else ink.bold(span.name) if not depth else span.name
            said = [f"{key.rpartition('.')[2]}={value}" for key, value in span.attributes.items()]
            said += [f"link={known.get(one, one)}" for one in span.links]
            line = f"{span.started_at - zero:10.3f} {span.duration_s:9.3f}  {'  ' * depth}{name}"
            found.append(f"{line}  {ink.faint(' '.join(said))}".rstrip())
            found += _gap(node, depth, ink)
    return list(map(one_line, found))


def as_json(roots: Sequence[SpanNode], known: dict[str, str]) -> list[str]:
    """One object for each span, parents before their children."""
    return [
        json.dumps(
            {
                "name": node.span.name,
                "depth": depth,
                "service": node.span.service,
                "started_at": node.span.started_at,
                "duration_s": node.span.duration_s,
                "uncovered_s": node.uncovered_s if node.children else None,
                "is_error": node.span.is_error,
                "attributes": dict(node.span.attributes),
                "links": list(node.span.links),
                "requests": [known[one] for one in node.span.links if one in known],
            }
        )
        for root in roots
        for depth, node in root.walk()
    ]


def _gap(node: SpanNode, depth: int, ink: Ink) -> list[str]:
    span, gap_s = node.span, node.uncovered_s
    is_small = gap_s < max(GAP_S, GAP_SHARE * span.duration_s)
    if not node.children or is_small or span.name in PARALLEL:
        return []
    return [ink.doubtful(f"{'':10} {gap_s:9.3f}  {'  ' * (depth + 1)}(in no span)")]


def _trace_of(arguments: argparse.Namespace) -> str:
    if arguments.step is not None:
        return telemetry.step(arguments.id, arguments.step)
    return telemetry.rollout(judged_rollout_id(arguments.id) or arguments.id)


def _files(named: Sequence[Path], run_dir: Path | None) -> Sequence[Path]:
    """The files to read. Raises ValueError."""
    files = [*named, *(sorted((run_dir / TRACES).glob("*.jsonl")) if run_dir else ())]
    files = files or [Path(one) for one in (os.environ.get(FILE_VARIABLE),) if one]
    if not files:
        raise ValueError(
            f"no file of spans: name some with --file, or with --run-dir a directory that has {TRACES}/*.jsonl"
        )
    for file in files:
        if not file.is_file():
            raise ValueError(
                f"{file} is not a file: give the one that {FILE_VARIABLE} named while the run went on"
            )
    return files


def _ink() -> Ink:
    return Ink(coloured=has_colours(sys.stdout))
