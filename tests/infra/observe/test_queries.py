"""Each query of a dashboard or an alert finds series that real processes serve, and docs/metrics.md names each metric of ours."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.error import URLError

import docker
import pytest
import yaml
from docker.errors import APIError
from msgspec.structs import replace

from benchmarks.scripted_fleet import alternating, fleet
from infra import processes
from pipeline import connection, keys, queue
from pipeline.harness import Harness, read_harness
from pipeline.kinds import ROLLOUT
from pipeline.request import RolloutRequest
from pipeline.tokenizer import put_tokenizer, read_bundle
from pipeline.weights import version_name
from tests.conftest import Serving, free_ports
from tests.infra.observe.queries import GIVEN, OBSERVE, expressions, grouping_labels, selectors, shown_labels
from tests.journeys.test_a_worker_dies import endless_request, until
from tests.pipeline.scraping import Series, scraped, values
from tests.trainer.processes import TrainerProcess, sets, start, write_recipe
from trainer.records.points import metric_of
from workers.harness.building import build
from workers.harness.volumes import PREFIX
from workers.sandbox.containers import ContainerApi
from workers.settings import docker_host

WISHES = sets(
    "num_steps=2",
    "evaluation.episodes=2",
    "evaluation.greedy_episodes=2",
    "audit.share=1.0",
    "judge.method=rule",
    "judge.name=commands",
)
CONFIGURATION = yaml.safe_load((OBSERVE / "prometheus.yaml").read_text())
JOBS = {job["job_name"]: job for job in CONFIGURATION["scrape_configs"]}
OURS = re.compile(r"swerve_\w+|process_\w+|gen_ai_\w+")
SINK_NUMBERS = re.compile(r"swerve_(train|audit|judge|heldout)_\w+")


def verdict(request: RolloutRequest) -> float | None:
    """One member vanishes."""
    return None if request.task.id == "t1" and request.member == 3 else alternating(request)


@pytest.fixture(scope="module")
def found(
    redis_url: str, serving: Serving, task_image: str, tmp_path_factory: pytest.TempPathFactory
) -> list[Series]:
    """All that a trainer, a judge, a worker, an engine and its router serve while they are at work."""
    return asyncio.run(observed(redis_url, serving, task_image, tmp_path_factory.mktemp("observed")))


async def observed(redis_url: str, serving: Serving, image: str, directory: Path) -> list[Series]:
    judge_port, worker_port, trainer_port = free_ports(3)
    with ExitStack() as stack:
        reach = {"SWERVE_REDIS_URL": redis_url, "SWERVE_ROUTER_URL": serving.router_url, "SWERVE_SLOTS": "1"}

        def run(module: str, port: int) -> None:
            environment = os.environ | reach | {"SWERVE_METRICS_PORT": str(port)}
            log = directory / f"{module}.log"
            child = processes.start(module, [sys.executable, "-m", module], log=log, environment=environment)
            stack.callback(child.stop, grace_s=10)

        run("workers.judge", judge_port)
        trained = await trained_and_served(redis_url, serving, directory, trainer_port)
        harness = await built_harness(directory, stack)
        run("workers.run", worker_port)
        await played(redis_url, serving, image, harness)
        urls = [f"http://127.0.0.1:{port}/metrics" for port in (judge_port, worker_port)]
        rest = [scraped(url) for url in (*urls, f"{serving.engine_url}/metrics", serving.router_metrics_url)]
        return trained + [relabelled(series) for each in rest for series in each]


def relabelled(series: Series) -> Series:
    """As Prometheus' configuration renames it."""
    (rule,) = JOBS["engines"]["metric_relabel_configs"]
    match = re.fullmatch(rule["regex"], series.name)
    name = match.expand(rule["replacement"].replace("$", "\\")) if match else series.name
    return Series(name, series.labels, series.value)


async def trained_and_served(redis_url: str, serving: Serving, directory: Path, port: int) -> list[Series]:
    """What the trainer of a short run served, each series as it was read last."""
    recipe, run = write_recipe(directory, serving.model_dir), directory / "run"
    async with fleet(redis_url, verdict):
        trainer = await start(
            redis_url, recipe, "--run-dir", run, "--run-id", "seen", *WISHES, SWERVE_METRICS_PORT=str(port)
        )
        last: dict[tuple[str, frozenset[tuple[str, str]]], Series] = {}
        async for series in read_until_it_ends(trainer, port):
            last[series.name, frozenset(series.labels.items())] = series
    assert trainer.process.returncode == 0, trainer.output
    return list(last.values())


async def read_until_it_ends(trainer: TrainerProcess, port: int) -> AsyncIterator[Series]:
    while trainer.process.returncode is None:
        with suppress(URLError, ConnectionError):
            for series in await asyncio.to_thread(scraped, f"http://127.0.0.1:{port}/metrics"):
                yield series
        await asyncio.sleep(0.1)


# Asks, goes on in two ways, and asks for what nothing follows.
PROGRAM = """#!/usr/bin/python3
import json, sys, urllib.request
def ask(*messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    asked = urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}/v1/chat/completions", body)
    return json.load(urllib.request.urlopen(asked))["choices"][0]["message"]
def user(text): return {"role": "user", "content": text}
said = ask(user(sys.argv[2]))
ask(user(sys.argv[2]), said, user("one way"))
ask(user(sys.argv[2]), said, user("another way"))
ask(user("a title, please"))
"""
FILE = """
name = "asker"
version = "1.0"
licence = "MIT"
dialect = "chat"
uses_tools = false
command = ["{harness}/asker", "{port}", "{problem}"]
version_command = ["{harness}/asker", "--version"]

[build]
directory = "program"
"""


async def built_harness(directory: Path, stack: ExitStack) -> Harness:
    (directory / "program").mkdir()
    program = directory / "program" / "asker"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    path = directory / "asker.toml"
    path.write_text(FILE)
    file = read_harness(path)
    api = ContainerApi(docker_host())
    await build(api, file)
    await api.close()
    stack.callback(remove_harness, file.harness)
    return file.harness


def remove_harness(harness: Harness) -> None:
    client = docker.from_env()
    for volume in client.volumes.list(filters={"name": f"{PREFIX}{harness.name}-"}):
        volume.remove()
    with suppress(APIError):
        client.images.remove(harness.image, force=True)


async def played(redis_url: str, serving: Serving, image: str, harness: Harness) -> None:
    """A rollout of two turns and one of an agent program, in containers, sampled by the engine."""
    redis = await connection.connect(redis_url)
    await serving.name_weights(version_name("journey", 0))
    tokenizer = await put_tokenizer(redis, read_bundle(serving.model_dir))
    request = endless_request(image, tokenizer, 7)
    await queue.enqueue(redis, replace(request, limits=replace(request.limits, turns=2)))
    of_program = replace(endless_request(image, tokenizer, 8), harness=harness)
    await queue.enqueue(redis, of_program)

    async def is_published() -> bool:
        return all([await redis.exists(keys.published(one.id, ROLLOUT)) for one in (request, of_program)])

    await until(is_published, what="the rollouts", patience_s=120)
    await redis.aclose()


@pytest.mark.slow
def test_each_query_finds_series_with_the_labels_that_it_groups_by_and_shows(found: list[Series]) -> None:
    faults: list[str] = []
    for place, expression, text in expressions():
        labels = set[str]()
        for selector in selectors(expression):
            matched = [one for one in found if one.name == selector.name and selector.takes(one.labels)]
            labels |= {label for one in matched for label in one.labels}
            if not matched:
                faults.append(f"{place}: no series for {selector.name} in {expression}")
        if missing := (grouping_labels(expression) | shown_labels(text)) - labels - GIVEN:
            faults.append(f"{place}: no label {', '.join(sorted(missing))} in {expression}")
    assert faults == []


@pytest.mark.slow
def test_the_docs_name_each_metric_of_ours_with_its_labels_and_no_other(found: list[Series]) -> None:
    documented = dict(documented_metrics())
    served: dict[str, set[str]] = {}
    for one in found:
        name = re.sub(r"(_seconds|_usage)_(bucket|sum|count)$", r"\1", one.name)
        if OURS.fullmatch(name) and not SINK_NUMBERS.fullmatch(name):
            served.setdefault(name, set()).update(one.labels.keys() - {"le", "service_name", "swerve_run"})
    assert served == documented


def documented_metrics() -> Iterator[tuple[str, set[str]]]:
    for line in Path("docs/metrics.md").read_text().splitlines():
        cells = line.strip("|").split("|")
        if len(cells) == 4 and (name := re.match(r" `(\w+)`", cells[0])):
            yield name[1], set(re.findall(r"`(\w+)`", cells[2]))


@pytest.mark.slow
def test_replies_to_an_agent_program_are_counted_by_kind_and_by_what_became_of_their_copies(
    found: list[Series],
) -> None:
    def counted(name: str, label: str) -> dict[str, float]:
        return {one.labels[label]: one.value for one in found if one.name == name}

    replies = counted("swerve_program_replies_total", "swerve_kind")
    assert replies == {"turn": 2, "branch": 1, "aside": 1, "not_taken": 0}
    copies = counted("swerve_program_copies_total", "swerve_copy")
    assert copies == {"same": 1, "printed": 0, "thoughts": 0, "healed": 0}
    assert values(found, "swerve_program_replies_total", swerve_harness="asker", swerve_kind="branch") == [1]


@pytest.mark.slow
def test_no_label_names_a_request_a_task_or_anything_else_without_end(found: list[Series]) -> None:
    ours = [one for one in found if one.name.startswith("swerve_")]
    assert {label for one in ours for label in one.labels if len(values_of(ours, label)) > 60} <= {"le"}


def values_of(series: list[Series], label: str) -> set[str]:
    return {one.labels[label] for one in series if label in one.labels}


@pytest.mark.slow
def test_numbers_of_steps_have_the_names_of_the_sinks_and_parts_sum_up_to_the_wall(
    found: list[Series],
) -> None:
    assert metric_of("train/wait_s") == ("swerve.train.wait", "s", {})
    assert metric_of("train/tokens_per_s") == ("swerve.train.tokens_per_s", "", {})
    name, _, labels = metric_of("heldout/hard/greedy/success")
    assert (name, labels) == (
        "swerve.heldout.success",
        {"swerve.heldout.set": "hard", "swerve.sampling": "greedy"},
    )
    assert len(values(found, "swerve_train_wait_seconds")) == 1
    assert values(found, "swerve_steps_taken_total") == [2]
    assert sum(values(found, "swerve_step_time_seconds_total")) > max(
        values(found, "swerve_train_wall_seconds")
    )
    assert sum(values(found, "swerve_rollouts_settled_total", swerve_fate="failed")) >= 1
