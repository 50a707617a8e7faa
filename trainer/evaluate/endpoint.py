"""`python -m trainer.evaluate TASKS.jsonl --api-base URL --model NAME --agent FILE --out DIR`: how well any model behind an
OpenAI-compatible server solves tasks.

Episodes and grading are those of training. With --local they run on this machine and need Docker alone; otherwise the fleet's
workers play them through its queue, and must reach the server. The same command goes on where an earlier one ended, by task and
sample; episodes without a verdict are played again. A worker's installation is enough.

Exit status: 0 every episode has a verdict; 1 some have none, or it was interrupted; 2 misuse, with what to change.
"""

import argparse
import asyncio
import contextlib
import secrets
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import msgspec

from pipeline import connection
from pipeline.agent.config import load_agent
from pipeline.agent.example import doubts
from pipeline.agent.option import agent_digest
from pipeline.endpoint_option import endpoint_of
from pipeline.errors import describe_error
from pipeline.rollout_store.reading import DIRECTORY
from pipeline.settings import redis_settings
from pipeline.task import Task
from pipeline.taskfile import read_tasks
from pipeline.visible import visible_line
from trainer.evaluate.options import (
    agent_of,
    endpoint_parser,
    limits_of,
    sampling_of,
    selection_of,
)
from trainer.evaluate.players import FleetPlayers, LocalPlayers, Players
from trainer.evaluate.progress import ProgressLines
from trainer.evaluate.results import EpisodeResult, EvaluationDirectory, Manifest
from trainer.evaluate.session import EpisodeForm, Session
from trainer.evaluate.summary import summary_of, table
from trainer.records.rollout_writer import MAX_BYTES, RolloutWriter
from trainer.verifications import Verifications

MISUSE = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What is evaluated, checked."""

    tasks: list[Task]
    form: EpisodeForm
    directory: EvaluationDirectory
    todo: list[tuple[Task, int]]

    @property
    def chosen(self) -> list[EpisodeResult]:
        """The results so far, of the chosen tasks and samples, in order."""
        keys = [(task.id, sample) for task in self.tasks for sample in range(self.form.samples)]
        return [self.directory.known[key] for key in keys if key in self.directory.known]


def main(argv: Sequence[str]) -> int:
    options = endpoint_parser(__doc__).parse_args(argv)
    try:
        plan = _plan(options)
        interrupted = asyncio.run(_conduct(plan, options))
        summary = summary_of(
            plan.chosen,
            model=options.model,
            data=str(options.tasks),
            samples=options.samples,
            arguments={name: _plain(value) for name, value in sorted(vars(options).items())},
        )
        plan.directory.write_overviews(summary, plan.chosen)
    except (OSError, ValueError) as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        return MISUSE
    print(msgspec.json.encode(summary).decode() if options.json else table(summary))
    if not options.json:
        print(options.out)
    whole = len(plan.chosen) == len(plan.tasks) * plan.form.samples
    return 0 if whole and not interrupted and not summary["errors"] else 1


def _plain(value: object) -> object:
    return value if isinstance(value, (bool, int, float, str, list, type(None))) else str(value)


def _plan(options: argparse.Namespace) -> Plan:
    """Raises ValueError naming the option and the fix, OSError for files that cannot be read or written."""
    tasks = selection_of(options).of(read_tasks(options.tasks))
    tasks = Verifications.beside("tasks", str(options.tasks)).calibrated(tasks)
    agent = agent_of(options)
    sampling, limits = sampling_of(options, agent), limits_of(options, agent)
    directory = EvaluationDirectory(options.out, options.model)
    directory.open()
    manifest = directory.agree(
        Manifest(
            run_id=f"evaluate-{secrets.token_hex(4)}",
            model=options.model,
            agent=agent_digest(agent),
            sampling=msgspec.to_builtins(sampling),
            limits=msgspec.to_builtins(limits),
        )
    )
    one_of_each = {task.workdir: task for task in reversed(tasks)}
    for task in one_of_each.values():
        for doubt in doubts(load_agent(agent), task, limits):
            print(f"warning: {visible_line(doubt)}", file=sys.stderr)
    form = EpisodeForm(manifest.run_id, endpoint_of(options), agent, sampling, limits, options.samples)
    episodes = [(task, sample) for sample in range(options.samples) for task in tasks]
    todo = [one for one in episodes if options.redo_existing or not directory.has(*one)]
    return Plan(tasks, form, directory, todo)


async def _conduct(plan: Plan, options: argparse.Namespace) -> bool:
    """Play what is to be played. True if a signal ended it. Raises ValueError, OSError."""
    num_known = len(plan.tasks) * plan.form.samples - len(plan.todo)
    lines = ProgressLines(sys.stderr, num_all=num_known + len(plan.todo), num_ended=num_known)
    lines.begin(options.out)
    if not plan.todo:
        return False
    running = asyncio.current_task()
    assert running is not None
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    try:
        rollouts = RolloutWriter(plan.directory.path / DIRECTORY, max_bytes=MAX_BYTES)
        async with _players(plan, lines, local=options.local) as players:
            with contextlib.closing(rollouts):
                session = Session(
                    plan.form, plan.directory, rollouts, players, options.max_concurrent, lines.result
                )
                await session.run(plan.todo)
    except asyncio.CancelledError:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return True
    return False


@contextlib.asynccontextmanager
async def _players(plan: Plan, lines: ProgressLines, *, local: bool) -> AsyncGenerator[Players]:
    if local:
        async with LocalPlayers(lines.progress) as players:
            yield players
        return
    redis = await connection.connect(redis_settings().url)
    try:
        async with FleetPlayers(redis, plan.form.run_id) as players:
            yield players
    finally:
        await redis.aclose()
