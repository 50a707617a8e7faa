"""A whole system of our own, on ports and under a directory of its own, each process kept alive: what ``make demo``
runs, with few tasks, without evaluations, and with weights that hardly move.
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
from infra.chaos.dockers import GRACE_S, PrivateDocker
from infra.chaos.victims import Kind
from infra.images.build import IMAGES
from infra.local import commands
from infra.local.arguments import METRICS_PORT_OFFSET, parse_arguments, starting_model
from infra.processes import Child, reap_orphans
from infra.supervisor import SupervisedProcess, Supervisor

RECIPE = services.ROOT / "trainer/recipes/demo.toml"
RUN_ID = "chaos"
NUM_TASKS = 6
NUM_WORKERS, NUM_SLOTS = 2, 4
NEVER = 1_000_000  # more than will be: the run ends when we say so
SETTINGS = (
    *("evaluation.episodes=0", "evaluation.greedy_episodes=0", "tasks.heldout=", "tasks.unverified=allow"),
    *("rollout.group_size=4", "batch.groups_per_step=2", "batch.train_without_signal=true"),
    *("checkpoint.every_steps=2", "learner.lr=1e-6", "learner.lr_min=0.0", "learner.num_epochs=1"),
    *("weights.keep=2", f"num_steps={NEVER}", f"batch.max_failed_groups={NEVER}"),
    f"batch.max_groups_without_signal={NEVER}",
)
ALLOWED_DEATHS = NEVER  # we are the cause of them
NICE = ("nice", "-n", "5")
FIRST_PORT, LAST_PORT = 21_000, 31_000  # below those that the kernel hands out
REDIS, ENGINE, ROUTER = 0, 1, 2  # ports, from the first of a system


@dataclass(frozen=True, slots=True)
class System:
    """The running processes. Supervisors are ended last to first."""

    root: Path
    arguments: argparse.Namespace
    docker: PrivateDocker
    services: Supervisor
    serving: Supervisor
    workers: Supervisor
    trainers: Supervisor
    say: Callable[[str], None]

    @property
    def fleets(self) -> tuple[Supervisor, ...]:
        return self.services, self.serving, self.workers, self.trainers

    @property
    def engine_url(self) -> str:
        return f"http://127.0.0.1:{self.arguments.engine_port}"

    @property
    def router_url(self) -> str:
        return f"http://127.0.0.1:{self.arguments.router_port}"

    @property
    def temporary(self) -> Path:
        """Where all of them put what is temporary."""
        return self.root / "tmp"

    def tend(self) -> None:
        """Start again what has died; to be called often."""
        reap_orphans({pid for fleet in self.fleets for pid in fleet.pids().values()})
        for fleet in self.fleets:
            fleet.restart_dead()

    def child(self, name: str) -> Child:
        return next(fleet.running[name][1] for fleet in self.fleets if name in fleet.running)

    def kill(self, kind: Kind, dice: random.Random) -> Child | None:
        """SIGKILL one process of this kind. Returns it, or None if there was none to be killed; of containerd, which is not
        ours, its parent.
        """
        if kind == "containerd":
            dockerd = self.child("dockerd")
            pid = self.docker.containerd(dockerd) if dockerd.alive else None
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            return dockerd if pid is not None else None
        child = self.child(f"worker-{dice.randint(1, NUM_WORKERS)}" if kind == "worker" else kind)
        if not child.alive:
            return None
        child.process.kill()
        return child

    def parts(self) -> dict[str, tuple[Supervisor, SupervisedProcess]]:
        """All of them in the order in which they can be started, with the fleet that each belongs to."""
        engine, router = commands.serving(self.arguments, starting_model(self.arguments))
        everything = [
            *((self.services, one) for one in self._service_parts()),
            *((self.serving, one) for one in (engine, router)),
            *((self.workers, one) for one in commands.workers(self.arguments)),
            (self.trainers, commands.trainer(self.arguments, self.say)),
        ]
        return {part.name: (fleet, self._as_ours(part)) for fleet, part in everything}

    def _service_parts(self) -> list[SupervisedProcess]:
        data = self.root / "redis"
        redis = ["redis-server", str(services.ROOT / "infra/redis/redis.conf"), "--bind", "127.0.0.1"]
        redis += ["--port", str(self.arguments.redis_port), "--dir", str(data)]
        commands = {"redis": redis, "dockerd": self.docker.command}
        parts = [
            commands.supervised(self.arguments, name, partial(list, command), GRACE_S, signal.SIGTERM)
            for name, command in commands.items()
        ]
        return [
            replace(one, clean_up=self.docker.end_shims) if one.name == "dockerd" else one for one in parts
        ]

    def _as_ours(self, part: SupervisedProcess) -> SupervisedProcess:
        environment = {
            "DOCKER_HOST": self.docker.url,
            "SWERVE_STATE_DIR": str(self.root / "state"),
        }
        return replace(
            part,
            command=partial(_nicely, part.command),
            environment={**part.environment, **environment},
            scratch=self.temporary / part.name,
            log=self.arguments.run_dir / "logs" / f"{part.name}.log",
        )

    def run_out(self, num_steps: int) -> None:
        """From its next start the trainer makes so many steps in all, and ends."""
        self.arguments.passed_on += ["--set", f"num_steps={num_steps}"]


@contextmanager
def place_of_its_own(root: Path) -> Iterator[Path]:
    """``root``, empty and ours. Raises RuntimeError if another system runs there."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with (root.parent / f".{root.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(
                f"chaos reigns in {root} already; wait for its end, or give another --dir"
            ) from error
        clear(root)
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        yield root


def clear(root: Path) -> None:
    """Remove what is large of a system that has ended, and what nobody could make use of; logs and journal stay, for
    people.
    """
    PrivateDocker(root / "docker").wipe()
    for name in ("redis", "state", "tmp", "family", "run/weights", "run/checkpoints", "run/traces"):
        shutil.rmtree(root / name, ignore_errors=True)


def prepare(root: Path, *, seed: int, say: Callable[[str], None]) -> System:
    """Directories and ports of a system that does not run yet."""
    for name in ("redis", "state", "tmp", "docker"):
        (root / name).mkdir()
    fleets = (Supervisor(say, max_deaths=ALLOWED_DEATHS) for _ in range(4))
    return System(root, _arguments(root, seed), PrivateDocker(root / "docker"), *fleets, say=say)


def write_tasks(system: System) -> None:
    """A few tasks, and their images on the engine of ours. Raises RuntimeError."""
    family, tasks = system.root / "family", system.root / "train.jsonl"
    counts = ["--train", str(NUM_TASKS), "--heldout", "0"]
    _run(system, "trainer.demo", "tasks", "--out", str(family), *counts)
    _run(system, "trainer.tasksets", "import", "fleet", str(family / "train"), "--out", str(tasks))
    if not system.docker.copy_image(IMAGES["task-base"].tag):
        _run(system, "infra.images.build", "task-base")
    _run(system, "trainer.demo", "images", str(family))


def _arguments(root: Path, seed: int) -> argparse.Namespace:
    first = _free_ports(random.Random(os.getpid()))
    settings = [f"seed={seed}", f"tasks.train={root / 'train.jsonl'}", *SETTINGS]
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


def _free_ports(dice: random.Random) -> int:
    """The first of a row of ports in which all that a system needs are free."""
    while True:
        first = dice.randrange(FIRST_PORT, LAST_PORT)
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
