"""The table `[alarms]` of a recipe: what a run watches of itself, and who is told."""

from collections.abc import Iterator
from typing import Literal

from trainer.recipe.table import Table

AlarmKind = Literal[
    "success_falls",
    "gap_grows",
    "lag_saturates",
    "format_errors_rise",
    "entropy_collapses",
    "judge_is_gamed",
    "disk_fills",
    "redis_fills",
]


class AlarmsRecipe(Table, frozen=True, kw_only=True):
    """What a run watches of itself: [alarms.md](alarms.md). An alarm begins once and ends once; both are a line of the console and a row
    of the journal. A limit of 0 switches its alarm off.
    """

    window_steps: int = 20  # steps over which numbers of steps are averaged before they are compared
    # For success_falls: the mean reward of the last window, or held-out success, is so far below the best before, and the
    # difference is larger than chance explains.
    success_drop: float = 0.2
    # For gap_grows: the mean log-prob gap of the last window is so many times that of the first, ...
    gap_growth: float = 5.0
    # ... and above so many nats.
    gap_floor_nats: float = 0.02
    # For lag_saturates: the mean lag of the last window is above this share of admission.max_lag_versions. Off by default, because it is
    # normal where the learner is slower than the engines.
    lag_share: float = 0.0
    # For format_errors_rise: the share of training episodes that format errors ended is so far above the lowest before, and
    # the difference is larger than chance explains.
    format_error_rise: float = 0.2
    # For entropy_collapses: the mean entropy of the last window is below this share of the first one's.
    entropy_share: float = 0.1
    # For judge_is_gamed: the judge's scores are higher than in the first window while rewards are lower, both by three standard errors.
    judge_gaming: bool = True
    # For disk_fills: the file system of the run's directory has fewer bytes free.
    disk_free_bytes: int = 5 * 1024**3
    # For redis_fills: Redis uses a larger share of its memory limit, or of its host's memory if it has no limit.
    redis_share: float = 0.9
    # Environment variable of the trainer with the URL that each alarm is posted to as JSON; by default none is posted. The URL is not
    # in the recipe because such URLs are secrets.
    webhook_env: str = ""
    # Alarms that end the run in good order when they begin, as in ["entropy_collapses"]; a resume goes on.
    stop_on: tuple[AlarmKind, ...] = ()

    @property
    def kinds_off(self) -> frozenset[AlarmKind]:
        """The alarms whose limit is 0."""
        limits: dict[AlarmKind, float] = {
            "success_falls": self.success_drop,
            "gap_grows": self.gap_growth,
            "lag_saturates": self.lag_share,
            "format_errors_rise": self.format_error_rise,
            "entropy_collapses": self.entropy_share,
            "judge_is_gamed": self.judge_gaming,
            "disk_fills": self.disk_free_bytes,
            "redis_fills": self.redis_share,
        }
        return frozenset(kind for kind, limit in limits.items() if not limit)


def alarm_faults(alarms: AlarmsRecipe) -> Iterator[str]:
    """What is wrong with the table, each with its key and the fix."""
    if alarms.window_steps < 2:
        yield f"alarms.window_steps is {alarms.window_steps}; a standard error needs 2 steps or more"
    for name in ("success_drop", "lag_share", "format_error_rise", "entropy_share", "redis_share"):
        if not 0 <= getattr(alarms, name) < 1:
            yield f"alarms.{name} is {getattr(alarms, name):g}; it is a share: set it below 1, or to 0 to switch the alarm off"
    if alarms.gap_growth and alarms.gap_growth <= 1:
        yield f"alarms.gap_growth is {alarms.gap_growth:g}; set it above 1, or to 0 to switch the alarm off"
    for name in ("gap_floor_nats", "disk_free_bytes"):
        if getattr(alarms, name) < 0:
            yield f"alarms.{name} is {getattr(alarms, name):g}; it must be 0 or more"
    for kind in alarms.stop_on:
        if kind in alarms.kinds_off:
            yield f"alarms.stop_on names {kind}, which is switched off: give its limit, or remove it there"
