"""Observes the running system from outside: through Redis, and at the addresses of engine and router."""

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import redis

from infra.chaos.faults import Kind
from infra.chaos.system import JUDGE_NAME, NUM_WORKERS, RUN_ID, System
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
