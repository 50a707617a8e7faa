"""The system that faults are injected into: what `make demo` runs, with its own ports and directory, few tasks, no evaluations
and a tiny learning rate. Every process is supervised.
"""

import argparse
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from infra import services
from infra.chaos.confinement import GRACE_S, PrivateDocker
from infra.chaos.faults import OF_DOCKERD, Kind
from infra.images.build import IMAGES
from infra.local import commands
from infra.local.commands import METRICS_PORT_OFFSET, parse_arguments, starting_model
from infra.processes import Child, SupervisedProcess, Supervisor, reap_orphans
from pipeline.harness import read_harness

RECIPE = services.ROOT / "trainer/recipes/demo.toml"
RUN_ID = "chaos"
NUM_TASKS = 6
NUM_WORKERS, NUM_SLOTS = 2, 4
JUDGE_NAME = "judge-1"
MARK = b"minisweagent.run.mini"  # occurs in the command line of the agent program's process and of no other
NEVER = 1_000_000  # more steps than a campaign reaches: the campaign ends the run
SETTINGS = (
    *(
        "evaluation.episodes=0",
        "evaluation.greedy_episodes=0",
        "tasks.heldout=",
        "tasks.heldout_sets={}",
        "tasks.unverified=allow",
    ),
    *("rollout.group_size=4", "batch.groups_per_step=2", "batch.train_without_signal=true"),
    *("checkpoint.every_steps=2", "learner.lr=1e-6", "learner.lr_min=0.0", "learner.num_epochs=1"),
    *("weights.keep=2", f"num_steps={NEVER}", f"batch.max_failed_groups={NEVER}"),
    f"batch.max_groups_without_signal={NEVER}",
    *("judge.method=function", "judge.name=slowly", "credit.method=outcome_then_steps"),
)
# The built-in rule, slowed down so that kills meet judgements that are being made.
JUDGE_FUNCTION = """import time

from workers.judge.functions import judge_by_commands

def slowly(issue, turns, index):
    time.sleep(0.2)
    return judge_by_commands(issue, turns, index)
"""
ALLOWED_DEATHS = NEVER  # we cause them
NICE = ("nice", "-n", "5")
FIRST_PORT, LAST_PORT = 32_000, 32_750  # below the kernel's ephemeral ports, above the ports of our tests
REDIS, ENGINE, ROUTER = 0, 1, 2  # offsets from the first port of a system


@dataclass(frozen=True, slots=True)
class System:
    """The running processes. The supervisors are stopped in the opposite order."""

    root: Path
    arguments: argparse.Namespace
    docker: PrivateDocker
    program_image: str  # image of the agent program that plays; empty: the built-in loop plays
    services: Supervisor
    serving: Supervisor
    workers: Supervisor
    trainers: Supervisor
    say: Callable[[str], None]

    @property
    def supervisors(self) -> tuple[Supervisor, ...]:
        return self.services, self.serving, self.workers, self.trainers

    @property
    def engine_url(self) -> str:
        return f"http://127.0.0.1:{self.arguments.engine_port}"

    @property
    def router_url(self) -> str:
        return f"http://127.0.0.1:{self.arguments.router_port}"

    @property
    def temporary(self) -> Path:
        """The parent of every process's TMPDIR."""
        return self.root / "tmp"

    def restart_dead(self) -> None:
        """Start again what has died. Call it often."""
        reap_orphans({pid for supervisor in self.supervisors for pid in supervisor.pids().values()})
        for supervisor in self.supervisors:
            supervisor.restart_dead()

    def child(self, name: str) -> Child:
        return next(one.running[name][1] for one in self.supervisors if name in one.running)

    def kill(self, kind: Kind, rng: random.Random) -> Child | None:
        """Send SIGKILL to one process of this kind. Returns it, or None if none runs. For what dockerd started, returns dockerd."""
        if kind in OF_DOCKERD:
            dockerd = self.child("dockerd")
            return dockerd if dockerd.alive and self._kill_of_dockerd(kind, dockerd, rng) else None
        names = {"worker": f"worker-{rng.randint(1, NUM_WORKERS)}", "judge": JUDGE_NAME}
        child = self.child(names.get(kind, kind))
        if not child.alive:
            return None
        child.process.kill()
        return child

    def _kill_of_dockerd(self, kind: Kind, dockerd: Child, rng: random.Random) -> bool:
        if kind != "containerd":
            return self.docker.kill_in_container(mark=MARK if kind == "program" else None, rng=rng)
        pid = self.docker.containerd(dockerd)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return pid is not None

    def supervised(self) -> dict[str, tuple[Kind, Supervisor, SupervisedProcess]]:
        """Every process by its name, in the order of starting, with its kind and its supervisor."""
        model = starting_model(self.arguments)
        found: list[tuple[Kind, Supervisor, SupervisedProcess]] = [
            ("redis", self.services, self._service("redis", self._redis_command)),
            ("dockerd", self.services, self._dockerd()),
        ]
        engine, router = commands.serving(self.arguments, model)
        found.append(("engine", self.serving, engine))
        found.append(("router", self.serving, router))
        found.extend(("worker", self.workers, one) for one in commands.workers(self.arguments))
        found.append(("judge", self.workers, self._judge()))
        found.append(("trainer", self.trainers, commands.trainer(self.arguments, self.say)))
        return {one.name: (kind, supervisor, self._in_our_place(one)) for kind, supervisor, one in found}

    @property
    def _redis_command(self) -> list[str]:
        command = ["redis-server", str(services.ROOT / "infra/redis/redis.conf"), "--bind", "127.0.0.1"]
        return [*command, "--port", str(self.arguments.redis_port), "--dir", str(self.root / "redis")]

    def _dockerd(self) -> SupervisedProcess:
        return replace(self._service("dockerd", self.docker.command), clean_up=self.docker.end_shims)

    def _judge(self) -> SupervisedProcess:
        process = commands.worker(self.arguments, JUDGE_NAME, "workers.judge")
        functions = {"SWERVE_JUDGE_FUNCTIONS": f"{self.root / 'judge.py'}:slowly"}
        return replace(process, environment={**process.environment, **functions})

    def _service(self, name: str, command: list[str]) -> SupervisedProcess:
        return commands.supervised(self.arguments, name, partial(list, command), GRACE_S, signal.SIGTERM)

    def _in_our_place(self, process: SupervisedProcess) -> SupervisedProcess:
        """The process configured for our dockerd and directories, with a low priority."""
        places = {"DOCKER_HOST": self.docker.url, "SWERVE_STATE_DIR": str(self.root / "state")}
        return replace(
            process,
            command=partial(_nicely, process.command),
            environment={**process.environment, **places},
            scratch=self.temporary / process.name,
            log=self.arguments.run_dir / "logs" / f"{process.name}.log",
        )

    def limit_steps(self, num_steps: int) -> None:
        """Makes the trainer end after this number of steps in total, from its next start on."""
        self.arguments.passed_on += ["--set", f"num_steps={num_steps}"]


@contextmanager
def exclusive_directory(root: Path) -> Iterator[Path]:
    """Yields `root`, emptied and locked. Raises RuntimeError if another campaign runs there."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with (root.parent / f".{root.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(
                f"another campaign runs in {root}; wait for its end, or give another --dir"
            ) from error
        remove_data(root)
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        yield root


def remove_data(root: Path) -> None:
    """Remove the large files of a system that has ended. Logs and journal stay for people to read."""
    PrivateDocker(root / "docker").wipe()
    for name in ("redis", "state", "tmp", "family", "run/weights", "run/checkpoints", "run/traces"):
        shutil.rmtree(root / name, ignore_errors=True)


def new_system(root: Path, *, seed: int, with_program: bool, say: Callable[[str], None]) -> System:
    """Directories and ports for a system that does not run yet."""
    for name in ("redis", "state", "tmp", "docker"):
        (root / name).mkdir()
    (root / "judge.py").write_text(JUDGE_FUNCTION)
    supervisors = (Supervisor(say, max_deaths=ALLOWED_DEATHS) for _ in range(4))
    image, settings = "", list[str]()
    if with_program:
        file = root / "program.toml"
        write = [sys.executable, "-m", "trainer.demo", "program", "--out", str(file)]
        subprocess.run(write, cwd=services.ROOT, check=True, stdout=subprocess.DEVNULL)
        image, settings = (
            read_harness(file).harness.image,
            [f"rollout.harness={file}", "rollout.context.policy=stop"],
        )
    arguments = _arguments(root, seed, settings)
    return System(root, arguments, PrivateDocker(root / "docker"), image, *supervisors, say=say)


def write_tasks(system: System) -> None:
    """Makes a few tasks, and their images in our dockerd. Raises RuntimeError."""
    family, tasks = system.root / "family", system.root / "train.jsonl"
    counts = ["--train", str(NUM_TASKS), "--heldout", "0"]
    _run(system, "trainer.demo", "tasks", "--out", str(family), *counts)
    _run(system, "workers.tasksets", "import", "fleet", str(family / "train"), "--out", str(tasks))
    if not system.docker.copy_image(IMAGES["task-base"].tag):
        _run(system, "infra.images.build", "task-base")
    _run(system, "trainer.demo", "images", str(family))
    if system.program_image and not system.docker.copy_image(system.program_image):
        raise RuntimeError(
            f"{system.program_image} is not on this machine: run python -m workers.harness build mini"
        )


def _arguments(root: Path, seed: int, more: Sequence[str]) -> argparse.Namespace:
    first = _free_ports(random.Random(os.getpid()))
    settings = [f"seed={seed}", f"tasks.train={root / 'train.jsonl'}", *SETTINGS, *more]
    arguments = parse_arguments(
        None,
        [
            str(RECIPE),
            f"--run-dir={root / 'run'}",
            f"--workers={NUM_WORKERS}",
            f"--slots={NUM_SLOTS}",
            f"--redis-url=redis://127.0.0.1:{first + REDIS}/0",
            f"--engine-port={first + ENGINE}",
            f"--router-port={first + ROUTER}",
            *("--", "--run-id", RUN_ID, *(word for one in settings for word in ("--set", one))),
        ],
    )
    arguments.redis_port = first + REDIS
    return arguments


def _free_ports(rng: random.Random) -> int:
    """The first of consecutive ports of which those that a system uses are free."""
    while True:
        first = rng.randrange(FIRST_PORT, LAST_PORT)
        with ExitStack() as held:
            try:
                for offset in (REDIS, ENGINE, ROUTER, ROUTER + METRICS_PORT_OFFSET):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", first + offset))
            except OSError:
                continue
            return first


def _nicely(command: Callable[[], Sequence[str]]) -> list[str]:
    return [*NICE, *command()]


def _run(system: System, *words: str) -> None:
    environment = {**os.environ, "DOCKER_HOST": system.docker.url}
    done = subprocess.run(
        [*NICE, sys.executable, "-m", *words], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: ended with status {done.returncode}\n{done.stderr}")
