"""`python -m trainer.evaluate TASKS.jsonl --api-base URL --model NAME --agent FILE --out DIR`: how well any model behind an
OpenAI-compatible server solves tasks. With --harness NAME in place of --agent an agent program plays.

Episodes and grading are the same as in training. With --local they run on this machine and need Docker alone; otherwise the fleet's workers
play them through its queue, and must reach the server. The same command continues where an earlier one ended, by task and sample; it plays
episodes without a verdict again. The packages of a worker are enough.

Exit status: 0 every episode has a verdict; 1 some have none, it was interrupted, or Redis does not answer; 2 misuse, with what to change.
"""

import argparse
import asyncio
import contextlib
import random
import re
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import msgspec

from pipeline import connection
from pipeline.agent.config import load_agent
from pipeline.agent.option import (
    Player,
    add_agent_options,
    add_endpoint_options,
    check_program,
    doubts,
    endpoint_of,
    player_digest,
    read_player,
)
from pipeline.artefacts import instance_id
from pipeline.commandline import program, status_of
from pipeline.errors import Boundary, RequestError, describe_error
from pipeline.frames import EpisodeReport
from pipeline.message import json_line
from pipeline.request import Endpoint, Limits, RolloutRequest, Sampling
from pipeline.rollout_store.reading import DIRECTORY
from pipeline.screen import visible_line
from pipeline.settings import redis_settings
from pipeline.task import Task
from pipeline.taskfile import read_tasks
from pipeline.trajectory import Failed, Trajectory
from trainer.evaluate.players import EpisodeLost, FleetPlayers, LocalPlayers, Players, request_id
from trainer.evaluate.results import EpisodeResult, EvaluationDirectory, Manifest, summary_of, table
from trainer.records.rollout_writer import MAX_BYTES, RolloutWriter
from trainer.verifications import Verifications

SHUFFLE_SEED = 42  # mini-swe-agent's seed, so that the same options choose the same instances


@dataclass(frozen=True, slots=True)
class TaskSelection:
    """The selection of tasks. Empty or None: no restriction."""

    shuffle: bool = False
    pattern: str = ""  # regular expression that an id begins with; with or without its source
    part: str = ""  # START:STOP or START:STOP:STEP, as in Python slices
    max_instances: int | None = None

    def of(self, tasks: Sequence[Task]) -> list[Task]:
        """The selected tasks. Raises ValueError for an option that cannot be read, or that leaves no task."""
        pattern, part = self._compiled(), self._slice()
        if self.max_instances is not None and self.max_instances < 1:
            raise ValueError(f"--max-instances {self.max_instances}: give 1 or more")
        chosen = list(tasks)
        if self.shuffle:
            chosen.sort(key=lambda task: instance_id(task.id))
            random.Random(SHUFFLE_SEED).shuffle(chosen)
        chosen = [task for task in chosen if pattern.match(instance_id(task.id)) or pattern.match(task.id)]
        chosen = chosen[part][: self.max_instances]
        if not chosen:
            raise ValueError(
                f"no task is left of {len(tasks)}: loosen --filter {self.pattern!r} or --slice {self.part!r}"
            )
        return chosen

    def _compiled(self) -> re.Pattern[str]:
        try:
            return re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"--filter {self.pattern!r} is not a regular expression: {error}") from error

    def _slice(self) -> slice:
        parts = self.part.split(":")
        try:
            if len(parts) > 3 or (self.part and len(parts) == 1):
                raise ValueError
            return (
                slice(*(int(part) if part.strip() else None for part in parts)) if self.part else slice(None)
            )
        except ValueError:
            raise ValueError(f"--slice {self.part!r}: give START:STOP, as in 0:5") from None


def endpoint_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("trainer.evaluate"),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("tasks", type=Path, metavar="TASKS.jsonl")
    add("--api-base", required=True, metavar="URL", help="URL of the server, as in http://127.0.0.1:30000/v1")
    add("--model", required=True, metavar="NAME", help="name of the model on the server")
    add_agent_options(parser)
    add(
        "--out",
        required=True,
        type=Path,
        metavar="DIR",
        help="directory of the results; an evaluation that it holds goes on",
    )
    add("--local", action="store_true", help="play on this machine, without a queue; needs Docker alone")
    add("--redo-existing", action="store_true", help="play again what has a verdict")
    add_endpoint_options(parser)
    _add_selection(parser)
    _add_limits(parser)
    add("--json", action="store_true", help="print the summary as one JSON object")
    return parser


def _add_selection(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("which tasks").add_argument
    add("--slice", default="", metavar="START:STOP", help="part of the tasks that are left, as in 0:5")
    add(
        "--filter",
        default="",
        metavar="RE",
        help="take only ids that this regular expression matches from their beginning",
    )
    add("--shuffle", action="store_true", help="take the tasks in a random order, always the same")
    add("--max-instances", type=int, metavar="N", help="largest number of tasks")
    add(
        "--samples",
        type=int,
        default=1,
        metavar="K",
        help="episodes of each task; the summary has pass@1 to pass@K; default 1",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("limits and sampling").add_argument
    add("--max-concurrent", type=int, default=4, metavar="N", help="episodes at once; default %(default)s")
    add("--step-limit", type=int, metavar="N", help="replies of an episode; default the agent's, else 50")
    add(
        "--context-tokens",
        type=int,
        metavar="N",
        help="context size given to the program of --harness, by which it compacts its conversation; the server's own limit applies as "
        "well; "
        f"default {Limits().context_tokens}",
    )
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="largest number of tokens of a reply; by default the agent's, else the server's",
    )
    add("--temperature", type=float, metavar="T", help="0 is greedy; default the agent's, else the server's")
    add(
        "--wall-s",
        type=float,
        default=Limits().wall_s,
        metavar="S",
        help="wall time of an episode; default %(default)s",
    )


def player_of(options: argparse.Namespace) -> Player:
    """The agent's files as one text, or the agent program. Raises ValueError naming the file and the fault."""
    try:
        return read_player(options)
    except (ValueError, RequestError) as error:
        raise ValueError(str(error) if options.harness else f"--agent: {error}") from error


def selection_of(options: argparse.Namespace) -> TaskSelection:
    return TaskSelection(options.shuffle, options.filter, options.slice, options.max_instances)


def limits_of(options: argparse.Namespace, agent: str) -> Limits:
    """The limits of an episode. Raises ValueError for limits that allow no episode."""
    for name in ("samples", "max_concurrent", "step_limit", "context_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give 1 or more")
    if options.wall_s <= 0:
        raise ValueError(f"--wall-s {options.wall_s:g}: it must be above 0")
    if agent and options.context_tokens:
        raise ValueError(
            "--context-tokens: it is for --harness; without a program the server's own context holds"
        )
    of_agent = load_agent(agent).step_limit if agent else None
    turns = options.step_limit or of_agent or Limits().turns
    context_tokens = options.context_tokens or Limits().context_tokens
    return Limits(turns=turns, wall_s=options.wall_s, context_tokens=context_tokens)


# Number of episodes without a single reply, and none with one, after which the server counts as absent.
UNANSWERED = 3
# The component at fault, by the boundary of the failure.
_SILENT: dict[Boundary, str] = {
    "engine": "the server has replied",
    "harness": "the agent program has taken a reply",
}


class NobodyReplies(Exception):
    """No episode has had a reply; the message names the component at fault."""


@dataclass(frozen=True, slots=True)
class EpisodeForm:
    """The part that all requests of an evaluation have in common."""

    run_id: str
    endpoint: Endpoint
    player: Player
    limits: Limits
    # Only engines and agent programs get this; for a server, the endpoint's options say how it samples.
    sampling: Sampling
    samples: int  # number of episodes of each task

    def fill(self, task: Task, sample: int) -> RolloutRequest:
        return RolloutRequest(
            id=request_id(self.run_id, task, sample),
            run_id=self.run_id,
            purpose="eval",
            task=task,
            group_id=f"{self.run_id}.{task.id}",
            member=sample,
            group_size=self.samples,
            version_at_enqueue=0,
            sampling=self.sampling,
            limits=self.limits,
            agent_config=self.player.agent,
            harness=self.player.harness,
            tokenizer="",
            endpoint=self.endpoint,
            enqueued_at=time.time(),
        )


@dataclass(slots=True)
class Session:
    """Plays episodes, stores each rollout in `rollouts`, and records it. Calls `on_result` with each new result."""

    form: EpisodeForm
    directory: EvaluationDirectory
    rollouts: RolloutWriter
    players: Players
    max_concurrent: int
    on_result: Callable[[EpisodeResult], None]
    has_replied: bool = False  # whether the server has replied in this session
    num_unanswered: int = 0

    async def run(self, todo: Sequence[tuple[Task, int]]) -> None:
        """Plays the episodes.

        If it is cancelled, the finished episodes stay recorded. Raises OSError if a result cannot be written, and NobodyReplies.
        """
        waiting = iter(todo)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.max_concurrent, len(todo))):
                    group.create_task(self._work_off(waiting))
        except* (OSError, NobodyReplies) as several:
            raise several.exceptions[0] from None

    async def _work_off(self, waiting: Iterator[tuple[Task, int]]) -> None:
        for task, sample in waiting:
            request = self.form.fill(task, sample)
            try:
                trajectory = await self.players.play(request)
            except EpisodeLost as loss:
                self.on_result(self.directory.record_loss(task, sample, str(loss)))
                continue
            self.on_result(await asyncio.to_thread(self._record, trajectory))
            await self.players.settle(trajectory.claim.request.id)
            self._look_for_replies(trajectory)

    def _look_for_replies(self, trajectory: Trajectory) -> None:
        """Raises NobodyReplies once as many episodes as are played at the same time had no reply, and none had one: the server gives none,
        or the agent program does not run.
        """
        outcome = trajectory.outcome
        self.has_replied |= bool(trajectory.turns) or not isinstance(outcome, Failed)
        if self.has_replied or not isinstance(outcome, Failed):
            return
        silent = _SILENT.get(outcome.boundary)
        if silent is None:
            return
        self.num_unanswered += 1
        if self.num_unanswered >= max(UNANSWERED, self.max_concurrent):
            raise NobodyReplies(f"{silent} in no episode: {outcome.message}")

    def _record(self, trajectory: Trajectory) -> EpisodeResult:
        self.rollouts.add_trajectory(trajectory)
        self.rollouts.sync()
        return self.directory.record(trajectory)


SILENT_S = 30.0  # silence after which a line says where the running episodes are


@dataclass(slots=True)
class ProgressLines:
    """Progress lines on `output`, readable on a terminal and in a log."""

    output: TextIO
    num_all: int
    num_ended: int
    running: dict[str, EpisodeReport] = field(default_factory=dict[str, EpisodeReport])
    last_at: float = field(default_factory=time.monotonic)

    def begin(self, directory: Path) -> None:
        known = f", {self.num_ended} of them are in {directory} already" if self.num_ended else ""
        self.say(f"{self.num_all} episodes{known}")

    def result(self, row: EpisodeResult) -> None:
        self.num_ended += 1
        verdict = {True: "resolved", False: "not resolved", None: "infrastructure"}[row.resolved]
        why = row.error or row.decided_by
        self.say(
            f"{self.num_ended}/{self.num_all} {row.instance_id} sample {row.sample}: {verdict}, {row.exit_status}, "
            f"{row.n_steps} turns, {row.elapsed:.0f} s{f' ({why})' if why else ''}"
        )

    def progress(self, report: EpisodeReport) -> None:
        if report.trajectory is not None:
            self.running.pop(report.request_id, None)
            return
        self.running[report.request_id] = report
        if time.monotonic() - self.last_at > SILENT_S:
            newest = max(self.running.values(), key=lambda one: one.turn)
            self.say(f"... under way; the furthest is at turn {newest.turn}, {newest.phase}")

    def say(self, line: str) -> None:
        self.last_at = time.monotonic()
        print(visible_line(line), file=self.output, flush=True)


@dataclass(frozen=True, slots=True)
class Plan:
    """The checked plan of an evaluation."""

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
        return status_of(error)
    print(json_line(summary) if options.json else table(summary))
    if not options.json:
        print(options.out)
    whole = len(plan.chosen) == len(plan.tasks) * plan.form.samples
    return 0 if whole and not interrupted and not summary["errors"] else 1


def _plain(value: object) -> object:
    return value if isinstance(value, (bool, int, float, str, list, type(None))) else str(value)


def _plan(options: argparse.Namespace) -> Plan:
    """Raises ValueError naming the option and the fix, OSError for files that cannot be read or written."""
    tasks = selection_of(options).of(read_tasks(options.tasks))
    tasks = Verifications.beside("tasks", str(options.tasks)).as_verified(tasks)
    _told_apart(tasks)
    player = player_of(options)
    endpoint, limits = endpoint_of(options, player.agent), limits_of(options, player.agent)
    sampling = _told_sampling(endpoint)
    if player.harness is not None:
        check_program(player.harness, limits, sampling)
    directory = EvaluationDirectory(options.out, options.model)
    directory.open()
    manifest = directory.agree(
        Manifest(
            run_id=f"evaluate-{secrets.token_hex(4)}",
            model=options.model,
            agent=player_digest(player),
            options=endpoint.options,
            limits=msgspec.to_builtins(limits),
        )
    )
    directory.go_on()
    one_of_each = {task.workdir: task for task in reversed(tasks)}
    for task in one_of_each.values() if player.harness is None else ():
        for doubt in doubts(load_agent(player.agent), task, limits):
            print(f"warning: {visible_line(doubt)}", file=sys.stderr)
    form = EpisodeForm(manifest.run_id, endpoint, player, limits, sampling, options.samples)
    episodes = [(task, sample) for sample in range(options.samples) for task in tasks]
    todo = [one for one in episodes if options.redo_existing or not directory.has(*one)]
    return Plan(tasks, form, directory, todo)


def _told_sampling(endpoint: Endpoint) -> Sampling:
    """The sampling settings that are passed to an agent program: only the longest reply that we request from the server."""
    for name in ("max_completion_tokens", "max_tokens"):
        most = endpoint.options.get(name)
        if isinstance(most, int) and most > 0:
            return Sampling(max_new_tokens=most)
    return Sampling()


def _told_apart(tasks: Sequence[Task]) -> None:
    """Raises ValueError for two tasks whose ids differ only in the source, because their result files would have the same names."""
    for instance, number in Counter(instance_id(task.id) for task in tasks).items():
        if number > 1:
            raise ValueError(
                f"{number} tasks have the id {instance!r}, from different sources: choose one with --filter"
            )


async def _conduct(plan: Plan, options: argparse.Namespace) -> bool:
    """Plays the remaining episodes. Returns True if a signal ended it. Raises ValueError, OSError."""
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
    except NobodyReplies as error:
        lines.say(f"ended: {error}")
        lines.say("the same command goes on from here, once it does")
        return True
    return False


@contextlib.asynccontextmanager
async def _players(plan: Plan, lines: ProgressLines, *, local: bool) -> AsyncGenerator[Players]:
    if local:
        async with LocalPlayers(lines.progress, lines.say) as players:
            yield players
        return
    redis = await connection.connect(redis_settings().url)
    try:
        async with FleetPlayers(redis, plan.form.run_id) as players:
            yield players
    finally:
        await redis.aclose()
