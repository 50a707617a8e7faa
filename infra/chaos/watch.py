"""What can be seen of the system while it runs: through Redis, as anybody could, and at the addresses that answer."""

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import redis

from infra.chaos.system import NUM_WORKERS, RUN_ID, System
from infra.chaos.victims import Kind
from pipeline import keys
from pipeline.census import RunStatus
from pipeline.message import decode
from pipeline.queue import Lease
from pipeline.trajectory import TrajectoryHead
from pipeline.weights import WeightVersion

CALL_S = 2.0
TAKING_UP = ("starting", "taking up what is owed", "publishing weights", "waiting for an engine")
"""Phases of a trainer, or how they begin, in which it does not train yet."""

NO_ANSWER = (urllib.error.URLError, http.client.HTTPException, OSError, ValueError)


@dataclass(slots=True)
class Watch:
    """What has been seen so far. ``progress`` counts steps, trajectories that did not fail, and turns of episodes: from the
    second on, for which an engine has sampled and a container has run a command.
    """

    system: System
    progress: int = 0
    failed: int = 0  # trajectories
    step: int = 0
    asked: set[str] = field(default_factory=set)  # ids of requests
    status: RunStatus | None = None
    _turns: dict[str, tuple[int, int]] = field(default_factory=dict)  # (attempt, turn) last seen, by request
    _position: str = "0"
    _client: redis.Redis = field(init=False)

    def __post_init__(self) -> None:
        arguments = self.system.arguments
        self._client = redis.Redis(port=arguments.redis_port, socket_timeout=CALL_S)

    def look(self) -> None:
        """See what is new; nothing is while Redis is away."""
        try:
            self._look()
        except redis.RedisError:
            return

    def _look(self) -> None:
        with self._client.pipeline(transaction=False) as pipe:
            pipe.zrange(keys.open_requests(RUN_ID), 0, -1)
            pipe.xrange(keys.stream(RUN_ID), min=f"({self._position}")
            pipe.get(keys.run_status(RUN_ID))
            owed, entries, status = pipe.execute()
        self.asked.update(one.decode() for one in owed)
        self._look_at_turns([one.decode() for one in owed])
        for entry, fields in entries:
            self._position = entry.decode()
            failed = decode(fields[b"head"], TrajectoryHead).outcome.startswith("failed:")
            self.failed += failed
            self.progress += not failed
        self.status = decode(status, RunStatus) if status else None
        if self.status is not None and self.status.step > self.step:
            self.step = self.status.step
            self.progress += 1

    def _look_at_turns(self, owed: list[str]) -> None:
        rows = self._client.mget([keys.lease(one) for one in owed]) if owed else []
        for request_id, row in zip(owed, rows, strict=True):
            lease = decode(row, Lease) if row else None
            if lease is not None and lease.turn >= 2:
                self.progress += (lease.attempt, lease.turn) > self._turns.get(request_id, (0, 0))
                self._turns[request_id] = (lease.attempt, lease.turn)

    def is_well(self, kind: Kind) -> bool:
        """Whether every process of this kind does what it is there for."""
        try:
            return WELL[kind](self)
        except (redis.RedisError, *NO_ANSWER):
            return False

    def _redis_is_well(self) -> bool:
        return bool(self._client.ping())

    def _docker_is_well(self) -> bool:
        return self.system.docker.is_whole()

    def _engine_is_well(self) -> bool:
        """It serves the newest weights, behind the router."""
        newest = self._client.get(keys.weights(RUN_ID))
        served = _get(f"{self.system.engine_url}/model_info")["weight_version"]
        newest_served = newest is None or served == str(decode(newest, WeightVersion).version)
        return newest_served and (newest is None or self._router_is_well())

    def _router_is_well(self) -> bool:
        _get(f"{self.system.router_url}/readiness")
        workers = _get(f"{self.system.router_url}/workers")["workers"]
        return self.system.engine_url in [worker["url"] for worker in workers]

    def _workers_are_well(self) -> bool:
        children = [self.system.child(f"worker-{number}") for number in range(1, NUM_WORKERS + 1)]
        names = [keys.worker(f"{socket.gethostname()}/{child.pid}") for child in children]
        return self._client.exists(*names) == NUM_WORKERS

    def _trainer_is_well(self) -> bool:
        self.look()
        born_at = _born_at(self.system.child("trainer").pid)
        status = self.status
        return status is not None and status.updated_at > born_at and not status.phase.startswith(TAKING_UP)


WELL: Mapping[Kind, Any] = {
    "redis": Watch._redis_is_well,
    "dockerd": Watch._docker_is_well,
    "containerd": Watch._docker_is_well,
    "engine": Watch._engine_is_well,
    "router": Watch._router_is_well,
    "worker": Watch._workers_are_well,
    "trainer": Watch._trainer_is_well,
}


def _get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=CALL_S) as answer:
        text = answer.read()
    return json.loads(text) if text.startswith(b"{") else {}


def _born_at(pid: int) -> float:
    """When a process that runs began, in Unix seconds."""
    with open(f"/proc/{pid}/stat") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    hertz = 100
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / hertz
