"""`python -m trainer.curve RUN_DIR`: draws the reward curve of a run, with its lag and entropy, as a PNG picture."""

import argparse
import sys
from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeline.commandline import directory, program
from pipeline.intervals import Estimate
from pipeline.journal.reading import NoJournal, found_journal, read
from pipeline.journal.rows import EpisodeRow, EvaluationRow, StepRow
from trainer.report.summary import finished_episodes, rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, SAMPLED, GREEDY, QUIET = "#1f4e79", "#c0392b", "#d98c21", "#7f8c8d"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=program("trainer.curve"), description=__doc__)
    parser.add_argument(
        "run_dir", type=directory, metavar="RUN_DIR", help="the directory of a run, as in runs/demo"
    )
    parser.add_argument("-o", "--output", type=Path, help="the picture to write; default RUN_DIR/curve.png")
    arguments = parser.parse_args(argv)
    picture = arguments.output or arguments.run_dir / "curve.png"

    try:
        journal = found_journal(arguments.run_dir, EpisodeRow)
        draw(journal, picture, title=arguments.run_dir.resolve().name)
    except (ValueError, NoJournal) as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{picture} cannot be written: {error.strerror}; choose another --output")
    print(picture)
    return 0


# Rewards too large for a mean or its error are left out of the picture.
@np.errstate(over="ignore", invalid="ignore")
def draw(journal: Path, picture: Path, *, title: str) -> None:
    """Write `picture` (PNG) from the journal in the directory `journal`.

    Raises ValueError if no episode has a reward yet, MalformedJournal.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    episodes = finished_episodes(read(journal, EpisodeRow))
    if not episodes:
        raise ValueError(f"{journal}: no training episode has a reward yet, so there is nothing to draw")
    finished_at = [row.finished_at for row in episodes]
    figure, (reward, lag, entropy) = pyplot.subplots(
        3, 1, figsize=(9, 7), sharex=True, height_ratios=(5, 1.2, 1.2), layout="constrained"
    )
    _draw_reward(reward, episodes)
    _draw_evaluations(reward, list(read(journal, EvaluationRow)), finished_at)
    _draw_steps(lag, entropy, list(read(journal, StepRow)), finished_at)
    reward.set_title(title, loc="left", fontweight="bold", pad=38)
    # Between the title and the axes, because a curve may be anywhere in them.
    reward.legend(
        loc="lower left", bbox_to_anchor=(0, 1), frameon=False, ncols=2, fontsize="small", borderaxespad=0
    )
    entropy.set_xlabel("training episodes, in the order they finished")
    for axes in (reward, lag, entropy):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e5e8e8", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)


def _draw_reward(axes: "Axes", episodes: list[EpisodeRow]) -> None:
    window = max(8, min(200, len(episodes) // 8))
    centres, means, lows, highs = rolling(episodes, window)
    axes.plot(
        centres,
        means,
        color=INK,
        linewidth=2,
        label=f"training, mean over {window} episodes, with 95 % intervals",
    )
    axes.fill_between(centres, lows, highs, color=INK, alpha=0.18, linewidth=0)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlim(0, len(episodes))
    axes.set_ylabel("mean reward")


def rolling(episodes: list[EpisodeRow], window: int) -> tuple[npt.NDArray[np.float64], ...]:
    """Centre, mean and both ends of its interval of every stretch of `window` episodes, a few hundred at most. NaN, which is not drawn,
    where rewards are too large for a mean.
    """
    window = min(window, len(episodes))
    starts = range(0, len(episodes) - window + 1, max(1, len(episodes) // 400))
    found = [rate(episodes[start : start + window]) for start in starts]
    centres = np.array([start + window / 2 for start in starts])
    rates = np.array([(one.value, one.low, one.high) for one in found if one])
    rates[~np.isfinite(rates).all(axis=1)] = np.nan
    return centres, *rates.T


def _draw_evaluations(axes: "Axes", rows: list[EvaluationRow], finished_at: list[float]) -> None:
    styles = ((False, SAMPLED, "o", "held out, sampled"), (True, GREEDY, "D", "held out, greedy"))
    for greedy, colour, marker, label in styles:
        chosen = [row for row in rows if row.greedy == greedy and not row.tasks]
        if chosen:
            axes.errorbar(
                [bisect_right(finished_at, row.at) for row in chosen],
                [row.success for row in chosen],
                # A success beyond 0 and 1, which no grader gives, has no bar.
                yerr=np.array([_distances(row.estimate) for row in chosen]).clip(min=0).T,
                fmt=marker,
                color=colour,
                markersize=7,
                capsize=4,
                linestyle=":",
                clip_on=False,
                zorder=3,
                label=f"{label}, with 95 % intervals",
            )


def _distances(one: Estimate) -> tuple[float, float]:
    return one.value - one.low, one.high - one.value


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


if __name__ == "__main__":
    sys.exit(main())
