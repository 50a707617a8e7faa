"""How many groups may be open so that none is trained more than `max_lag_versions` versions late. Pure
arithmetic.

The bound is AReaL's (staleness manager of its rollout controller), in groups instead of samples:

    admitted <= (max_lag_versions + served_steps + 1) * groups_per_step

where `admitted` counts groups enqueued since the run began, less those dropped without being trained: a
dropped group gives its slot back, and another is enqueued. `served_steps` is how many optimizer steps
the newest served weights contain.

Why it holds: groups are trained in the order they were dispatched, `groups_per_step` at a time, so the n-th
admitted group is trained by step ceil(n / groups_per_step) at the latest. Enqueued while version s was
served, n <= (max_lag + s + 1) * groups_per_step, so that step is at most s + max_lag + 1, which starts from
the weights of step s + max_lag: a lag of max_lag. Where groups overtake each other, a step that would leave
an older group behind for too long waits for it (`punctual`).

So stale work is not thrown away, which would discard the long, hard episodes first: it is never enqueued.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FREE_FAILURES = 3
LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Admission:
    """The bound of one run. All counts are of groups, all steps are optimizer steps since the run began."""

    max_lag_versions: int
    groups_per_step: int
    num_steps: int

    def room(self, *, begun_steps: int, served_steps: int, live_groups: int) -> int:
        """How many more groups may be enqueued now.

        `begun_steps` steps have taken their groups; `live_groups` were enqueued and are neither taken nor dropped.
        Never more than the steps still to come can use.
        """
        horizon = min(self.max_lag_versions + served_steps + 1, self.num_steps)
        return max(0, horizon * self.groups_per_step - (begun_steps * self.groups_per_step + live_groups))

    def bound(self, *, begun_steps: int, served_steps: int, live_groups: int) -> Literal["", "lag", "end"]:
        """Why there is no room: the groups would be trained too late, or the remaining steps have theirs. "": there is room."""
        if self.room(begun_steps=begun_steps, served_steps=served_steps, live_groups=live_groups):
            return ""
        has_all = begun_steps * self.groups_per_step + live_groups >= self.num_steps * self.groups_per_step
        return "end" if has_all else "lag"

    def punctual(self, left_out: Sequence[tuple[int, int]]) -> bool:
        """Whether every group that the next step leaves out can still be trained in time.

        `left_out` are pairs, longest lag first: how far the weights that groups were enqueued with are behind now,
        and how many groups those are. The n-th group is trained (n - 1) // groups_per_step steps after the next
        one, at the earliest.
        """
        nth = 0
        for lag, num_groups in left_out:
            nth += num_groups
            if lag + 1 + (nth - 1) // self.groups_per_step > self.max_lag_versions:
                return False
        return True

    def sentence(self, *, begun_steps: int, served_steps: int, live_groups: int) -> str:
        """Why nothing is enqueued at the moment, or how many more groups may be."""
        room = self.room(begun_steps=begun_steps, served_steps=served_steps, live_groups=live_groups)
        if room:
            return f"open: {room} more groups may be enqueued"
        bound = self.bound(begun_steps=begun_steps, served_steps=served_steps, live_groups=live_groups)
        if bound == "end":
            return "closed: every group that the remaining steps need is enqueued"
        return (
            f"closed: {live_groups} groups are open, and with the weights of step {served_steps} served, "
            "one more could be trained "
            f"more than {self.max_lag_versions} versions late"
        )


@dataclass(frozen=True, slots=True)
class Backlog:
    """Bytes that trajectories take up somewhere, against how many they may.

    Assume that each outstanding trajectory is as large as the largest seen, so that the bound holds when they arrive.
    """

    what: str  # for people, as in "of trajectories wait in Redis for a checkpoint"
    max_bytes: int
    held_bytes: int = 0
    num_awaited: int = 0  # outstanding trajectories
    largest_bytes: int = 0  # of one trajectory

    @property
    def spare_bytes(self) -> int:
        return self.max_bytes - self.held_bytes - self.num_awaited * self.largest_bytes

    def is_full(self, group_size: int) -> bool:
        """Whether one more group may not fit."""
        return self.spare_bytes < max(1, group_size * self.largest_bytes)

    def room(self, room: int, *, group_size: int, open_groups: int) -> int:
        """What is left of `room`: when it is full, one group at a time, so that a step short of a group still
        comes about and makes room.
        """
        if self.is_full(group_size):
            return min(room, 1) if open_groups == 0 else 0
        return (
            min(room, self.spare_bytes // (group_size * self.largest_bytes)) if self.largest_bytes else room
        )

    def sentence(self, group_size: int) -> str:
        """Why nothing is enqueued at the moment; empty if memory is not the reason."""
        if not self.is_full(group_size):
            return ""
        expected = f" and {self.num_awaited} more are expected" if self.num_awaited else ""
        return (
            f"closed: {_megabytes(self.held_bytes)} {self.what}{expected}, up to "
            f"{_megabytes(self.largest_bytes)} each; {_megabytes(self.max_bytes)} may"
        )


@dataclass(frozen=True, slots=True)
class Brake:
    """Slows enqueuing down while groups fail, so that an outage does not burn through the tasks and dead-letter thousands of
    requests.
    """

    failed_groups: int  # in a row, dropped because too few of their members were graded
    last_failed_at: float  # on the clock that `now` is read from, seconds

    @property
    def pause_s(self) -> float:
        """Between two groups: none for the first few failures, then 1 s, doubling up to a minute."""
        beyond = self.failed_groups - FREE_FAILURES
        return 0.0 if beyond <= 0 else min(2.0 ** (beyond - 1), LONGEST_PAUSE_S)

    def room(self, room: int, *, open_groups: int, now: float) -> int:
        """What is left of `room`: one group at a time, each after a pause."""
        if not self.pause_s:
            return room
        return min(room, 1) if open_groups == 0 and now >= self.last_failed_at + self.pause_s else 0


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
