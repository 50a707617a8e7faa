"""The trainer's spans of a rollout follow one another without a gap, whatever becomes of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import telemetry
from pipeline.cli.trace import SpanNode, read_spans, trees


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The spans of the made run."""
    path = tmp_path_factory.mktemp("traces") / "spans.jsonl"
    environment = os.environ | {"SWERVE_TRACE_FILE": str(path)}
    subprocess.run([sys.executable, "-m", "tests.trainer.records.traced_rows"], env=environment, check=True)
    return path


def tree(file: Path, root: str) -> SpanNode:
    (found,) = trees(read_spans([file], telemetry.parts(root)[0]))
    return found


def stages(node: SpanNode) -> list[tuple[str, float, float]]:
    return [(one.span.name, one.span.started_at, one.span.ended_at) for one in node.children]


IN = [("stream", 110, 111), ("intake", 111, 112)]


@pytest.mark.parametrize(
    ("request_id", "end", "expected"),
    [
        (
            "trained",
            137,
            [
                *IN,
                ("group wait", 112, 125),
                ("step wait", 125, 130),
                ("trained", 130, 135),
                ("publication", 135, 137),
            ],
        ),
        ("unjudged", 137, [*IN, ("group wait", 112, 130), ("trained", 130, 135), ("publication", 135, 137)]),
        ("unpublished", 155, [*IN, ("group wait", 112, 125), ("step wait", 125, 150), ("trained", 150, 155)]),
        ("flat", 126, [*IN, ("group wait", 112, 125), ("settling", 125, 126)]),
        ("late", 111.5, [("stream", 110, 111), ("intake", 111, 111.5)]),
        ("evaluated", 150, [*IN, ("evaluation wait", 112, 150)]),
        ("withdrawn", 103, [("queue wait", 100, 103)]),
    ],
)
def test_the_stages_of_a_rollout_end_with_its_trace(
    file: Path, request_id: str, end: float, expected: list[tuple[str, float, float]]
) -> None:
    root = tree(file, telemetry.rollout(request_id))
    assert (root.span.name, root.span.started_at, root.span.ended_at) == ("rollout", 100, end)
    assert stages(root) == expected


def test_the_wait_for_the_group_is_told_from_that_for_the_judge(file: Path) -> None:
    root = tree(file, telemetry.rollout("trained"))
    (waiting,) = [one for one in root.children if one.span.name == "group wait"]
    assert waiting.span.span_id == telemetry.parts(telemetry.group_wait("trained"))[1], "judges know it"
    assert stages(waiting) == [("other members", 112, 120), ("judgements", 120, 125)]


def test_step_publication_and_rollouts_link_one_another(file: Path) -> None:
    step, publication = telemetry.step("run", 1), telemetry.publication("run", 1)
    of_step, of_publication = tree(file, step), tree(file, publication)
    rollouts = [telemetry.parts(telemetry.rollout(one))[0] for one in ("trained", "unjudged")]
    assert list(of_step.span.links) == rollouts
    assert stages(of_step) == [("train", 130, 135), ("publish weights", 135, 137), ("audit", 137, 139)]
    assert of_publication.span.links == (telemetry.parts(step)[0],)
    assert stages(of_publication) == [("deliver weights", 137, 140)]
    links = {one.span.name: one.span.links for one in tree(file, telemetry.rollout("trained")).children}
    assert links["trained"] == (telemetry.parts(step)[0],)
    assert links["publication"] == (telemetry.parts(publication)[0],)


def test_a_version_from_before_the_first_step_links_none(file: Path) -> None:
    assert tree(file, telemetry.publication("run", 0)).span.links == ()
