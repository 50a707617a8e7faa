"""`trace`: where the time of one rollout went, from its enqueueing to the step and the publication that contain it; needs no Redis
and no collector, only the files of spans.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline import trace_ids
from pipeline.cli.ink import Ink
from pipeline.cli.trace_file import SpanNode, read_spans, request_ids, trees
from pipeline.judge import judged_rollout_id
from pipeline.visible import visible

FILE_VARIABLE = "SWERVE_TRACE_FILE"
TRACES = "traces"  # in the directory of a run that make demo has started
GAP_SHARE, GAP_S = 0.01, 0.005  # a part of a span without a name is shown from here on
PARALLEL = ("queue wait", "group wait")  # their children are what happens meanwhile, and need not cover them


def run(arguments: argparse.Namespace) -> int:
    """Print one trace; returns the exit status."""
    try:
        files = _files(arguments.file, arguments.run_dir)
        roots = trees(read_spans(files, trace_ids.parts(_trace_of(arguments))[0]))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if not roots:
        what = f"step {arguments.step} of run {arguments.id}" if arguments.step else f"request {arguments.id}"
        print(f"no span of {what} is in {', '.join(map(str, files))}", file=sys.stderr)
        return 2
    known = request_ids(files, [one for root in roots for _, node in root.walk() for one in node.span.links])
    lines = as_json(roots, known) if arguments.json else as_text(roots, known, _ink())
    for line in lines:
        print(line)
    return 0


def as_text(roots: Sequence[SpanNode], known: dict[str, str], ink: Ink) -> list[str]:
    """A line for each span: when it began, how long it lasted, its name by depth, and what it says. `known` has the request ids of
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
            found.append(f"{line}  {ink.faint(visible(' '.join(said)))}".rstrip())
            found += _gap(node, depth, ink)
    return found


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
        return trace_ids.step(arguments.id, arguments.step)
    return trace_ids.rollout(judged_rollout_id(arguments.id) or arguments.id)


def _files(named: Sequence[Path], run_dir: Path | None) -> Sequence[Path]:
    """Raises ValueError."""
    files = [*named, *(sorted((run_dir / TRACES).glob("*.jsonl")) if run_dir else ())]
    files = files or [Path(one) for one in (os.environ.get(FILE_VARIABLE),) if one]
    if not files:
        raise ValueError(
            f"no file of spans: name some with --file, or with --run-dir a directory that has {TRACES}/*.jsonl"
        )
    for file in files:
        if not file.is_file():
            raise ValueError(
                f"{file} is no file: give the one that {FILE_VARIABLE} named while the run went on"
            )
    return files


def _ink() -> Ink:
    return Ink(coloured=sys.stdout.isatty())
