"""Starts the system, kills processes, and measures how long each recovery takes. The system is observed from outside: through Redis, and at
the addresses of engine and router.

The system has recovered when every killed process does its work again, and afterwards an episode has advanced by a turn, a
trajectory that did not fail has arrived, or a step was made. For a killed trainer only the first counts, and for a killed judge a
new judgement: episodes advance without them.

Signals that ask for an early end are recorded, and acted on only where it is safe.
"""

import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import redis

from infra.chaos.faults import OF_DOCKERD, Fault, Kind
from infra.chaos.system import JUDGE_NAME, NUM_WORKERS, RUN_ID, System, write_tasks
from infra.processes import Child
from pipeline import keys
from pipeline.census import RunStatus
from pipeline.judge import JudgementHead
from pipeline.kinds import JUDGE
from pipeline.message import decode
from pipeline.queue import Lease
from pipeline.trajectory import TrajectoryHead
from pipeline.weights import WeightVersion

CALL_S = 2.0
NOT_YET_TRAINING = ("starting", "recovering", "publishing weights", "waiting for an engine")
"""The beginnings of the names of phases in which a trainer does not train yet."""

NO_ANSWER = (urllib.error.URLError, http.client.HTTPException, OSError, ValueError)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class SystemMonitor:
    """The observations of the system so far.

    `progress` counts steps, trajectories that did not fail, and turns of episodes from the second on: by then an engine has
    sampled and a container has run a command.
    """

    system: System
    progress: int = 0
    num_judgements: int = 0
    step: int = 0
    seen_requests: set[str] = field(default_factory=set[str])  # request ids
    status: RunStatus | None = None
    _turns: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """(attempt, turn) last seen, by request."""

    _position: str = "0"
    _judged_position: str = "0"
    _client: Any = field(init=False)  # redis-py's own types mix its synchronous and asynchronous replies

    def __post_init__(self) -> None:
        arguments = self.system.arguments
        self._client = redis.Redis(port=arguments.redis_port, socket_timeout=CALL_S)

    def poll(self) -> None:
        """Reads the new events. While Redis is away, there are none."""
        try:
            self._poll()
        except redis.RedisError:
            return

    def _poll(self) -> None:
        with self._client.pipeline(transaction=False) as pipe:
            pipe.zrange(keys.open_requests(RUN_ID), 0, -1)
            pipe.xrange(keys.stream(RUN_ID), min=f"({self._position}")
            pipe.xrange(keys.stream(RUN_ID, JUDGE), min=f"({self._judged_position}")
            pipe.get(keys.run_status(RUN_ID))
            outstanding, entries, judgements, status = pipe.execute()
        request_ids = [one.decode() for one in outstanding]
        self.seen_requests.update(request_ids)
        self._count_turns(request_ids)
        for entry, fields in entries:
            self._position = entry.decode()
            self.progress += not decode(fields[b"head"], TrajectoryHead).outcome.startswith("failed:")
        for entry, fields in judgements:
            self._judged_position = entry.decode()
            self.num_judgements += decode(fields[b"head"], JudgementHead).outcome == "judged"
        self.status = decode(status, RunStatus) if status else None
        if self.status is not None and self.status.step > self.step:
            self.step = self.status.step
            self.progress += 1

    def _count_turns(self, request_ids: list[str]) -> None:
        rows = self._client.mget([keys.lease(one) for one in request_ids]) if request_ids else []
        for request_id, row in zip(request_ids, rows, strict=True):
            lease = decode(row, Lease) if row else None
            if lease is not None and lease.turn >= 2:
                self.progress += (lease.attempt, lease.turn) > self._turns.get(request_id, (0, 0))
                self._turns[request_id] = (lease.attempt, lease.turn)

    def works(self, kind: Kind) -> bool:
        """Whether every process of this kind does its work."""
        try:
            return CHECKS[kind](self)
        except (redis.RedisError, *NO_ANSWER):
            return False

    def redis_works(self) -> bool:
        return bool(self._client.ping())

    def docker_works(self) -> bool:
        return self.system.docker.works()

    def engine_works(self) -> bool:
        """Whether the engine serves the newest weights and the router reaches it."""
        newest = self._client.get(keys.weights(RUN_ID))
        served: str = _get(f"{self.system.engine_url}/model_info")["weight_version"]
        if newest is None:
            return True
        version = served.rpartition("@")[2]  # an engine reports RUN_ID@VERSION
        return version == str(decode(newest, WeightVersion).version) and self.router_works()

    def router_works(self) -> bool:
        _get(f"{self.system.router_url}/readiness")
        workers = _get(f"{self.system.router_url}/workers")["workers"]
        return self.system.engine_url in [worker["url"] for worker in workers]

    def workers_work(self) -> bool:
        children = [self.system.child(f"worker-{number}") for number in range(1, NUM_WORKERS + 1)]
        names = [keys.worker(f"{socket.gethostname()}/{child.pid}") for child in children]
        return self._client.exists(*names) == NUM_WORKERS

    def judge_works(self) -> bool:
        name = f"judge/{socket.gethostname()}/{self.system.child(JUDGE_NAME).pid}"
        return bool(self._client.exists(keys.worker(name)))

    def trainer_works(self) -> bool:
        self.poll()
        born_at = _born_at(self.system.child("trainer").pid)
        status = self.status
        return (
            status is not None
            and status.updated_at > born_at
            and not status.phase.startswith(NOT_YET_TRAINING)
        )


CHECKS: Mapping[Kind, Callable[[SystemMonitor], bool]] = {
    "redis": SystemMonitor.redis_works,
    "dockerd": SystemMonitor.docker_works,
    "containerd": SystemMonitor.docker_works,
    "container": SystemMonitor.docker_works,
    "program": SystemMonitor.docker_works,
    "engine": SystemMonitor.engine_works,
    "router": SystemMonitor.router_works,
    "worker": SystemMonitor.workers_work,
    "judge": SystemMonitor.judge_works,
    "trainer": SystemMonitor.trainer_works,
}


def _get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=CALL_S) as answer:
        text = answer.read()
    return json.loads(text) if text.startswith(b"{") else {}


def _born_at(pid: int) -> float:
    """The time at which a running process began, in Unix seconds."""
    with open(f"/proc/{pid}/stat") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    hertz = 100
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / hertz


class EndRequested(Exception):
    """A signal asked for the end of the campaign."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class SignalListener:
    """Records the signals in SIGNALS from its creation on."""

    def __init__(self) -> None:
        self._pending: deque[signal.Signals] = deque()
        for number in SIGNALS:
            signal.signal(number, self._record)

    def check(self) -> None:
        """Raises EndRequested, once for each signal received."""
        if self._pending:
            raise EndRequested(self._pending.popleft())

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._pending.append(signal.Signals(number))


TICK_S = 0.1
START_S = 300.0
# Time without progress, in addition to the start time of what was killed, that counts as a hang
HANG_S = 90.0
GIVE_UP_S = 120.0  # wait after a hang
FIRST_PROGRESS_S = 120.0


class NotRecovered(Exception):
    """The system did not recover, or did not start at all."""


@dataclass(frozen=True, slots=True)
class MeasuredRecovery:
    """The recovery from one fault. `total_s` counts from the last kill."""

    victims: tuple[Kind, ...]
    total_s: float
    start_s: float  # start time of the slowest victim without a fault
    hung: bool

    @property
    def beyond_s(self) -> float:
        return max(0.0, self.total_s - self.start_s)


@dataclass(frozen=True, slots=True)
class FaultInjector:
    """Kills processes of a system and waits until it has recovered."""

    system: System
    monitor: SystemMonitor
    say: Callable[[str], None]
    signals: SignalListener
    evidence: Path  # a directory

    def wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Keep the system running until `done`, or for `timeout_s`. Returns whether it was done. Raises EndRequested."""
        give_up_at = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > give_up_at:
                return False
            self.signals.check()
            self.system.restart_dead()
            self.monitor.poll()
            time.sleep(TICK_S)
        return True

    def pause(self, seconds: float) -> None:
        """Keeps the system running for this many seconds. Raises EndRequested."""
        self.wait(lambda: False, seconds)

    def start_all(self, kinds: Sequence[Kind]) -> dict[Kind, float]:
        """Start one process after another. Returns how long each kind took until it did its work; containerd only if
        it is among `kinds`, because measuring that takes time. Processes in a container are not restarted, so they are left out. Raises
        NotRecovered or EndRequested.
        """
        took_s = dict.fromkeys(OF_DOCKERD, 0.0)
        for name, (kind, supervisor, process) in self.system.supervised().items():
            began_at = time.monotonic()
            supervisor.start(process)
            if name == "worker-1":
                continue
            self._await_start(kind)
            took_s[kind] = time.monotonic() - began_at
            self.say(f"{kind} started in {took_s[kind]:.1f} s")
            if name == "dockerd":
                write_tasks(self.system)
                if "containerd" in kinds:
                    took_s["containerd"] = self._restart_containerd()
        before = self.monitor.progress
        if not self.wait(lambda: self.monitor.progress > before, FIRST_PROGRESS_S):
            raise NotRecovered(f"no progress within {FIRST_PROGRESS_S:.0f} s of the start")
        return took_s

    def inject(
        self, fault: Fault, rng: random.Random, starts_s: Mapping[Kind, float]
    ) -> MeasuredRecovery | None:
        """Inject the fault and wait for the recovery. None if there was nothing to kill. Raises NotRecovered or
        EndRequested.
        """
        victims, killed = self._kill(fault, rng)
        if not victims:
            return None
        killed_at = time.monotonic()
        start_s = max(starts_s[kind] for kind in victims)
        hung = not self.wait(self._recovered(victims, killed), start_s + HANG_S)
        if hung:
            self._keep_evidence(victims)
            if not self.wait(self._recovered(victims, killed), GIVE_UP_S):
                raise NotRecovered(f"the system did not recover from a kill of {' and '.join(victims)}")
        return MeasuredRecovery(tuple(victims), time.monotonic() - killed_at, start_s, hung)

    def _kill(self, fault: Fault, rng: random.Random) -> tuple[list[Kind], list[Child]]:
        """The kinds that were killed, and those of them that our supervisors start again."""
        self.pause(fault.pause_s)
        victims: list[Kind] = []
        killed: list[Child] = []
        for kind in fault.victims:
            if victims:
                self.pause(fault.apart_s)
            child = self.system.kill(kind, rng)
            if child is not None:
                victims.append(kind)
                killed += [child] if kind not in OF_DOCKERD else []
        return victims, killed

    def _await_start(self, kind: Kind) -> None:
        if not self.wait(lambda: self.monitor.works(kind), START_S):
            raise NotRecovered(f"{kind} is not ready after {START_S:.0f} s; see {self.system.root}")

    def _restart_containerd(self) -> float:
        self.system.kill("containerd", random.Random())
        began_at = time.monotonic()
        self._await_start("containerd")
        return time.monotonic() - began_at

    def _recovered(self, victims: list[Kind], killed: list[Child]) -> Callable[[], bool]:
        """Whether the victims work again, and there was progress since."""
        progress_before: int | None = None

        def done() -> bool:
            nonlocal progress_before
            if progress_before is None:
                successors = [self.system.child(child.name) for child in killed]
                restarted = all(
                    new is not old and new.alive for new, old in zip(successors, killed, strict=True)
                )
                if restarted and all(self.monitor.works(kind) for kind in victims):
                    self.monitor.poll()
                    progress_before = self._progress(victims)
                return progress_before is not None and victims == ["trainer"]
            return self._progress(victims) > progress_before

        return done

    def _progress(self, victims: list[Kind]) -> int:
        """The measured progress of episodes.

        They continue without a judge, so a killed judge alone has recovered when a judgement arrives.
        """
        return self.monitor.num_judgements if victims == ["judge"] else self.monitor.progress

    def _keep_evidence(self, victims: list[Kind]) -> None:
        """Write down what `pipeline status` says of the hanging system."""
        url = self.system.arguments.redis_url
        words = [sys.executable, "-m", "pipeline", "--redis", url, "status"]
        status = subprocess.run(words, capture_output=True, text=True, check=False)
        place = self.evidence / f"hang-{'-'.join(victims)}-{int(time.time())}.txt"
        place.write_text(status.stdout + status.stderr)
        self.say(f"no progress after a kill of {' and '.join(victims)}: see {place}")
