"""How far admission may run ahead of the steps, in weight versions. Pure decisions, made once a step, from the journal alone.

`max_lag_versions` bounds the lag of what is trained, and the promise about it holds whatever is decided here: the number that
this module decides replaces it only where admission asks how many groups may be enqueued, and is never larger.

The evidence is what the objective did to the tokens of each lag in the last steps: the effective sample size of their weights,
the share of them that it switched off, and how far the policy has moved from the weights that sampled them. A lag is useful
while all three keep their bounds.

lower   A lag up to the present limit breaks a bound, and fresh tokens do not: the limit becomes the largest lag below it.
        Where fresh tokens break it too, the cause is not staleness, so a shorter way ahead would not help.
raise   Tokens of the limit itself were trained, and use up at most half of each bound: one version more. Without such tokens
        nothing is gained by raising, because rollouts are not held up by admission.

Between raising and lowering lies half of each bound, and after lowering a few steps pass, so that the limit does not swing.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.learner.config import LagMetrics
from trainer.recipe import AdmissionRecipe, StalenessRecipe
from trainer.records.journal import StalenessRow, StepRow
from trainer.records.lags import pooled

WINDOW_STEPS = 4
"""The evidence is the mean over so many steps: the number of stale tokens in one step is small."""

MIN_TOKENS = 256
"""With fewer tokens in the window, nothing is known of a lag."""

MARGIN = 0.5
"""The part of each bound that tokens may use up before the limit is raised."""


@dataclass(frozen=True, slots=True)
class StalenessBounds:
    """Of one run. With `least_versions` equal to `most_versions`, nothing is ever decided."""

    least_versions: int  # how far admission may run ahead at least, and at first
    most_versions: int
    min_ess_share: float
    max_masked_share: float
    max_behaviour_kl: float  # nats per token
    patience_steps: int  # that pass between lowering the limit and raising it

    def fault(self, seen: LagMetrics, *, part: float = 1.0) -> str:
        """Which of the bounds the tokens of a lag break, using `part` of what each allows; empty if none."""
        least_ess = 1 - part * (1 - self.min_ess_share)
        off_share = seen.masked_share + seen.vetoed_share
        if seen.ess_share < least_ess:
            return (
                f"their effective sample size is {seen.ess_share:.2f} of their number, below {least_ess:.2f}"
            )
        if off_share > part * self.max_masked_share:
            return f"{off_share:.0%} of them are masked or vetoed, above {part * self.max_masked_share:.0%}"
        if seen.behaviour_kl > part * self.max_behaviour_kl:
            return (
                f"the policy is {seen.behaviour_kl:.3f} nats per token from the weights that sampled them, "
                f"above {part * self.max_behaviour_kl:.3f}"
            )
        return ""


def bounds_of(admission: AdmissionRecipe) -> StalenessBounds:
    """Of a run with this recipe."""
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
    """How many versions admission may run ahead from now on, and why; the same number and "" if nothing changes.

    `evidence` is what is known of each lag, in order.
    """
    known = {seen.lag: seen for seen in evidence if seen.num_tokens >= MIN_TOKENS}
    if 0 in known and bounds.fault(known[0]):
        return ahead_versions, ""
    for lag, seen in known.items():
        if 0 < lag <= ahead_versions and (fault := bounds.fault(seen)):
            lowered = max(lag - 1, bounds.least_versions)
            return (lowered, _reason(seen, fault)) if lowered < ahead_versions else (ahead_versions, "")
    at_limit = known.get(ahead_versions)
    if not may_raise or at_limit is None or ahead_versions >= bounds.most_versions:
        return ahead_versions, ""
    if bounds.fault(at_limit, part=MARGIN):
        return ahead_versions, ""
    return ahead_versions + 1, _reason(at_limit, "they keep half of each bound")


class StalenessController:
    """Decides how far ahead admission of one run may go. What it knows is in the journal, so a resumed run goes on as before."""

    def __init__(
        self, bounds: StalenessBounds, *, changes: Iterable[StalenessRow] = (), steps: Iterable[StepRow] = ()
    ) -> None:
        """`changes` and `steps` are in the journal of a resumed run."""
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
        """How far admission may run ahead, and why; empty if that never changes."""
        if self.is_fixed:
            return ""
        bounds = self._bounds
        told = f"{self.ahead_versions} versions ahead, of {bounds.least_versions} to {bounds.most_versions}"
        return f"staleness is controlled: {told}" + (f" ({self._reason})" if self._reason else "")

    def observe(self, step: int, by_lag: tuple[LagMetrics, ...]) -> StalenessRow | None:
        """Take the metrics of a step into account. Returns what it changes, if anything."""
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


def _reason(seen: LagMetrics, what: str) -> str:
    return f"of {seen.num_tokens:,} tokens at lag {seen.lag}, {what}"
