"""Where a run stands, as metrics: versions, groups, outstanding requests, room for more, alarms. Measured with each heartbeat."""

from typing import Protocol, get_args

from opentelemetry.metrics import Meter

from trainer.loop.run_status import FiringAlarms
from trainer.loop.state import RunState
from trainer.recipe.alarms import AlarmKind


class Groups(Protocol):
    num_awaited: int  # members whose trajectories have not arrived
    held_bytes: int

    @property
    def num_open(self) -> int: ...

    @property
    def num_ready(self) -> int: ...

    @property
    def num_unjudged(self) -> int: ...


class GroupRoom(Protocol):
    queue_bytes: int

    def groups(self) -> int:
        """How many more groups may be enqueued."""
        ...


class RunGauges:
    """Of one run. Without an exporter its instruments do nothing."""

    def __init__(
        self, meter: Meter, state: RunState, groups: Groups, room: GroupRoom, alarms: FiringAlarms
    ) -> None:
        self._state = state
        self._groups = groups
        self._admission = room
        self._alarms = alarms
        self._step = meter.create_gauge("swerve.run.step", description="The newest optimizer step")
        self._version = meter.create_gauge(
            "swerve.weights.version",
            description="The newest weight version: published, and served by all engines in routing",
        )
        self._num_groups = meter.create_gauge(
            "swerve.groups",
            unit="{group}",
            description="Groups of rollouts: open, ready for a step, and of the ready those that wait for judgements",
        )
        self._outstanding = meter.create_gauge(
            "swerve.requests.outstanding",
            unit="{request}",
            description="Training rollouts that open groups wait for",
        )
        self._room = meter.create_gauge(
            "swerve.admission.room", unit="{group}", description="Groups that may be enqueued at the moment"
        )
        self._held = meter.create_gauge(
            "swerve.trajectories.size",
            unit="By",
            description="Trajectories that wait: in Redis for a checkpoint, in memory for a step",
        )
        self._firing = meter.create_gauge("swerve.alarm.active", description="1 while the alarm lasts")

    def measure(self) -> None:
        state, groups = self._state, self._groups
        self._step.set(state.step)
        self._version.set(state.version, {"swerve.state": "published"})
        self._version.set(state.served_version, {"swerve.state": "served"})
        self._num_groups.set(groups.num_open, {"swerve.state": "open"})
        self._num_groups.set(groups.num_ready, {"swerve.state": "ready"})
        self._num_groups.set(groups.num_unjudged, {"swerve.state": "unjudged"})
        self._outstanding.set(groups.num_awaited)
        self._room.set(self._admission.groups())
        self._held.set(self._admission.queue_bytes, {"swerve.place": "redis"})
        self._held.set(groups.held_bytes, {"swerve.place": "memory"})
        firing = {row.kind for row in self._alarms.firing}
        for kind in get_args(AlarmKind):
            self._firing.set(int(kind in firing), {"swerve.alarm": kind})
