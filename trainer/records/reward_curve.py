"""Draws the reward curve of a run, with its lag and entropy, from the run's journal."""

from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trainer.records.journal import EpisodeRow, EvaluationRow, StepRow, read
from trainer.records.summary import finished_episodes, rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, SAMPLED, GREEDY, QUIET = "#1f4e79", "#c0392b", "#d98c21", "#7f8c8d"


def draw(directory: Path, picture: Path, *, title: str) -> None:
    """Write `picture` (PNG) of the journal in `directory`.

    Raises ValueError if no episode has a reward yet, MalformedJournal.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    episodes = finished_episodes(read(directory, EpisodeRow))
    if not episodes:
        raise ValueError(f"{directory}: no training episode has a reward yet, so there is nothing to draw")
    finished_at = [row.finished_at for row in episodes]
    figure, (reward, lag, entropy) = pyplot.subplots(
        3, 1, figsize=(9, 7), sharex=True, height_ratios=(5, 1.2, 1.2), layout="constrained"
    )
    _draw_reward(reward, episodes)
    _draw_evaluations(reward, list(read(directory, EvaluationRow)), finished_at)
    _draw_steps(lag, entropy, list(read(directory, StepRow)), finished_at)
    reward.set_title(title, loc="left", fontweight="bold")
    reward.legend(loc="upper left", frameon=False)
    entropy.set_xlabel("training episodes, in the order they finished")
    for axes in (reward, lag, entropy):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e5e8e8", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)


def _draw_reward(axes: "Axes", episodes: list[EpisodeRow]) -> None:
    window = max(8, min(200, len(episodes) // 8))
    centres, means, errors = rolling(episodes, window)
    axes.plot(centres, means, color=INK, linewidth=2, label=f"training, mean over {window} episodes ± 1 SE")
    axes.fill_between(centres, means - errors, means + errors, color=INK, alpha=0.18, linewidth=0)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlim(0, len(episodes))
    axes.set_ylabel("mean reward")


def rolling(
    episodes: list[EpisodeRow], window: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Centre, mean and standard error of every stretch of `window` episodes, a few hundred at most."""
    window = min(window, len(episodes))
    starts = range(0, len(episodes) - window + 1, max(1, len(episodes) // 400))
    rates = [rate(episodes[start : start + window]) for start in starts]
    centres = [start + window / 2 for start in starts]
    return np.array(centres), np.array([mean for mean, _ in rates]), np.array([error for _, error in rates])


def _draw_evaluations(axes: "Axes", rows: list[EvaluationRow], finished_at: list[float]) -> None:
    styles = ((False, SAMPLED, "o", "held out, sampled"), (True, GREEDY, "D", "held out, greedy"))
    for greedy, colour, marker, label in styles:
        chosen = [row for row in rows if row.greedy == greedy and not row.tasks]
        if chosen:
            axes.errorbar(
                [bisect_right(finished_at, row.at) for row in chosen],
                [row.success for row in chosen],
                yerr=[row.standard_error for row in chosen],
                fmt=marker,
                color=colour,
                markersize=7,
                capsize=4,
                linestyle=":",
                clip_on=False,
                zorder=3,
                label=f"{label} ± 1 SE",
            )


def _draw_steps(lag: "Axes", entropy: "Axes", rows: list[StepRow], finished_at: list[float]) -> None:
    places = [bisect_right(finished_at, row.at) for row in rows]
    lag.plot(places, [row.lag_max for row in rows], color=QUIET, drawstyle="steps-mid", label="max")
    lag.plot(places, [row.lag_mean for row in rows], color=INK, label="mean")
    lag.set_ylim(0, 1.5 * max([1, *(row.lag_max for row in rows)]))
    lag.set_ylabel("lag\n(versions)")
    lag.legend(loc="upper left", frameon=False, ncols=2, fontsize="small", borderaxespad=0)
    entropy.plot(places, [row.entropy for row in rows], color=INK)
    entropy.set_ylim(bottom=0)
    entropy.set_ylabel("entropy\n(nats)")
