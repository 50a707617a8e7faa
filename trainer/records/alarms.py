"""The alarms of a run: conditions on its rows, and on the free space of its disk and its Redis.

Everything here is a pure function of its arguments, so a resumed run that gets the rows of its journal decides as the killed one would have
decided. An alarm begins when its number passes the limit and is over when the number is back at CLEAR_SHARE of the limit, so a number that
stays near the limit does not begin it again and again.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import fmean, variance

from pipeline.intervals import Estimate, paired_difference, t_quantile
from pipeline.journal.rows import AlarmRow, EpisodeRow, EvaluationRow, Row, StepRow
from trainer.recipe import AlarmsRecipe
from trainer.recipe.schema import AlarmKind

TAIL = 0.001
"""A difference may be chance if its 99.8 % interval, with this probability beyond each end, contains 0."""

TAIL_OF_EXTREME = 5e-7
"""The same, at 99.9999 %, if one of the two means is the highest or the lowest of many windows, which chance alone makes extreme."""


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of the steps of a window."""

    value: float
    variance: float  # variance of the mean
    num_steps: int

    def __str__(self) -> str:
        half = t_quantile(self.num_steps - 1) * self.variance**0.5
        return Estimate(self.value, self.value - half, self.value + half, self.num_steps).plain()


class StepWindows:
    """The windows of one number. Apart from the newest one, no window overlaps the newest. A window that does not exist yet is None."""

    def __init__(self, size: int) -> None:
        self.size = size  # number of steps
        self.first: Mean | None = None
        self.highest_before: Mean | None = None
        self.lowest_before: Mean | None = None
        self._values: deque[float] = deque(maxlen=size)
        self._later: deque[Mean] = deque()  # windows that overlap the newest one, oldest first
        self._full: Mean | None = None

    @property
    def last(self) -> Mean | None:
        """The newest window; None until there is a window that does not overlap the first."""
        return self._full if self.highest_before is not None else None

    def add(self, value: float) -> None:
        """Adds the number of the next step."""
        self._values.append(value)
        if len(self._values) < self.size:
            return
        self._full = mean_of(self._values)
        self.first = self.first or self._full
        if len(self._later) == self.size:
            self._settle(self._later.popleft())
        self._later.append(self._full)

    def _settle(self, window: Mean) -> None:
        """Adds a window that no longer overlaps the newest one to the highest and lowest seen."""
        if self.highest_before is None or window.value > self.highest_before.value:
            self.highest_before = window
        if self.lowest_before is None or window.value < self.lowest_before.value:
            self.lowest_before = window


def mean_of(values: deque[float]) -> Mean:
    return Mean(fmean(values), variance(values) / len(values), len(values))


def differ(one: Mean, other: Mean, tail: float = TAIL) -> bool:
    """Whether the interval of the difference excludes 0: that of Welch's t test, with the degrees of freedom of Welch and Satterthwaite
    (Biometrika 34, 1947), so that few steps make it wide.
    """
    total = one.variance + other.variance
    parts = sum(each.variance**2 / (each.num_steps - 1) for each in (one, other))
    degrees = int(total**2 / parts) if parts else one.num_steps + other.num_steps - 2
    return abs(one.value - other.value) > t_quantile(degrees, tail) * total**0.5


CLEAR_SHARE = 0.8
"""An alarm is over when its number is at most this share of the limit."""

FORMAT_ERRORS = "exhausted:format_errors"
"""The outcome of an episode that format errors ended."""

FROM_TREE = "submitted:tree"
"""The outcome of an episode whose printed patch was not graded, but its tree's own difference."""

NUM_LAST_EPISODES = 20
"""The share of these episodes that format errors ended is known without a step: a policy that writes nonsense never reaches one."""


@dataclass(frozen=True, slots=True)
class Storage:
    """The free space of the disk and the memory use of Redis."""

    disk_free_bytes: int
    redis_bytes: int | None = None  # bytes that Redis uses; None if it does not answer
    redis_limit_bytes: int = 0  # bytes that Redis may use; 0: not known


@dataclass(frozen=True, slots=True)
class Condition:
    """The state of one alarm's condition at a moment. If neither `is_on` nor `is_over` holds, the alarm does not change."""

    kind: AlarmKind
    is_on: bool
    is_over: bool
    text: str
    subject: str = ""


class Alarms:
    """The alarms of one run."""

    def __init__(self, recipe: AlarmsRecipe, *, max_lag_versions: int) -> None:
        self._recipe = recipe
        self._max_lag_versions = max_lag_versions
        self._step = 0
        window = recipe.window_steps
        self._rewards = StepWindows(window)
        self._gaps = StepWindows(window)
        self._lags = StepWindows(window)
        self._masked = StepWindows(window)  # share of each step's signal that was masked or vetoed
        self._entropies = StepWindows(window)
        # Shares of the episodes since the step before.
        self._format_errors = StepWindows(window)
        self._from_tree = StepWindows(window)
        self._scores = StepWindows(window)
        self._judged_rewards = StepWindows(window)  # mean rewards of the steps in `_scores`
        self._num_episodes = 0  # training episodes since the last step
        self._num_format_errors = 0  # number of these that format errors ended
        self._num_from_tree = 0  # number of these whose tree was graded
        self._last_episodes = deque[bool](maxlen=NUM_LAST_EPISODES)  # whether format errors ended each
        self._best_heldout: dict[str, EvaluationRow] = {}  # best result by the name of what was evaluated
        self._firing: dict[tuple[str, str], AlarmRow] = {}

    @property
    def firing(self) -> tuple[AlarmRow, ...]:
        """The alarms that have begun and are not over."""
        return tuple(self._firing.values())

    def recall(self, rows: Iterable[Row]) -> None:
        """Takes the rows of an earlier process into account, in the order in which they were written. No alarm begins because of them."""
        for row in rows:
            if isinstance(row, AlarmRow):
                self._note(row)
            else:
                self._conditions(row)

    def observe(self, row: Row) -> list[AlarmRow]:
        """Takes a new row into account. Returns the alarms that begin or end because of it."""
        return self._changes(self._conditions(row))

    def observe_storage(self, storage: Storage) -> list[AlarmRow]:
        """Does what `observe` does, for a measurement of disk and Redis."""
        return self._changes(storage_conditions(self._recipe, storage))

    def _changes(self, conditions: Iterable[Condition]) -> list[AlarmRow]:
        found: list[AlarmRow] = []
        for one in conditions:
            is_firing = (one.kind, one.subject) in self._firing
            if one.kind in self._recipe.kinds_off or not (one.is_over if is_firing else one.is_on):
                continue
            found.append(
                AlarmRow(
                    step=self._step, kind=one.kind, subject=one.subject, text=one.text, is_over=is_firing
                )
            )
            self._note(found[-1])
        return found

    def _note(self, row: AlarmRow) -> None:
        if row.is_over:
            self._firing.pop((row.kind, row.subject), None)
        elif row.kind not in self._recipe.kinds_off:
            self._firing[row.kind, row.subject] = row

    def _conditions(self, row: Row) -> list[Condition]:
        """The conditions of a row, which is first added to the windows."""
        if isinstance(row, StepRow):
            self._add_step(row)
            return self._step_conditions()
        if isinstance(row, EvaluationRow) and row.num_episodes:
            return self._heldout_conditions(row)
        if isinstance(row, EpisodeRow) and row.purpose == "train" and row.reward is not None:
            self._num_episodes += 1
            self._num_format_errors += row.outcome == FORMAT_ERRORS
            self._num_from_tree += row.outcome == FROM_TREE
            self._last_episodes.append(row.outcome == FORMAT_ERRORS)
            return _prevailing_format_errors(self._last_episodes, self._recipe.format_error_share)
        return []

    def _add_step(self, row: StepRow) -> None:
        self._step = row.step
        self._rewards.add(row.reward_mean)
        self._lags.add(row.lag_mean)
        if row.signal is not None:
            self._masked.add(row.signal.masked_share + row.signal.vetoed_share)
        self._entropies.add(row.entropy)
        if row.is_gap_measured and row.logprob_gap_mean is not None:
            self._gaps.add(row.logprob_gap_mean)
        if row.judging is not None and row.judging.score_mean is not None:
            self._scores.add(row.judging.score_mean)
            self._judged_rewards.add(row.reward_mean)
        if self._num_episodes:
            self._format_errors.add(self._num_format_errors / self._num_episodes)
            self._from_tree.add(self._num_from_tree / self._num_episodes)
        self._num_episodes = self._num_format_errors = self._num_from_tree = 0

    def _step_conditions(self) -> list[Condition]:
        recipe = self._recipe
        found = (
            _success(self._rewards, recipe.success_drop),
            _gap(self._gaps, recipe),
            _lag(self._lags, recipe.lag_share * self._max_lag_versions),
            _masked(self._masked, recipe.masked_signal_share),
            _rise("format_errors_rise", "format errors ended", self._format_errors, recipe.format_error_rise),
            _rise(
                "trees_rise",
                "the tree was graded in place of what was printed in",
                self._from_tree,
                recipe.tree_rise,
            ),
            _entropy(self._entropies, recipe.entropy_share),
            _gaming(self._scores, self._judged_rewards),
        )
        return [one for one in found if one is not None]

    def _heldout_conditions(self, row: EvaluationRow) -> list[Condition]:
        """The conditions on success against the best earlier success, of the same tasks, sampled in the same way."""
        subject = f"held out{f' {row.tasks}' if row.tasks else ''}{', greedy' if row.greedy else ''}"
        best = self._best_heldout.get(subject)
        if best is None or row.success > best.success:
            self._best_heldout[subject] = row
        if best is None:
            return []
        text = (
            f"success ({subject}) is {row.estimate.plain()} with weights v{row.version}; "
            f"the best evaluation before had {best.estimate.plain()}"
        )
        change = paired_difference(best.rewards, row.rewards, TAIL)
        is_real = change is not None and change.high < 0
        drop = best.success - row.success
        return [_fall(drop, self._recipe.success_drop, text, subject, is_real=is_real)]


def storage_conditions(recipe: AlarmsRecipe, storage: Storage) -> list[Condition]:
    """The conditions of disk and Redis."""
    free, least = storage.disk_free_bytes, recipe.disk_free_bytes
    text = f"the file system of the run's directory has {free / 1024**3:.1f} GiB free; the limit is {least / 1024**3:.1f}"
    found = [_condition("disk_fills", least / max(free, 1), 1.0, text)]
    if storage.redis_bytes is not None and storage.redis_limit_bytes:
        used = storage.redis_bytes / storage.redis_limit_bytes
        text = f"Redis uses {used:.0%} of {storage.redis_limit_bytes / 1024**3:.1f} GiB; the limit is {recipe.redis_share:.0%}"
        found.append(_condition("redis_fills", used, recipe.redis_share, text))
    return found


def _condition(kind: AlarmKind, value: float, limit: float, text: str) -> Condition:
    return Condition(kind, is_on=value > limit, is_over=value <= CLEAR_SHARE * limit, text=text)


def _success(rewards: StepWindows, most: float) -> Condition | None:
    best, last = rewards.highest_before, rewards.last
    if best is None or last is None:
        return None
    text = f"mean reward of the last {rewards.size} steps is {last}; the best {rewards.size} steps before had {best}"
    is_real = differ(last, best, TAIL_OF_EXTREME)
    return _fall(best.value - last.value, most, text, "training", is_real=is_real)


def _fall(drop: float, most: float, text: str, subject: str, *, is_real: bool) -> Condition:
    return Condition(
        "success_falls",
        is_on=drop > most and is_real,
        is_over=drop <= CLEAR_SHARE * most,
        text=text,
        subject=subject,
    )


def _gap(gaps: StepWindows, recipe: AlarmsRecipe) -> Condition | None:
    first, last = gaps.first, gaps.last
    if first is None or last is None:
        return None
    limit = max(recipe.gap_growth * first.value, recipe.gap_floor_nats)
    text = (
        f"the mean log-prob gap of the last {gaps.size} audited steps is {last.value:.2g} nats; "
        f"that of the first was {first.value:.2g}"
    )
    return _condition("gap_grows", last.value, limit, text)


def _lag(lags: StepWindows, limit_versions: float) -> Condition | None:
    """The condition on the lag; None if the limit is 0, because no trajectory may lag then."""
    if lags.last is None or not limit_versions:
        return None
    text = f"the mean lag of the last {lags.size} steps is {lags.last.value:.2f} versions; the limit is {limit_versions:.2f}"
    return _condition("lag_saturates", lags.last.value, limit_versions, text)


def _masked(shares: StepWindows, most: float) -> Condition | None:
    if shares.last is None:
        return None
    text = f"{shares.last.value:.0%} of the signal of the last {shares.size} steps was masked or vetoed; the limit is {most:.0%}"
    return _condition("signal_is_masked", shares.last.value, most, text)


def _rise(kind: AlarmKind, what: str, shares: StepWindows, most: float) -> Condition | None:
    """The condition on a share of the training episodes, of which `what` happened."""
    lowest, last = shares.lowest_before, shares.last
    if lowest is None or last is None:
        return None
    rise = last.value - lowest.value
    text = (
        f"{what} {last.value:.0%} of the training episodes of the last {shares.size} steps; "
        f"it was {lowest.value:.0%} in the best {shares.size} steps before"
    )
    return Condition(
        kind,
        is_on=rise > most and differ(last, lowest, TAIL_OF_EXTREME),
        is_over=rise <= CLEAR_SHARE * most,
        text=text,
    )


def _prevailing_format_errors(last: Collection[bool], most: float) -> list[Condition]:
    if len(last) < NUM_LAST_EPISODES:
        return []
    text = f"format errors ended {sum(last)} of the last {len(last)} training episodes, so the policy learns nothing"
    return [_condition("format_errors_prevail", sum(last) / len(last), most, text)]


def _entropy(entropies: StepWindows, share: float) -> Condition | None:
    first, last = entropies.first, entropies.last
    if first is None or last is None or first.value <= 0:
        return None
    text = f"the mean entropy of the last {entropies.size} steps is {last.value:.3g} nats; that of the first was {first.value:.3g}"
    return Condition(
        "entropy_collapses",
        is_on=last.value < share * first.value,
        is_over=CLEAR_SHARE * last.value >= share * first.value,
        text=text,
    )


def _gaming(scores: StepWindows, rewards: StepWindows) -> Condition | None:
    """The condition on scores and rewards of the last window against the first. It ends when one of the two differences disappears."""
    if not (scores.first and scores.last and rewards.first and rewards.last):
        return None
    score_rise = scores.last.value - scores.first.value
    reward_fall = rewards.first.value - rewards.last.value
    text = (
        f"since the first {scores.size} judged steps the judge's mean score went from {scores.first} to {scores.last}, the mean reward "
        f"from {rewards.first} to {rewards.last}"
    )
    return Condition(
        "judge_is_gamed",
        is_on=min(score_rise, reward_fall) > 0
        and differ(scores.last, scores.first)
        and differ(rewards.last, rewards.first),
        is_over=min(score_rise, reward_fall) <= 0,
        text=text,
    )
