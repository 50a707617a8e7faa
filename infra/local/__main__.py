"""The whole system on one machine: `make demo` is this.

    python -m infra.local RECIPE.toml --run-dir runs/demo [--workers 2] [--slots 6] [-- TRAINER FLAGS]

First it checks its ports. Then it starts what is missing, in this order: Redis and Docker, the base image, the engine
and the router, then, after the commands of --prepare, the workers, pages of the run for a browser, whose address it
prints, and last the trainer, which resumes the run in the run directory if there is one. The trainer writes to the
screen, everything else to RUN_DIR/logs/. What dies is started again, and a line says so: engine, router, workers and
pages always, the trainer if a signal ended it, Redis and Docker if this process started them.

When the trainer ends by itself, or on Ctrl-C or SIGTERM, everything that this process started is stopped in the
opposite order, the containers of its workers are removed, and the peak of memory is written to RUN_DIR/memory.json.
Services that were running before keep running. The trainer is waited for while it ends its optimizer step and writes a
checkpoint, unless a second signal comes. If this process is killed, the kernel ends what it started.

Exit status: the trainer's; 1 if something could not be started; 2 misuse, with what to change; 130 after Ctrl-C,
143 after SIGTERM.
"""

import argparse
import asyncio
import json
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import msgspec

from infra import processes, services
from infra.images.build import IMAGES, BuildError, ensure_image
from infra.local import commands
from infra.local.commands import LOCAL_REDIS, LocalJudge, check_ports, parse_arguments, starting_model
from infra.processes import Child, MemoryWatch, SupervisedProcess, Supervisor
from pipeline import connection, queue
from pipeline.kinds import KINDS

ENGINE_START_S = 600.0
CHECK_EVERY_S = 0.5
PREPARATION_GRACE_S = 10.0  # it may have containers to remove first
TASK_IMAGE = IMAGES["task-base"]


def run(arguments: argparse.Namespace, cleanup: ExitStack, trainers: Supervisor) -> int:
    """Runs everything from the services to the end of the trainer. The engine loads its model while tasks are prepared, because it takes
    only one core for that. Requests of abandoned runs are withdrawn first: workers would play them before those of the new run. At the end
    the containers that the run's own workers left are removed, and nobody else's.

    `trainers` runs the trainer, and its exit status is returned; `cleanup` undoes each step in the opposite order. Raises ValueError for
    what the user has to change, RuntimeError, OSError or BuildError for the rest.
    """
    processes.adopt_orphans()
    for service in services.SERVICES:
        services.wait_while_stopping(service)
    check_ports(arguments)
    model, judge = starting_model(arguments), commands.wanted_judge(arguments)
    if judge is not None:
        commands.check_judge_ports(arguments, judge)
    prepare_run(arguments, cleanup)
    supervisor = Supervisor(say)
    watch = MemoryWatch(lambda: service_pids() | supervisor.pids() | trainers.pids())
    cleanup.callback(report_memory, watch, arguments.run_dir / "memory.json")
    cleanup.enter_context(watch)
    cleanup.callback(lambda: remove_containers(supervisor.started, say))
    cleanup.callback(supervisor.stop)
    start(supervisor, commands.serving(arguments, model))
    say(f"engine and router: logs in {arguments.run_dir / 'logs'}")
    for command in arguments.prepare:
        prepare(command)
    start(supervisor, commands.workers(arguments))
    say(f"{arguments.workers} workers with {arguments.slots} slots each")
    waited_s = wait_for_engine(supervisor, "engine", arguments.router_port)
    say(f"engine and router ready (waited {waited_s:.1f} s)")
    if judge is not None:
        start_judges(supervisor, judge, arguments)
    supervisor.start(commands.pages(arguments, say))
    cleanup.callback(trainers.stop)
    trainers.start(commands.trainer(arguments, say))
    while (status := trainers.exit_status("trainer")) is None:
        time.sleep(CHECK_EVERY_S)
        own = {*services.child_pids(), *supervisor.pids().values(), *trainers.pids().values()}
        processes.reap_orphans(own)
        services.restart_dead(say)
        supervisor.restart_dead()
        trainers.restart_dead()
    return status


def prepare_run(arguments: argparse.Namespace, cleanup: ExitStack) -> None:
    """Prepares the run directory, the services and the base image."""
    abandoned = abandoned_runs(arguments.run_dir, fresh=arguments.fresh)
    if arguments.fresh:
        forget(arguments.run_dir)
    (arguments.run_dir / "traces").mkdir(parents=True, exist_ok=True)
    bring_up_services(arguments, cleanup)
    withdraw(arguments.redis_url, abandoned)
    began_at = time.monotonic()
    if ensure_image(TASK_IMAGE):
        say(f"image {TASK_IMAGE.tag} made ({time.monotonic() - began_at:.1f} s)")


def withdraw(redis_url: str, run_ids: list[str]) -> None:
    """Cancel the outstanding requests of abandoned runs. Raises ValueError if Redis refuses us or does not answer."""
    try:
        num_withdrawn = cancel_requests(redis_url, run_ids)
    except connection.RedisUnavailable as error:
        raise ValueError(f"--redis-url: {error}") from error
    if num_withdrawn:
        say(f"withdrew {num_withdrawn} requests of abandoned runs")


def forget(run_dir: Path) -> None:
    """Removes the run. Removes the data of our own Redis, too, because it contains the run's queue, unless Redis is running."""
    shutil.rmtree(run_dir, ignore_errors=True)
    if not services.redis_answers():
        shutil.rmtree(services.REDIS_DATA, ignore_errors=True)


def bring_up_services(arguments: argparse.Namespace, cleanup: ExitStack) -> None:
    """Starts the services that are needed and do not answer. Services that were running before keep running at the end."""
    for service in services.SERVICES:
        if service.name == "redis" and arguments.redis_url != LOCAL_REDIS:
            continue
        cleanup.callback(services.stop_own, service)
        took_s = services.bring_up(service, attached=True)
        say(f"{service.name} was running" if took_s is None else f"{service.name} started ({took_s:.1f} s)")


def prepare(command: str) -> None:
    """Run one command with its output on the screen. Raises RuntimeError if it fails."""
    words = shlex.split(command)
    if words[0] == "-m":
        words.insert(0, sys.executable)
    child = processes.start(command, words, log=None, death_signal=signal.SIGTERM)
    try:
        status = child.process.wait()
    finally:
        child.stop(PREPARATION_GRACE_S)
    if status:
        raise RuntimeError(f"{command}: ended with status {status}")


def start(supervisor: Supervisor, wanted: Iterable[SupervisedProcess]) -> None:
    for process in wanted:
        supervisor.start(process)


def start_judges(supervisor: Supervisor, judge: LocalJudge, arguments: argparse.Namespace) -> None:
    """Start the judges, with their engine and router if they have any. Raises RuntimeError as `wait_for_engine` does."""
    start(supervisor, (*commands.judge_serving(arguments, judge), *commands.judges(arguments, judge)))
    say(judge.description)
    if judge.model is not None:
        waited_s = wait_for_engine(supervisor, "judge-engine", arguments.judge_router_port)
        say(f"the judge's engine and router ready (waited {waited_s:.1f} s)")


def wait_for_engine(supervisor: Supervisor, name: str, router_port: int) -> float:
    """Wait until the router reaches the engine of this name. Returns the seconds it took; raises RuntimeError if it takes
    too long, or at once if a process ends.
    """
    began_at = time.monotonic()
    while not router_is_ready(router_port):
        supervisor.check_alive()
        if time.monotonic() - began_at > ENGINE_START_S:
            engine = supervisor.running[name][0]
            raise RuntimeError(f"{name} is not ready after {ENGINE_START_S:.0f} s{engine.last_lines()}")
        time.sleep(CHECK_EVERY_S)
    return time.monotonic() - began_at


def router_is_ready(port: int) -> bool:
    """Whether the router reaches an engine."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readiness", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def service_pids() -> dict[str, int]:
    """Process ids of the services that this checkout started, for the memory watch. It finds Docker's processes by their names."""
    pids = {service.name: services.started_pid(service) for service in services.SERVICES}
    return {name: pid for name, pid in pids.items() if pid is not None and name != "docker"}


def report_memory(watch: MemoryWatch, file: Path) -> None:
    peak = watch.peak
    if not peak.total_bytes:
        return
    file.write_bytes(msgspec.json.format(msgspec.json.encode(peak)))
    largest = sorted(peak.parts_bytes.items(), key=lambda part: -part[1])
    listing = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in largest)
    say(f"peak memory {peak.total_bytes / 1e9:.2f} GB ({listing} MB) after {peak.after_s:.0f} s")


def say(line: str) -> None:
    print(f"local: {line}", flush=True)


def abandoned_runs(run_dir: Path, *, fresh: bool) -> list[str]:
    """Ids of the runs that were set aside beside `run_dir`, and with `fresh` also of the run in it."""
    places = [*run_dir.parent.glob(f"{run_dir.name}-seed*"), *([run_dir] if fresh else [])]
    notes = [place / "run.json" for place in places]
    return [json.loads(note.read_text())["run_id"] for note in notes if note.is_file()]


def cancel_requests(redis_url: str, run_ids: list[str]) -> int:
    """Cancels the outstanding requests of these runs and returns their number. Finished trajectories stay."""
    return asyncio.run(_withdraw(redis_url, run_ids))


async def _withdraw(redis_url: str, run_ids: list[str]) -> int:
    redis = await connection.connect(redis_url)
    try:
        gone = [
            await queue.withdraw(redis, run_id, await queue.open_ids(redis, run_id, kind), kind)
            for run_id in run_ids
            for kind in KINDS
        ]
    finally:
        await redis.aclose()
    return sum(map(len, gone))


WORKER_LABEL = "swerve.worker"


def remove_containers(started: Iterable[Child], say: Callable[[str], None]) -> None:
    """Force-remove the containers of the workers among `started`, all of which have ended.

    Other workers on the same Redis and Docker keep theirs: a container's label names the worker that made it.
    """
    owners = {worker_name(child) for child in started if child.name.startswith("worker-")}
    found = [container for container, owner in labelled() if owner in owners]
    if found:
        subprocess.run(["docker", "rm", "--force", "--volumes", *found], capture_output=True, check=False)
        say(f"removed {len(found)} containers that were left")


def worker_name(worker: Child) -> str:
    """The name that the worker gives itself: `workers/settings.py`."""
    return f"{socket.gethostname()}/{worker.pid}"


def labelled() -> list[tuple[str, str]]:
    """Id and worker of every container that a worker made, running or not; nothing if Docker does not answer."""
    words = f'{{{{.ID}}}} {{{{.Label "{WORKER_LABEL}"}}}}'
    listing = ["docker", "ps", "--all", "--filter", f"label={WORKER_LABEL}", "--format", words]
    lines = subprocess.run(listing, capture_output=True, text=True, check=False).stdout.splitlines()
    return [(container, owner) for container, _, owner in (line.partition(" ") for line in lines)]


class StopRequested(BaseException):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def raise_on_signals(numbers: Sequence[signal.Signals], *, afterwards: Callable[[], None]) -> None:
    """Makes the first of `numbers` raise StopRequested from now on, and each further one call `afterwards`."""

    def stop(number: int, frame: FrameType | None) -> None:
        call_on_signals(numbers, afterwards)
        raise StopRequested(number)

    for number in numbers:
        signal.signal(number, stop)


def call_on_signals(numbers: Sequence[signal.Signals], called: Callable[[], None]) -> None:
    for number in numbers:
        signal.signal(number, lambda number, frame: called())


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(__doc__, argv)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    trainers = Supervisor(say)
    raise_on_signals(numbers, afterwards=trainers.hurry)
    with ExitStack() as cleanup:
        try:
            status = run(arguments, cleanup, trainers)
        except StopRequested as stop:
            say(f"{signal.Signals(stop.number).name}: stopping")
            status = 128 + stop.number
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
        except (RuntimeError, OSError, BuildError) as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
        finally:
            call_on_signals(numbers, trainers.hurry)
            services.announce_stop()
    return status


if __name__ == "__main__":
    sys.exit(main())
