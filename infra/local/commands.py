"""The processes that run under supervision on one machine: engine, router, workers, trainer, and how each is started."""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from infra.local.arguments import METRICS_PORT_OFFSET
from infra.supervisor import SupervisedProcess

# How long a SIGTERM may take: the trainer writes a checkpoint, a worker returns its episodes to the queue.
TRAINER_GRACE_S = 60.0
WORKER_GRACE_S = 20.0
SERVING_GRACE_S = 2.0


def serving(arguments: argparse.Namespace, model: Path) -> Iterator[SupervisedProcess]:
    """The engine, then the router in front of it."""
    commands = {"engine": engine_command(arguments, model), "router": router_command(arguments)}
    for name, command in commands.items():
        yield supervised(arguments, name, partial(list, command), SERVING_GRACE_S, signal.SIGKILL)


def engine_command(arguments: argparse.Namespace, model: Path) -> list[str]:
    command = [sys.executable, "-m", "infra.serving.engine", f"--model={model}"]
    command += [f"--port={arguments.engine_port}", f"--device={arguments.device}"]
    command += [f"--dtype={arguments.dtype}"] if arguments.dtype else []
    command += [f"--max-total-tokens={arguments.max_total_tokens}"] if arguments.max_total_tokens else []
    return command


def router_command(arguments: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "infra.serving.router", f"--port={arguments.router_port}"]
    command += [f"--engine=http://127.0.0.1:{arguments.engine_port}"]
    return [*command, f"--metrics-port={arguments.router_port + METRICS_PORT_OFFSET}"]


def workers(arguments: argparse.Namespace) -> Iterator[SupervisedProcess]:
    command = [sys.executable, "-m", "workers.run"]
    for number in range(1, arguments.workers + 1):
        name = f"worker-{number}"
        yield supervised(arguments, name, partial(list, command), WORKER_GRACE_S, signal.SIGTERM)


def trainer(arguments: argparse.Namespace, say: Callable[[str], None]) -> SupervisedProcess:
    """It writes to our own output."""
    command = partial(trainer_command, arguments, say)
    process = supervised(arguments, "trainer", command, TRAINER_GRACE_S, signal.SIGTERM)
    return replace(process, log=None, finishes=True)


def trainer_command(arguments: argparse.Namespace, say: Callable[[str], None]) -> list[str]:
    """It resumes the run in the run directory if there is one."""
    command = [sys.executable, "-m", "trainer.run", str(arguments.recipe)]
    command += ["--run-dir", str(arguments.run_dir)]
    if (arguments.run_dir / "run.json").exists():
        say(f"resuming the run in {arguments.run_dir}")
        command.append("--resume")
    return [*command, *arguments.passed_on]


def supervised(
    arguments: argparse.Namespace,
    name: str,
    command: Callable[[], Sequence[str]],
    grace_s: float,
    death_signal: signal.Signals,
) -> SupervisedProcess:
    """A process that writes to the run's logs."""
    return SupervisedProcess(
        name,
        command,
        environment(arguments, name),
        log=arguments.run_dir / "logs" / f"{name}.log",
        grace_s=grace_s,
        death_signal=death_signal,
        scratch=Path(tempfile.gettempdir(), f"swerve-{arguments.router_port}-{name}"),
    )


def environment(arguments: argparse.Namespace, name: str) -> dict[str, str]:
    """What each of our processes reads from its environment. A worker's own name must differ from the others'."""
    inherited = {key: value for key, value in os.environ.items() if key != "SWERVE_WORKER_NAME"}
    return inherited | {
        "SWERVE_REDIS_URL": arguments.redis_url,
        "SWERVE_ROUTER_URL": f"http://127.0.0.1:{arguments.router_port}",
        "SWERVE_SLOTS": str(arguments.slots),
        "SWERVE_TRACE_FILE": str(arguments.run_dir / "traces" / f"{name}.jsonl"),
        "OMP_NUM_THREADS": "1",
    }
