"""Redis and Docker on one machine: started where none answers, and only what was started here is stopped
again.

    python -m infra.services up | down | status

What answers already is left alone, by ``up`` and by ``down``; unless we started it and it is on its way out,
as after Ctrl-C in another terminal: then ``up`` waits for its end and starts its own. Logs, data and the notes
of what we started are under ``.run/`` at the repository's root.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import redis

from infra import processes
from infra.shims import end_shims

ROOT = Path(__file__).parents[1]
RUN = ROOT / ".run"
REDIS_DATA = RUN / "redis"
REDIS_PORT = 6379
DOCKER_EXEC_ROOT = Path("/var/run/docker")  # its default
START_S = 60.0
STOP_S = 30.0
# Somebody else's stop in good order: the trainer's checkpoint, the workers' episodes, then the services.
DEPARTURE_S = 150.0


@dataclass(frozen=True, slots=True)
class Service:
    """``sweep`` removes what it leaves behind when it is killed."""

    name: str
    command: tuple[str, ...]
    answers: Callable[[], bool]
    sweep: Callable[[], object] = lambda: None

    @property
    def log(self) -> Path:
        return RUN / f"{self.name}.log"

    @property
    def note(self) -> Path:
        """Says that we started it: its process id and when that process began, the same of the process that
        it ends with (twice 0 if there is none), and whether that one has begun to stop.
        """
        return RUN / f"{self.name}.started"


def redis_answers() -> bool:
    with redis.Redis(port=REDIS_PORT, socket_connect_timeout=2, socket_timeout=2) as client:
        try:
            return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except redis.RedisError:
            return False


def docker_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "version"], capture_output=True, check=False).returncode == 0


SERVICES = (
    Service(
        "redis",
        (
            *("redis-server", str(ROOT / "infra/redis/redis.conf"), "--bind", "127.0.0.1"),
            *("--port", str(REDIS_PORT), "--dir", str(REDIS_DATA)),
        ),
        redis_answers,
    ),
    Service("docker", ("dockerd",), docker_answers, sweep=partial(end_shims, DOCKER_EXEC_ROOT)),
)


children: dict[str, processes.Child] = {}


@dataclass(frozen=True, slots=True)
class Note:
    """What a service's note says; ticks are those of ``began_at_ticks``."""

    pid: int
    ticks: int
    owner_pid: int
    owner_ticks: int
    stopping: bool = False

    def write(self, file: Path) -> None:
        """Whole or not at all: another process may be reading it."""
        words = (self.pid, self.ticks, self.owner_pid, self.owner_ticks, int(self.stopping))
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_text(" ".join(map(str, words)))
        aside.replace(file)

    @property
    def departing(self) -> bool:
        """Whether the service lives, but not for long: it is being stopped, or was to end with a process that
        is gone.
        """
        if began_at_ticks(self.pid) != self.ticks:
            return False
        orphaned = self.owner_pid != 0 and began_at_ticks(self.owner_pid) != self.owner_ticks
        return self.stopping or orphaned


def bring_up(service: Service, *, attached: bool) -> float | None:
    """Start ``service`` unless it answers; the seconds it took, or None. Raises RuntimeError if it cannot
    be started.

    An attached one also ends when this process does, however that comes about.
    """
    await_departure(service)
    if service.answers():
        return None
    if shutil.which(service.command[0]) is None:
        raise RuntimeError(f"it does not answer, and {service.command[0]} is not installed; run make setup")
    REDIS_DATA.mkdir(parents=True, exist_ok=True)
    child = processes.start(
        service.name, service.command, log=service.log, death_signal=signal.SIGTERM if attached else None
    )
    children[service.name] = child
    owner = (os.getpid(), began_at_ticks(os.getpid()) or 0) if attached else (0, 0)
    Note(child.pid, began_at_ticks(child.pid) or 0, *owner).write(service.note)
    return processes.wait_until(service.answers, child=child, timeout_s=START_S, log=service.log)


def child_pids() -> set[int]:
    """Of those that this process started."""
    return {child.pid for child in children.values()}


def revive(say: Callable[[str], None]) -> None:
    """Start again what this process started and what has died since, and say so. Raises RuntimeError if one cannot
    be.
    """
    for service in SERVICES:
        child = children.get(service.name)
        if child is not None and not child.alive:
            say(
                f"{service.name} died (status {child.process.returncode}); starting it again, see {service.log}"
            )
            service.sweep()
            bring_up(service, attached=True)


def await_departure(service: Service) -> None:
    """Return when no earlier instance of ours is about to end. Raises RuntimeError if one does not."""
    give_up_at = time.monotonic() + DEPARTURE_S
    while (note := read_note(service)) is not None and note.departing:
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"process {note.pid} was told to stop and does not; see {service.log}")
        time.sleep(0.05)


def announce_stop() -> None:
    """Say that what this process started will be taken down, so that nobody begins to rely on it."""
    for service in SERVICES:
        note = read_note(service)
        if note is not None and service.name in children:
            replace(note, stopping=True).write(service.note)


def take_down(service: Service) -> bool:
    """Stop ``service`` if we started it, now or in an earlier process. True if it was stopped.

    The note stays: it names a process that is no more, or its successor's by then.
    """
    note, pid = read_note(service), started_pid(service)
    if note is not None and pid is not None:
        replace(note, stopping=True).write(service.note)
    if child := children.pop(service.name, None):
        child.stop(STOP_S)
    elif pid is not None:
        os.kill(pid, signal.SIGTERM)
        give_up_at = time.monotonic() + STOP_S
        while began_at_ticks(pid) is not None and time.monotonic() < give_up_at:
            time.sleep(0.05)
        processes.kill_group(pid)
    return pid is not None


def started_pid(service: Service) -> int | None:
    """The process that we started for ``service``, if it is still that process."""
    note = read_note(service)
    return note.pid if note is not None and began_at_ticks(note.pid) == note.ticks else None


def read_note(service: Service) -> Note | None:
    """None if there is none, or one that is not ours: what it names is left alone."""
    try:
        pid, ticks, owner_pid, owner_ticks, stopping = map(int, service.note.read_text().split())
    except (FileNotFoundError, ValueError):
        return None
    return Note(pid, ticks, owner_pid, owner_ticks, bool(stopping))


def began_at_ticks(pid: int) -> int | None:
    """When the process began, in clock ticks since boot: with the id it names a process for good. None if it
    has ended, whether or not its parent has noticed.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m infra.services", description="Redis and Docker on this machine."
    )
    parser.add_argument("action", choices=("up", "down", "status"))
    action = parser.parse_args(argv).action
    unwell = False
    for service in SERVICES if action == "up" else reversed(SERVICES):
        try:
            print(f"{service.name}: {ACTIONS[action](service)}")
        except RuntimeError as error:
            print(f"{service.name}: {error}", file=sys.stderr)
            unwell = True
    return int(unwell)


def up(service: Service) -> str:
    took_s = bring_up(service, attached=False)
    return "answers" if took_s is None else f"started ({took_s:.1f} s)"


def down(service: Service) -> str:
    return "stopped" if take_down(service) else "not ours, left alone"


def status(service: Service) -> str:
    whose = "started by us" if started_pid(service) else "not started by us"
    return f"answers, {whose}" if service.answers() else "does not answer"


ACTIONS: dict[str, Callable[[Service], str]] = {"up": up, "down": down, "status": status}

if __name__ == "__main__":
    sys.exit(main())
