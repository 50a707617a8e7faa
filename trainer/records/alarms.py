"""The alarms of a run: conditions over its rows, and over how full its disk and its Redis are.

Everything here is a pure function of what it is given, so a resumed run that is given the rows of its journal decides as the killed
one would have. An alarm begins when its number passes the limit and is over when the number is back at CLEAR_SHARE of the
limit, so a number that stays near the limit does not begin it again and again.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from trainer.recipe import AlarmsRecipe
from trainer.recipe.alarms import AlarmKind
from trainer.records.alarm_row import AlarmRow
from trainer.records.journal import EpisodeRow, EvaluationRow, StepRow
from trainer.records.row import Row
from trainer.records.windows import NUM_ERRORS, NUM_ERRORS_OF_EXTREME, Mean, StepWindows, differ

CLEAR_SHARE = 0.8
"""An alarm is over when its number is at most this share of the limit."""

FORMAT_ERRORS = "exhausted:format_errors"
"""The outcome of an episode that format errors ended."""


@dataclass(frozen=True, slots=True)
class Storage:
    """How full disk and Redis are."""

    disk_free_bytes: int
    redis_bytes: int | None = None  # that Redis uses; None where it does not answer
    redis_limit_bytes: int = 0  # that it may use; 0: not known


@dataclass(frozen=True, slots=True)
class Condition:
    """What is known of one alarm's condition at a moment. Between `is_on` and `is_over` an alarm stays as it is."""

    kind: AlarmKind
    is_on: bool
    is_over: bool
    text: str
    subject: str = ""


class Alarms:
    """Of one run."""

    def __init__(self, recipe: AlarmsRecipe, *, max_lag_versions: int) -> None:
        self._recipe = recipe
        self._max_lag_versions = max_lag_versions
        self._step = 0
        window = recipe.window_steps
        self._rewards = StepWindows(window)
        self._gaps = StepWindows(window)
        self._lags = StepWindows(window)
        self._entropies = StepWindows(window)
        self._format_errors = StepWindows(window)  # shares of the episodes since the step before
        self._scores = StepWindows(window)
        self._judged_rewards = StepWindows(window)  # of the same steps as `_scores`
        self._num_episodes = 0  # training episodes since the last step
        self._num_format_errors = 0  # of them, those that format errors ended
        self._best_heldout: dict[str, Mean] = {}  # by what was evaluated
        self._firing: dict[tuple[AlarmKind, str], AlarmRow] = {}

    @property
    def firing(self) -> tuple[AlarmRow, ...]:
        """The alarms that have begun and are not over."""
        return tuple(self._firing.values())

    def recall(self, rows: Iterable[Row]) -> None:
        """Take the rows of an earlier process into account, in the order in which they were written. Nothing begins by that."""
        for row in rows:
            if isinstance(row, AlarmRow):
                self._note(row)
            else:
                self._conditions(row)

    def observe(self, row: Row) -> list[AlarmRow]:
        """Take a new row into account. Returns what begins and what is over by that."""
        return self._changes(self._conditions(row))

    def observe_storage(self, storage: Storage) -> list[AlarmRow]:
        """As `observe`, for a measurement of disk and Redis."""
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
        """What a row says. It is taken into the windows first."""
        if isinstance(row, StepRow):
            self._add_step(row)
            return self._step_conditions()
        if isinstance(row, EvaluationRow) and row.num_episodes:
            return self._heldout_conditions(row)
        if isinstance(row, EpisodeRow) and row.purpose == "train" and row.reward is not None:
            self._num_episodes += 1
            self._num_format_errors += row.outcome == FORMAT_ERRORS
        return []

    def _add_step(self, row: StepRow) -> None:
        self._step = row.step
        self._rewards.add(row.reward_mean)
        self._lags.add(row.lag_mean)
        self._entropies.add(row.entropy)
        if row.is_gap_measured and row.logprob_gap_mean is not None:
            self._gaps.add(row.logprob_gap_mean)
        if row.judging is not None and row.judging.score_mean is not None:
            self._scores.add(row.judging.score_mean)
            self._judged_rewards.add(row.reward_mean)
        if self._num_episodes:
            self._format_errors.add(self._num_format_errors / self._num_episodes)
        self._num_episodes = self._num_format_errors = 0

    def _step_conditions(self) -> list[Condition]:
        recipe = self._recipe
        found = (
            _success(self._rewards, recipe.success_drop),
            _gap(self._gaps, recipe),
            _lag(self._lags, recipe.lag_share * self._max_lag_versions),
            _format_errors(self._format_errors, recipe.format_error_rise),
            _entropy(self._entropies, recipe.entropy_share),
            _gaming(self._scores, self._judged_rewards),
        )
        return [one for one in found if one is not None]

    def _heldout_conditions(self, row: EvaluationRow) -> list[Condition]:
        """Success against the best before, of the same tasks, sampled in the same way."""
        subject = f"held out{f' {row.tasks}' if row.tasks else ''}{', greedy' if row.greedy else ''}"
        now = Mean(row.success, row.standard_error)
        best = self._best_heldout.get(subject)
        if best is None or now.value > best.value:
            self._best_heldout[subject] = now
        if best is None:
            return []
        text = (
            f"success ({subject}) is {now} with weights v{row.version}; the best evaluation before had {best}"
        )
        return [_fall(best, now, self._recipe.success_drop, text, subject)]


def storage_conditions(recipe: AlarmsRecipe, storage: Storage) -> list[Condition]:
    """Of disk and Redis."""
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
    return _fall(best, last, most, text, "training", num_errors=NUM_ERRORS_OF_EXTREME)


def _fall(
    best: Mean, now: Mean, most: float, text: str, subject: str, *, num_errors: float = NUM_ERRORS
) -> Condition:
    drop = best.value - now.value
    return Condition(
        "success_falls",
        is_on=drop > most and differ(now, best, num_errors),
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
    """None where the limit is 0: then no trajectory may lag at all."""
    if lags.last is None or not limit_versions:
        return None
    text = f"the mean lag of the last {lags.size} steps is {lags.last.value:.2f} versions; the limit is {limit_versions:.2f}"
    return _condition("lag_saturates", lags.last.value, limit_versions, text)


def _format_errors(shares: StepWindows, most: float) -> Condition | None:
    lowest, last = shares.lowest_before, shares.last
    if lowest is None or last is None:
        return None
    rise = last.value - lowest.value
    text = (
        f"format errors ended {last.value:.0%} of the training episodes of the last {shares.size} steps; "
        f"it was {lowest.value:.0%} in the best {shares.size} steps before"
    )
    return Condition(
        "format_errors_rise",
        is_on=rise > most and differ(last, lowest, NUM_ERRORS_OF_EXTREME),
        is_over=rise <= CLEAR_SHARE * most,
        text=text,
    )


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
    """Scores and rewards of the last window against the first. Over when one of the two differences is gone."""
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
