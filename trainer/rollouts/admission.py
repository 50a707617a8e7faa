"""Admission: the number of groups that may be open so that none is trained more than `max_lag_versions` versions late, and the number of
versions below that limit that admission may run ahead. Pure arithmetic, and pure decisions, made once a step from the journal alone.

The bound is AReaL's (staleness manager of its rollout controller), in groups instead of samples:

    admitted <= (max_lag_versions + served_steps + 1) * groups_per_step

where `admitted` counts groups enqueued since the run began, minus those dropped without being trained: a dropped group gives its slot back,
and another is enqueued. `served_steps` is the number of optimizer steps that the newest served weights contain.

Why it holds: groups are trained in the order they were dispatched, `groups_per_step` at a time, so the n-th
admitted group is trained by step ceil(n / groups_per_step) at the latest. Enqueued while version s was
served, n <= (max_lag + s + 1) * groups_per_step, so that step is at most s + max_lag + 1, which starts from
the weights of step s + max_lag: a lag of max_lag. If groups overtake each other, a step that would postpone
an older group for too long waits for it (`punctual`).

So work that would become stale is never enqueued, instead of being discarded later, which would affect the long, hard episodes first.

`max_lag_versions` bounds the lag of what is trained, and this promise does not depend on the decisions here: the number that this module
decides replaces it only in the calculation of how many groups may be enqueued, and is never larger.

The evidence is the effect of the objective on the tokens of each lag in the last steps, each token counted by its signal
(`pipeline.journal.rows.SignalMetrics`), because the few uncertain tokens decide what is learned and vanish in a mean over all: the
effective sample size of the weights, the share of the signal that it removed, and how far the policy has moved from the weights that
sampled them. A lag is useful while all three are within their bounds.

lower   A lag up to the present limit breaks a bound, and fresh tokens do not: the limit becomes the largest lag below it. If fresh tokens
break it too, the cause is not staleness, so a lower limit would not help. raise   Tokens of the limit itself were trained, and use up at
most half of each bound: one version more. Without such tokens there is nothing to gain, because admission does not delay rollouts.

Raising requires half of each bound, and is not allowed for a few steps after lowering, so that the limit does not oscillate.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.journal.rows import LagMetrics, SignalMetrics, StalenessRow, StepRow
from trainer.recipe import AdmissionRecipe, StalenessRecipe

FREE_FAILURES = 3
LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Admission:
    """The bound of one run. All counts are of groups, all steps are optimizer steps since the run began."""

    max_lag_versions: int
    groups_per_step: int
    num_steps: int

    def room(self, *, begun_steps: int, served_steps: int, live_groups: int) -> int:
        """The number of groups that may be enqueued now.

        `begun_steps` steps have taken their groups; `live_groups` were enqueued and are neither taken nor dropped.
        It is never more than the remaining steps can use.
        """
        horizon = min(self.max_lag_versions + served_steps + 1, self.num_steps)
        return max(0, horizon * self.groups_per_step - (begun_steps * self.groups_per_step + live_groups))

    def bound(self, *, begun_steps: int, served_steps: int, live_groups: int) -> Literal["", "lag", "end"]:
        """The reason why there is no room: the groups would be trained too late, or the remaining steps have all their groups. "": there is
        room."""
        if self.room(begun_steps=begun_steps, served_steps=served_steps, live_groups=live_groups):
            return ""
        has_all = begun_steps * self.groups_per_step + live_groups >= self.num_steps * self.groups_per_step
        return "end" if has_all else "lag"

    def punctual(self, left_out: Sequence[tuple[int, int]]) -> bool:
        """Whether every group that the next step leaves out can still be trained in time.

        `left_out` are pairs, longest lag first: the present lag of the weights that groups were enqueued with,
        and the number of these groups. The n-th group is trained (n - 1) // groups_per_step steps after the next
        one, at the earliest.
        """
        nth = 0
        for lag, num_groups in left_out:
            nth += num_groups
            if lag + 1 + (nth - 1) // self.groups_per_step > self.max_lag_versions:
                return False
        return True

    def sentence(self, *, begun_steps: int, served_steps: int, live_groups: int) -> str:
        """The reason why nothing is enqueued at the moment, or the number of groups that may be."""
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
    """The bytes that trajectories occupy in one place, and their limit.

    Assume that each outstanding trajectory is as large as the largest seen, so that the bound holds when they arrive.
    """

    what: str  # end of a sentence, as in "of trajectories wait in Redis for a checkpoint"
    max_bytes: int
    held_bytes: int = 0
    num_awaited: int = 0  # outstanding trajectories
    largest_bytes: int = 0  # size of the largest trajectory so far

    @property
    def spare_bytes(self) -> int:
        return self.max_bytes - self.held_bytes - self.num_awaited * self.largest_bytes

    def is_full(self, group_size: int) -> bool:
        """Whether one more group may not fit."""
        return self.spare_bytes < max(1, group_size * self.largest_bytes)

    def room(self, room: int, *, group_size: int, open_groups: int) -> int:
        """The part of `room` that remains.

        When the memory is full, one group at a time remains, so that a step that lacks a group can still be taken and make room.
        """
        if self.is_full(group_size):
            return min(room, 1) if open_groups == 0 else 0
        return (
            min(room, self.spare_bytes // (group_size * self.largest_bytes)) if self.largest_bytes else room
        )

    def sentence(self, group_size: int) -> str:
        """The reason why nothing is enqueued at the moment; empty if memory is not the reason."""
        if not self.is_full(group_size):
            return ""
        expected = f" and {self.num_awaited} more are expected" if self.num_awaited else ""
        return (
            f"closed: {_megabytes(self.held_bytes)} {self.what}{expected}, up to "
            f"{_megabytes(self.largest_bytes)} each; {_megabytes(self.max_bytes)} may"
        )


@dataclass(frozen=True, slots=True)
class Brake:
    """Slows enqueuing down while groups fail, so that an outage does not use up the tasks and dead-letter thousands of requests."""

    failed_groups: int  # number of groups in a row dropped because too few of their members were graded
    last_failed_at: float  # seconds, on the clock that `now` is read from

    @property
    def pause_s(self) -> float:
        """The pause between two groups: none for the first few failures, then 1 s, doubling up to a minute."""
        beyond = self.failed_groups - FREE_FAILURES
        return 0.0 if beyond <= 0 else min(2.0 ** (beyond - 1), LONGEST_PAUSE_S)

    def room(self, room: int, *, open_groups: int, now: float) -> int:
        """The number of groups, of `room`, that may be enqueued now: after failures only one at a time, each after a pause."""
        if not self.pause_s:
            return room
        return min(room, 1) if open_groups == 0 and now >= self.last_failed_at + self.pause_s else 0


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


WINDOW_STEPS = 4
"""The number of steps over which the evidence is averaged, because the number of stale tokens in one step is small."""

MIN_SIGNAL_TOKENS = 32
"""The smallest effective number of tokens with a signal in the window from which conclusions about a lag are drawn."""

MARGIN = 0.5
"""The share of each bound that tokens may use up at most before the limit is raised."""


@dataclass(frozen=True, slots=True)
class StalenessBounds:
    """The bounds of one run. If `least_versions` equals `most_versions`, the limit never changes."""

    least_versions: int  # number of versions that admission may run ahead at least, and at the start
    most_versions: int
    min_ess_share: float
    max_masked_share: float
    max_behaviour_kl: float  # nats
    patience_steps: int  # steps between lowering the limit and raising it

    def fault(self, seen: SignalMetrics, *, part: float = 1.0) -> str:
        """The first bound that the tokens of a lag break, if `part` of each bound is allowed; empty if they break none."""
        least_ess = 1 - part * (1 - self.min_ess_share)
        off_share = seen.masked_share + seen.vetoed_share
        if seen.ess_share < least_ess:
            return f"the effective sample size is {seen.ess_share:.2f} of the signal, below {least_ess:.2f}"
        if off_share > part * self.max_masked_share:
            return (
                f"{off_share:.0%} of the signal is masked or vetoed, above {part * self.max_masked_share:.0%}"
            )
        if seen.behaviour_kl > part * self.max_behaviour_kl:
            return (
                f"the policy is {seen.behaviour_kl:.3f} nats of the signal from the weights that sampled them, "
                f"above {part * self.max_behaviour_kl:.3f}"
            )
        return ""


def bounds_of(admission: AdmissionRecipe) -> StalenessBounds:
    """The bounds in a recipe."""
    control, largest = admission.control, admission.max_lag_versions
    if admission.staleness == "fixed":
        control = StalenessRecipe(least_versions=largest)
    return StalenessBounds(
        least_versions=control.least_versions,
        most_versions=largest if control.most_versions is None else control.most_versions,
        min_ess_share=control.min_ess_share,
        max_masked_share=control.max_masked_share,
        max_behaviour_kl=control.max_behaviour_kl,
        patience_steps=control.patience_steps,
    )


def decide(
    ahead_versions: int, evidence: Sequence[LagMetrics], bounds: StalenessBounds, *, may_raise: bool
) -> tuple[int, str]:
    """The number of versions that admission may run ahead from now on, and the reason; the same number and "" if nothing changes.

    `evidence` contains the measurements of each lag, in order.
    """
    known = {
        seen.lag: seen.signal
        for seen in evidence
        if seen.signal is not None and seen.signal.num_tokens >= MIN_SIGNAL_TOKENS
    }
    if 0 in known and bounds.fault(known[0]):
        return ahead_versions, ""
    for lag, seen in known.items():
        if 0 < lag <= ahead_versions and (fault := bounds.fault(seen)):
            lowered = max(lag - 1, bounds.least_versions)
            return (lowered, _reason(lag, seen, fault)) if lowered < ahead_versions else (ahead_versions, "")
    at_limit = known.get(ahead_versions)
    if not may_raise or at_limit is None or ahead_versions >= bounds.most_versions:
        return ahead_versions, ""
    if bounds.fault(at_limit, part=MARGIN):
        return ahead_versions, ""
    return ahead_versions + 1, _reason(ahead_versions, at_limit, "they keep half of each bound")


def pooled(steps: Iterable[Sequence[LagMetrics]]) -> list[LagMetrics]:
    """The combined effect of several steps on the tokens of each lag, in order of lag: means over tokens, and over their signal."""
    by_lag: dict[int, list[LagMetrics]] = {}
    for seen in (one for step in steps for one in step):
        by_lag.setdefault(seen.lag, []).append(seen)
    return [_mean(lag, parts) for lag, parts in sorted(by_lag.items())]


def _mean(lag: int, parts: Sequence[LagMetrics]) -> LagMetrics:
    num_tokens = sum(part.num_tokens for part in parts)

    def mean(name: str) -> float:
        return sum(getattr(part, name) * part.num_tokens for part in parts) / num_tokens

    return LagMetrics(
        lag=lag,
        num_tokens=num_tokens,
        ess_share=mean("ess_share"),
        masked_share=mean("masked_share"),
        vetoed_share=mean("vetoed_share"),
        behaviour_kl=mean("behaviour_kl"),
        signal=_signal_mean([part.signal for part in parts if part.signal]),
    )


def _signal_mean(parts: Sequence[SignalMetrics]) -> SignalMetrics | None:
    if not parts:
        return None
    total = sum(part.total for part in parts)

    def mean(name: str) -> float:
        return sum(getattr(part, name) * part.total for part in parts) / total

    return SignalMetrics(
        total=total,
        num_tokens=total**2 / sum(part.total**2 / part.num_tokens for part in parts),
        ess_share=mean("ess_share"),
        masked_share=mean("masked_share"),
        vetoed_share=mean("vetoed_share"),
        behaviour_kl=mean("behaviour_kl"),
    )


class StalenessController:
    """Decides how many versions admission of one run may run ahead. Its data is in the journal, so a resumed run continues as before."""

    def __init__(
        self, bounds: StalenessBounds, *, changes: Iterable[StalenessRow] = (), steps: Iterable[StepRow] = ()
    ) -> None:
        """`changes` and `steps` are the rows in the journal of a resumed run."""
        self._bounds = bounds
        self._seen = deque((row.by_lag for row in steps), maxlen=WINDOW_STEPS)
        self._lowered_at: int | None = None
        self._reason = ""
        self.ahead_versions = bounds.least_versions
        for change in changes:
            self._apply(change)
        self.ahead_versions = min(max(self.ahead_versions, bounds.least_versions), bounds.most_versions)

    @property
    def is_fixed(self) -> bool:
        return self._bounds.least_versions == self._bounds.most_versions

    @property
    def sentence(self) -> str:
        """The number of versions that admission may run ahead, and the reason; empty if it never changes."""
        if self.is_fixed:
            return ""
        bounds = self._bounds
        limit = f"{self.ahead_versions} versions ahead, of {bounds.least_versions} to {bounds.most_versions}"
        return f"staleness is controlled: {limit}" + (f" ({self._reason})" if self._reason else "")

    def observe(self, step: int, by_lag: tuple[LagMetrics, ...]) -> StalenessRow | None:
        """Takes the metrics of a step into account. Returns the resulting change, if any."""
        self._seen.append(by_lag)
        rested = self._lowered_at is None or step - self._lowered_at >= self._bounds.patience_steps
        versions, reason = decide(self.ahead_versions, pooled(self._seen), self._bounds, may_raise=rested)
        if versions == self.ahead_versions:
            return None
        change = StalenessRow(step=step, before=self.ahead_versions, ahead_versions=versions, reason=reason)
        self._apply(change)
        return change

    def _apply(self, change: StalenessRow) -> None:
        self.ahead_versions, self._reason = change.ahead_versions, change.reason
        if change.ahead_versions < change.before:
            self._lowered_at = change.step


def _reason(lag: int, seen: SignalMetrics, what: str) -> str:
    return f"of {seen.num_tokens:,.0f} tokens with a signal at lag {lag}, {what}"
