"""A small run with real containers: where the time of its rollouts went, as their traces have it."""

import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from infra import processes
from infra.processes import Child
from pipeline import telemetry
from pipeline.cli.trace import SpanNode, read_spans, trees
from pipeline.journal.reading import read
from pipeline.journal.rows import EpisodeRow, PublicationRow
from pipeline.task import ExitCode
from pipeline.taskfile import write_tasks
from tests.trainer.processes import recipe as recipe
from tests.trainer.processes import sets, start, steps
from tests.workers.claims import make_task
from tests.workers.conftest import RepoImage
from tests.workers.conftest import repo_image as repo_image

pytestmark = pytest.mark.docker

RUN = "traced"
SCRIPT = "python3 -c 'from calc import add; assert add(3, 1) == 4'\n"
SHARE, FLOOR_S = 0.02, 0.02  # that the children of a span may leave out or count twice
CONTEXT = ("rollout.limits.context_tokens=2048", "learner.micro_batch_tokens=2048")
SAMPLING = ("rollout.sampling.max_new_tokens=256",)
WISHES = ("num_steps=2", "rollout.limits.turns=2", "checkpoint.every_steps=2", *SAMPLING, *CONTEXT)


@pytest.fixture
def worker(redis_url: str, tiny_model: Path, tmp_path: Path, spans: Path) -> Iterator[Child]:
    command = [sys.executable, "-m", "tests.journeys.scripted_worker", str(tiny_model)]
    environment = os.environ | {"SWERVE_REDIS_URL": redis_url}
    child = processes.start("worker", command, log=tmp_path / "worker.log", environment=environment)
    yield child
    child.stop(grace_s=10)


@pytest.fixture
def spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where every process of the test writes its spans."""
    monkeypatch.setenv("SWERVE_TRACE_FILE", str(tmp_path / "spans.jsonl"))
    return tmp_path / "spans.jsonl"


@pytest.mark.slow
async def test_the_parts_of_a_rollouts_trace_sum_up_to_its_wall_time(
    recipe: Path, redis_url: str, redis: Redis, repo_image: RepoImage, worker: Child, spans: Path
) -> None:
    verdict = ExitCode(eval_script=SCRIPT)
    task = make_task(repo_image.tag, base_commit=repo_image.commit, verdict=verdict)
    write_tasks(recipe.parent / "train.jsonl", [task])
    write_tasks(recipe.parent / "heldout.jsonl", [replace(task, id="test:heldout")])
    run = recipe.parent / "run"
    trainer = await start(redis_url, recipe, "--run-dir", run, "--run-id", RUN, *sets(*WISHES))
    assert await trainer.ended() == 0, trainer.output
    worker.stop(grace_s=60)

    episodes = list(read(run / "journal", EpisodeRow))
    finished = [row for row in episodes if row.fate in ("trained", "evaluated", "zero_variance")]
    assert len(finished) >= 10
    alike: defaultdict[tuple[str, str], list[SpanNode]] = defaultdict(list)
    for row in finished:
        root = _trace_of(spans, row.request_id)
        (attempt,) = [node for node in root.children if node.span.name == "rollout attempt"]
        (agent,) = [node for node in attempt.children if node.span.name == "agent"]
        for node in (root, attempt, agent):
            alike[row.fate, node.span.name].append(node)
        turns = [node for _, node in agent.walk() if node.span.name == "turn"]
        assert [node.span.attributes["swerve.number"] for node in turns] == [1, 2]
        for turn in turns:
            names = {child.span.name for child in turn.children}
            assert names >= {"render prompt", "engine wait", "generate", "read commands", "command"}
    for nodes in alike.values():
        _assert_covered(nodes)
    _assert_step_and_rollouts_find_each_other(run, spans)


def _assert_step_and_rollouts_find_each_other(run: Path, spans: Path) -> None:
    published = {row.step: row.version for row in read(run / "journal", PublicationRow)}
    for step in steps(run):
        of_step = telemetry.parts(telemetry.step(RUN, step.step))[0]
        (linking,) = trees(read_spans([spans], of_step))
        rollouts = {telemetry.parts(telemetry.rollout(one))[0] for one in step.request_ids}
        assert set(linking.span.links) == rollouts
        of_publication = telemetry.parts(telemetry.publication(RUN, published[step.step]))[0]
        for request_id in step.request_ids:
            links = {
                child.span.name: child.span.links
                for child in _trace_of(spans, request_id).children
                if child.span.links
            }
            assert links == {"trained": (of_step,), "publication": (of_publication,)}


def _trace_of(spans: Path, request_id: str) -> SpanNode:
    (root,) = trees(read_spans([spans], telemetry.parts(telemetry.rollout(request_id))[0]))
    assert root.span.name == "rollout"
    return root


def _assert_covered(nodes: list[SpanNode]) -> None:
    """The children of a span follow one another: what they leave out or count twice is small.

    That is asked of half of the spans of a kind, because a busy machine may stop a process between two children of any one.
    """
    parts = [
        (
            node.span.name,
            node.span.duration_s,
            [(one.span.name, one.span.duration_s) for one in node.children],
        )
        for node in nodes
    ]
    assert statistics.median_low(map(_miscounted, nodes)) <= 1, parts


def _miscounted(node: SpanNode) -> float:
    """What the children leave out or count twice, in parts of what they may."""
    wall_s = node.span.duration_s
    return max(abs(node.children_s - wall_s), node.uncovered_s) / max(SHARE * wall_s, FLOOR_S)
