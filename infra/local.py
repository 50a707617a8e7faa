"""The whole system on one machine: ``make demo`` is this.

    python -m infra.local RECIPE.toml --run-dir runs/demo [--workers 2] [--slots 6] [-- TRAINER FLAGS]

Starts what is missing in order (Redis and Docker, base image, engine and router, workers), then the
trainer, which goes on with the run in the run directory if there is one, with its output on the screen;
everything else writes to ``RUN_DIR/logs/``. What dies is started again and a line says so: engine, router and
workers always, the trainer if a signal ended it, Redis and Docker if they were started here. When the trainer
ends by itself, or on Ctrl-C or SIGTERM, everything is stopped in the opposite order,
containers of the fleet are removed and the peak of memory is written to ``RUN_DIR/memory.json``. Services
that answered before are left running. If this process is killed outright, the kernel ends what it started.

Exit status: the trainer's; 130 after Ctrl-C, 143 after SIGTERM.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec
import redis

from infra import leftovers, processes, services
from infra.commandline import parse_own_part
from infra.fleet import Fleet, Part
from infra.images.build import IMAGES, BuildError, ensure_image
from infra.memory import MemoryWatch
from pipeline import keys

EPILOG = "Flags after -- go to the trainer as they are."
ENGINE_START_S = 600.0
CHECK_EVERY_S = 0.5
# How long a SIGTERM may take: the trainer writes a checkpoint, a worker hands its episodes back, a preparation removes containers.
TRAINER_GRACE_S = 60.0
WORKER_GRACE_S = 20.0
PREPARATION_GRACE_S = 10.0
SERVING_GRACE_S = 2.0
TASK_IMAGE = IMAGES["task-base"]
FLEET_LABEL = "swerve.fleet"
LOCAL_REDIS = f"redis://127.0.0.1:{services.REDIS_PORT}/0"


class Stopped(BaseException):
    """A signal asked us to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m infra.local", description="Run everything on this machine.", epilog=EPILOG
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE.toml")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="what the engine starts from; default: the recipe's model")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=6, help="episodes at once per worker")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the engine")
    parser.add_argument("--dtype", help="of the engine")
    parser.add_argument("--max-total-tokens", type=int, help="of the engine's KV cache")
    parser.add_argument("--router-port", type=int, default=30000)
    parser.add_argument("--engine-port", type=int, default=30001)
    parser.add_argument("--redis-url", default=LOCAL_REDIS)
    parser.add_argument(
        "--fresh", action="store_true", help="forget the run in --run-dir; default: go on with it"
    )
    parser.add_argument(
        "--prepare",
        action="append",
        default=[],
        metavar="COMMAND",
        help="to be run when services and base image are there; '-m MODULE ...' is one of Python's",
    )
    return parse_own_part(parser, argv)


def serving_parts(arguments: argparse.Namespace) -> Iterator[Part]:
    """The engine, and the router before it. Raises ValueError if no model is named."""
    model = arguments.model or starting_model(arguments.recipe)
    commands = {"engine": engine_command(arguments, model), "router": router_command(arguments)}
    for name, command in commands.items():
        yield part(arguments, name, partial(list, command), SERVING_GRACE_S, signal.SIGKILL)


def engine_command(arguments: argparse.Namespace, model: Path) -> list[str]:
    command = [sys.executable, "-m", "infra.serving.engine", f"--model={model}"]
    command += [f"--port={arguments.engine_port}", f"--device={arguments.device}"]
    command += [f"--dtype={arguments.dtype}"] if arguments.dtype else []
    command += [f"--max-total-tokens={arguments.max_total_tokens}"] if arguments.max_total_tokens else []
    return command


def router_command(arguments: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "infra.serving.router", f"--port={arguments.router_port}"]
    command += [f"--engine=http://127.0.0.1:{arguments.engine_port}"]
    return [*command, f"--metrics-port={arguments.router_port + 9}"]


def worker_parts(arguments: argparse.Namespace) -> Iterator[Part]:
    command = [sys.executable, "-m", "workers.run"]
    for number in range(1, arguments.workers + 1):
        yield part(arguments, f"worker-{number}", partial(list, command), WORKER_GRACE_S, signal.SIGTERM)


def trainer_part(arguments: argparse.Namespace) -> Part:
    command = partial(trainer_command, arguments)
    trainer = part(arguments, "trainer", command, TRAINER_GRACE_S, signal.SIGTERM)
    return replace(trainer, log=None, finishes=True)


def part(
    arguments: argparse.Namespace,
    name: str,
    command: Callable[[], Sequence[str]],
    grace_s: float,
    death_signal: signal.Signals,
) -> Part:
    """One that writes to the run's logs."""
    log = arguments.run_dir / "logs" / f"{name}.log"
    scratch = Path(tempfile.gettempdir(), f"swerve-{arguments.router_port}-{name}")
    return Part(name, command, environment(arguments, name), log, grace_s, death_signal, scratch=scratch)


def environment(arguments: argparse.Namespace, name: str) -> dict[str, str]:
    """What each of our processes reads from its environment."""
    return dict(os.environ) | {
        "SWERVE_REDIS_URL": arguments.redis_url,
        "SWERVE_ROUTER_URL": f"http://127.0.0.1:{arguments.router_port}",
        "SWERVE_SLOTS": str(arguments.slots),
        "SWERVE_TRACE_FILE": str(arguments.run_dir / "traces" / f"{name}.jsonl"),
        "OMP_NUM_THREADS": "1",
    }


def starting_model(recipe: Path) -> Path:
    """The recipe's ``model``, relative to the recipe as all its paths are. Raises ValueError."""
    model = tomllib.loads(recipe.read_text()).get("model")
    if not isinstance(model, str):
        raise ValueError(
            f"{recipe}: no model in it; give the directory of a checkpoint, here or with --model"
        )
    return (recipe.resolve().parent / model).resolve()


def run(arguments: argparse.Namespace, cleanup: ExitStack) -> int:
    """Everything from the services to the trainer's end; ``cleanup`` undoes it in the opposite order."""
    processes.adopt_orphans()
    for service in services.SERVICES:
        services.await_departure(service)
    given_up = leftovers.given_up(arguments.run_dir, fresh=arguments.fresh)
    if arguments.fresh:
        forget(arguments.run_dir)
    (arguments.run_dir / "traces").mkdir(parents=True, exist_ok=True)
    bring_up_services(arguments, cleanup)
    if num_withdrawn := leftovers.withdraw(arguments.redis_url, given_up):
        say(f"{num_withdrawn} requests of runs set aside are withdrawn")
    began_at = time.monotonic()
    if ensure_image(TASK_IMAGE):
        say(f"image {TASK_IMAGE.tag} made ({time.monotonic() - began_at:.1f} s)")
    for command in arguments.prepare:
        prepare(command)
    fleet, trainers = Fleet(say), Fleet(say)
    watch = MemoryWatch(lambda: service_pids() | fleet.pids() | trainers.pids())
    cleanup.callback(report_memory, watch, arguments.run_dir / "memory.json")
    cleanup.enter_context(watch)
    cleanup.callback(fleet.stop)
    start_fleet(fleet, arguments)
    cleanup.callback(trainers.stop)
    trainers.start(trainer_part(arguments))
    while (status := trainers.ended("trainer")) is None:
        time.sleep(CHECK_EVERY_S)
        processes.bury_orphans({*services.child_pids(), *fleet.pids().values(), *trainers.pids().values()})
        services.revive(say)
        fleet.revive()
        trainers.revive()
    return status


def start_fleet(fleet: Fleet, arguments: argparse.Namespace) -> None:
    """Engine, router and workers; returns when the router can reach the engine."""
    for one in (*serving_parts(arguments), *worker_parts(arguments)):
        fleet.start(one)
    logs = arguments.run_dir / "logs"
    say(f"engine, router, {arguments.workers} workers with {arguments.slots} slots each: logs in {logs}")
    await_serving(fleet, arguments.router_port)


def trainer_command(arguments: argparse.Namespace) -> list[str]:
    """It goes on with the run in the run directory if there is one."""
    command = [
        sys.executable,
        "-m",
        "trainer.run",
        str(arguments.recipe),
        "--run-dir",
        str(arguments.run_dir),
    ]
    if (arguments.run_dir / "run.json").exists():
        say(f"going on with the run in {arguments.run_dir}")
        command.append("--resume")
    return [*command, *arguments.passed_on]


def forget(run_dir: Path) -> None:
    """Remove the run, and the data of our own Redis unless it is running: a queue of work for a run that is
    gone.
    """
    shutil.rmtree(run_dir, ignore_errors=True)
    if not services.redis_answers():
        shutil.rmtree(services.REDIS_DATA, ignore_errors=True)


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


def bring_up_services(arguments: argparse.Namespace, cleanup: ExitStack) -> None:
    """Those that are needed and do not answer; they end with us."""
    for service in services.SERVICES:
        if service.name == "redis" and arguments.redis_url != LOCAL_REDIS:
            continue
        cleanup.callback(services.take_down, service)
        took_s = services.bring_up(service, attached=True)
        say(f"{service.name} was running" if took_s is None else f"{service.name} started ({took_s:.1f} s)")
    cleanup.callback(remove_containers, arguments.redis_url)


def service_pids() -> dict[str, int]:
    """Of those that we started; Docker's processes are found by name, whoever started them."""
    pids = {service.name: services.started_pid(service) for service in services.SERVICES}
    return {name: pid for name, pid in pids.items() if pid is not None and name != "docker"}


def await_serving(fleet: Fleet, router_port: int) -> None:
    """Return when the router can reach the engine. Raises RuntimeError if that does not come about."""

    def ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{router_port}/readiness", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    began_at = time.monotonic()
    engine, child = fleet.running["engine"]
    assert engine.log is not None, "it does not write to our own output"
    processes.wait_until(ready, child=child, timeout_s=ENGINE_START_S, log=engine.log)
    say(f"engine and router ready (waited {time.monotonic() - began_at:.1f} s)")


def remove_containers(redis_url: str) -> None:
    """What the workers left behind: containers with the label of this Redis's fleet."""
    try:
        with redis.Redis.from_url(redis_url) as client:
            fleet = client.get(keys.fleet())
    except redis.RedisError as error:
        say(f"Redis does not answer ({error}); containers of its fleet, if any, were left")
        return
    if not isinstance(fleet, bytes):
        return
    listing = ["docker", "ps", "--all", "--quiet", "--filter", f"label={FLEET_LABEL}={fleet.decode()}"]
    found = subprocess.run(listing, capture_output=True, text=True, check=False).stdout.split()
    if found:
        subprocess.run(["docker", "rm", "--force", "--volumes", *found], capture_output=True, check=False)
        say(f"removed {len(found)} containers that were left")


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


def listen_to_signals(numbers: Sequence[signal.Signals]) -> None:
    """From now on the first of ``numbers`` raises Stopped, and the others are ignored."""

    def stop(number: int, frame: FrameType | None) -> None:
        ignore_signals(numbers)
        raise Stopped(number)

    for number in numbers:
        signal.signal(number, stop)


def ignore_signals(numbers: Sequence[signal.Signals]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    listen_to_signals(numbers)
    with ExitStack() as cleanup:
        try:
            status = run(arguments, cleanup)
        except Stopped as stopped:
            say(f"{signal.Signals(stopped.number).name}: stopping")
            status = 128 + stopped.number
        except (RuntimeError, ValueError, OSError, BuildError) as error:
            print(f"local: {error}", file=sys.stderr)
            status = 1
        finally:
            ignore_signals(numbers)
            services.announce_stop()
    return status


if __name__ == "__main__":
    sys.exit(main())
