"""Redis and Docker on one machine: started where none answers. Only what was started here is stopped again.

    python -m infra.services up | down [redis] [docker] | status

A service that answers already is left alone, by `up` and by `down`. The exception is one of ours that is being
stopped, for example after Ctrl-C in another terminal: then `up` waits until it has ended and starts a new one. Logs,
data and the notes on what we started are under `.run/` at the root of the repository.

Shims are the processes that hold containers. They outlive the dockerd that started them. A dockerd that is killed and started again
finds its containers and ends them, except one that it was just starting or removing: it has no record of that one any more, and nothing
else has. So such shims are ended here before dockerd is started again.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import redis

from infra import ports, processes, redis_server
from pipeline.commandline import program

PROC = Path("/proc")
ADDRESS = "-address"  # the flag that names the shim's containerd


def shims(exec_root: Path) -> list[int]:
    """Process ids of the shims that a dockerd with this `--exec-root` started, whether or not it runs."""
    return [pid for pid, words in _command_lines() if _is_shim_of(exec_root.resolve(), words)]


def end_shims(exec_root: Path) -> list[int]:
    """Kill the shims and the first process of each one's container. Call it while no such dockerd runs; the containerd of
    the next one cleans up after them. Returns the shims' process ids.
    """
    found = shims(exec_root)
    for pid in found:
        for member in (*children_of(pid), pid):
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
    return found


def children_of(pid: int) -> list[int]:
    """The process ids of the children; none if the process has just ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return [
            int(child) for task in PROC.glob(f"{pid}/task/*/children") for child in read_proc(task).split()
        ]
    return []


def read_proc(path: Path) -> str:
    """A file of /proc; empty if its process has ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def _command_lines() -> Iterator[tuple[int, list[str]]]:
    for directory in PROC.iterdir():
        if directory.name.isdigit() and (line := read_proc(directory / "cmdline")):
            yield int(directory.name), line.split("\0")


def _is_shim_of(exec_root: Path, words: list[str]) -> bool:
    if "containerd-shim" not in words[0] or ADDRESS not in words[:-1]:
        return False
    return Path(words[words.index(ADDRESS) + 1]).resolve().is_relative_to(exec_root)


ROOT = Path(__file__).parents[1]
RUN = ROOT / ".run"
REDIS_DATA = RUN / "redis"
REDIS_PORT = 6379
DOCKER_EXEC_ROOT = Path("/var/run/docker")  # dockerd's default
START_S = 180.0
STOP_S = 30.0
OTHERS_START_S = 20.0
# Longest time that another process of ours may take to stop: the trainer's checkpoint, the workers' episodes, then the services.
OTHERS_STOP_S = 150.0


@dataclass(frozen=True, slots=True)
class Service:
    """A program that serves this machine. `clean_up` removes what it leaves behind when it is killed."""

    name: str
    command: tuple[str, ...]
    answers: Callable[[], bool]
    clean_up: Callable[[], object] = lambda: None
    port: int | None = None
    needs_root: bool = False

    @property
    def log(self) -> Path:
        return RUN / f"{self.name}.log"

    @property
    def note(self) -> Path:
        """The path of the file with the service's Note: the record that we started it."""
        return RUN / f"{self.name}.started"


def redis_answers() -> bool:
    with redis.Redis(port=REDIS_PORT, socket_connect_timeout=2, socket_timeout=2) as client:
        return redis_server.answers(client)


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
        port=REDIS_PORT,
    ),
    Service(
        "docker",
        ("dockerd",),
        docker_answers,
        clean_up=partial(end_shims, DOCKER_EXEC_ROOT),
        needs_root=True,
    ),
)

children: dict[str, processes.Child] = {}
"""The services that this process started, by name."""


@dataclass(frozen=True, slots=True)
class Note:
    """A record of the process that runs a service which we started; ticks are those of `began_at_ticks`.

    The owner is the process that the service ends with; both of its numbers are 0 if there is none.
    """

    pid: int
    ticks: int
    owner_pid: int
    owner_ticks: int
    stop_has_begun: bool = False

    def write(self, file: Path) -> None:
        """Writes the note atomically, because another process may be reading it."""
        words = (self.pid, self.ticks, self.owner_pid, self.owner_ticks, int(self.stop_has_begun))
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_text(" ".join(map(str, words)))
        aside.replace(file)

    @property
    def is_stopping(self) -> bool:
        """Whether the service still runs but will end soon: its stop has begun, or its owner is gone."""
        if began_at_ticks(self.pid) != self.ticks:
            return False
        orphaned = self.owner_pid != 0 and began_at_ticks(self.owner_pid) != self.owner_ticks
        return self.stop_has_begun or orphaned


def bring_up(service: Service, *, attached: bool) -> float | None:
    """Start `service` unless it answers. Returns the seconds it took, or None if it was running. Raises ValueError if
    another program has its port, RuntimeError if it cannot be started for another reason.

    An attached service also ends when this process ends, even if this process is killed.
    """
    wait_while_stopping(service)
    if service.answers():
        return None
    if shutil.which(service.command[0]) is None:
        raise RuntimeError(f"it does not answer, and {service.command[0]} is not installed; run make setup")
    if service.needs_root and os.geteuid() != 0:
        raise RuntimeError(f"it does not answer, and only root can start {service.command[0]}: run this with sudo")
    if service.port is not None:
        fix = f"it does not answer as {service.name}: stop it"
        ports.check_free(service.port, needed_by=service.name, fix=fix)
    REDIS_DATA.mkdir(parents=True, exist_ok=True)
    before = read_note(service)
    child = processes.start(
        service.name, service.command, log=service.log, death_signal=signal.SIGTERM if attached else None
    )
    children[service.name] = child
    owner = (os.getpid(), began_at_ticks(os.getpid()) or 0) if attached else (0, 0)
    Note(child.pid, began_at_ticks(child.pid) or 0, *owner).write(service.note)
    try:
        return processes.wait_until(service.answers, child=child, timeout_s=START_S, log=service.log)
    except RuntimeError:
        stop_own(service)
        # One that a run was starting which has been killed since leaves no room for ours.
        if _answers_soon(service):
            if before is not None:
                before.write(service.note)
            return None
        raise


def _answers_soon(service: Service) -> bool:
    give_up_at = time.monotonic() + OTHERS_START_S
    while not (answers := service.answers()) and time.monotonic() < give_up_at:
        time.sleep(0.2)
    return answers


def child_pids() -> set[int]:
    """Process ids of the services that this process started."""
    return {child.pid for child in children.values()}


def restart_dead(say: Callable[[str], None]) -> None:
    """Starts services again that this process started and that have died since, and reports it.

    Raises RuntimeError if a service cannot be started.
    """
    for service in SERVICES:
        child = children.get(service.name)
        if child is not None and not child.alive:
            status = child.process.returncode
            say(f"{service.name} died (status {status}); starting it again, see {service.log}")
            service.clean_up()
            bring_up(service, attached=True)


def wait_while_stopping(service: Service) -> None:
    """Returns when no earlier instance of ours is about to end. Raises RuntimeError if one does not end."""
    give_up_at = time.monotonic() + OTHERS_STOP_S
    while (note := read_note(service)) is not None and note.is_stopping:
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"process {note.pid} was asked to stop and is still running; wait or end it, and see {service.log}")
        time.sleep(0.05)


def announce_stop() -> None:
    """Records that the services which this process started will be stopped, so that no other process begins to rely on them."""
    for service in SERVICES:
        note = read_note(service)
        if note is not None and service.name in children:
            replace(note, stop_has_begun=True).write(service.note)


def stop_own(service: Service) -> bool:
    """Stop `service` if this process started it. True if it was stopped."""
    child = children.pop(service.name, None)
    if child is None:
        return False
    _note_stop(service)
    child.stop(STOP_S)
    return True


def take_down(service: Service) -> bool:
    """Stop `service` if this checkout started it, in this process or in an earlier one. True if it was stopped.

    The note stays: it names a process that has ended, and the next start overwrites it.
    """
    if stop_own(service):
        return True
    pid = started_pid(service)
    if pid is None:
        return False
    _note_stop(service)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    give_up_at = time.monotonic() + STOP_S
    while began_at_ticks(pid) is not None and time.monotonic() < give_up_at:
        time.sleep(0.05)
    processes.kill_group(pid)
    return True


def _note_stop(service: Service) -> None:
    note = read_note(service)
    if note is not None and started_pid(service) is not None:
        replace(note, stop_has_begun=True).write(service.note)


def started_pid(service: Service) -> int | None:
    """The process that this checkout started for `service`, if it is still that process."""
    note = read_note(service)
    return note.pid if note is not None and began_at_ticks(note.pid) == note.ticks else None


def read_note(service: Service) -> Note | None:
    """The note about the service; None if there is none, or if we did not write it."""
    try:
        pid, ticks, owner_pid, owner_ticks, stop_has_begun = map(int, service.note.read_text().split())
    except (FileNotFoundError, ValueError):
        return None
    return Note(pid, ticks, owner_pid, owner_ticks, bool(stop_has_begun))


def began_at_ticks(pid: int) -> int | None:
    """The time when the process began, in clock ticks since boot; together with the process id this identifies a process unambiguously.
    None if it has ended, whether or not its parent has collected its status.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program("infra.services"), description="Redis and Docker on this machine."
    )
    parser.add_argument("action", choices=tuple(ACTIONS))
    names = [service.name for service in SERVICES]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; default: all")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.names) - set(names):
        parser.error(f"no service is called {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = [service for service in SERVICES if service.name in (arguments.names or names)]
    failed = False
    for service in reversed(chosen) if arguments.action == "down" else chosen:
        try:
            print(f"{service.name}: {ACTIONS[arguments.action](service)}")
        except (RuntimeError, ValueError) as error:
            print(f"{service.name}: {error}", file=sys.stderr)
            failed = True
        except KeyboardInterrupt:
            for started in reversed(chosen):
                stop_own(started)
            raise
    return int(failed)


def up(service: Service) -> str:
    took_s = bring_up(service, attached=False)
    return "answers" if took_s is None else f"started ({took_s:.1f} s)"


def down(service: Service) -> str:
    return "stopped" if take_down(service) else "not started by us, left alone"


def status(service: Service) -> str:
    whose = "started by us" if started_pid(service) else "not started by us"
    return f"answers, {whose}" if service.answers() else "does not answer"


ACTIONS: dict[str, Callable[[Service], str]] = {"up": up, "down": down, "status": status}


if __name__ == "__main__":
    sys.exit(main())
