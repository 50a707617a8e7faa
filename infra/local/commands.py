"""The processes that run under supervision on one machine, and how each is started; those of a judge are in judging.py."""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from infra import ports
from infra.local.arguments import METRICS_PORT_OFFSET
from infra.supervisor import SupervisedProcess

# How long a SIGTERM may take: the trainer writes a checkpoint, a worker returns its episodes to the queue.
# The trainer ends its optimizer step first, minutes for a pretrained model. A second Ctrl-C does not wait.
TRAINER_GRACE_S = 600.0
WORKER_GRACE_S = 20.0
SERVING_GRACE_S = 2.0
PAGES_GRACE_S = 5.0


def serving(arguments: argparse.Namespace, model: Path) -> Iterator[SupervisedProcess]:
    """The engine, then the router in front of it."""
    limits = [f"--max-total-tokens={arguments.max_total_tokens}"] if arguments.max_total_tokens else []
    yield engine(arguments, "engine", model, arguments.engine_port, *limits)
    yield router(arguments, "router", arguments.router_port, arguments.engine_port)


def engine(
    arguments: argparse.Namespace, name: str, model: Path, port: int, *flags: str
) -> SupervisedProcess:
    command = [sys.executable, "-m", "infra.serving.engine", f"--model={model}"]
    command += [f"--port={port}", f"--device={arguments.device}", f"--num-threads={arguments.engine_threads}"]
    command += [f"--dtype={arguments.dtype}"] if arguments.dtype else []
    return supervised(arguments, name, partial(list, [*command, *flags]), SERVING_GRACE_S, signal.SIGKILL)


def router(arguments: argparse.Namespace, name: str, port: int, engine_port: int) -> SupervisedProcess:
    command = [sys.executable, "-m", "infra.serving.router", f"--port={port}"]
    command += [f"--engine=http://127.0.0.1:{engine_port}", f"--metrics-port={port + METRICS_PORT_OFFSET}"]
    return supervised(arguments, name, partial(list, command), SERVING_GRACE_S, signal.SIGKILL)


def workers(arguments: argparse.Namespace) -> Iterator[SupervisedProcess]:
    for number in range(1, arguments.workers + 1):
        yield worker(arguments, f"worker-{number}", "workers.run")


def worker(arguments: argparse.Namespace, name: str, module: str) -> SupervisedProcess:
    """A process that claims requests from the queue, and drains at SIGTERM."""
    command = [sys.executable, "-m", module]
    return supervised(arguments, name, partial(list, command), WORKER_GRACE_S, signal.SIGTERM)


def pages(arguments: argparse.Namespace, say: Callable[[str], None]) -> SupervisedProcess:
    """The pages of the run. They stop with it; `swerve web --run-dir` shows it afterwards."""
    return supervised(arguments, "web", partial(pages_command, arguments, say), PAGES_GRACE_S, signal.SIGTERM)


def pages_command(arguments: argparse.Namespace, say: Callable[[str], None]) -> list[str]:
    """On the wanted port or the next free one, which is said: another program there is no reason not to train."""
    port = ports.next_free(arguments.web_port)
    taken = "" if port == arguments.web_port else f" (port {arguments.web_port} is in use)"
    say(f"the run in a browser: http://127.0.0.1:{port}/{taken}")
    command = [sys.executable, "-m", "infra.web", f"--port={port}", f"--run-dir={arguments.run_dir}"]
    return [*command, f"--redis={arguments.redis_url}"]


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
    """What each of our processes reads from its environment. A worker's or judge's own name must differ from the others'."""
    names = ("SWERVE_WORKER_NAME", "SWERVE_JUDGE_NAME")
    inherited = {key: value for key, value in os.environ.items() if key not in names}
    return inherited | {
        "SWERVE_REDIS_URL": arguments.redis_url,
        "SWERVE_ROUTER_URL": f"http://127.0.0.1:{arguments.router_port}",
        "SWERVE_SLOTS": str(arguments.slots),
        "SWERVE_TRACE_FILE": str(arguments.run_dir / "traces" / f"{name}.jsonl"),
        "OMP_NUM_THREADS": "1",
    }
