"""A replay as text: beside what the run wrote down, or beside a replay with another recipe."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from trainer.learner.config import NotFinite, StepMetrics
from trainer.records.journal import StepRow

COMPARED = (
    "loss",
    "grad_norm",
    "lr",
    "num_trained_tokens",
    "entropy",
    "ratio_mean",
    "ratio_max",
    "ess_share",
    "masked_share",
    "vetoed_share",
)
"""What the row of a step has of the learner's metrics: with the same recipe, each must be the same number."""

SHOWN = ("loss", "grad_norm", "entropy", "ess_share", "masked_share", "vetoed_share", "behaviour_kl")
"""What two recipes are compared by."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step of the run, and what the learner made of its rollouts."""

    row: StepRow
    metrics: StepMetrics | NotFinite

    @property
    def differing(self) -> tuple[str, ...]:
        """The metrics that are not those of the run."""
        if isinstance(self.metrics, NotFinite):
            return (f"{self.metrics.what} not finite",)
        return tuple(name for name in COMPARED if getattr(self.metrics, name) != getattr(self.row, name))


def beside_the_run(steps: Sequence[ReplayedStep]) -> Iterator[str]:
    """A line for each step, and how many are the same."""
    yield f"{'step':>6}{'loss':>14}{'replayed':>14}{'grad norm':>14}{'replayed':>14}   differs in"
    for step in steps:
        row, found = step.row, step.metrics
        replayed = (
            ("-", "-") if isinstance(found, NotFinite) else (f"{found.loss:+.6g}", f"{found.grad_norm:.6g}")
        )
        yield (
            f"{row.step:>6}{row.loss:>+14.6g}{replayed[0]:>14}{row.grad_norm:>14.6g}{replayed[1]:>14}   "
            f"{', '.join(step.differing) or '-'}"
        )
    num_same = sum(not step.differing for step in steps)
    yield f"{num_same} of {len(steps)} steps are bit for bit those of the run"


def side_by_side(
    ours: Sequence[ReplayedStep], others: Sequence[ReplayedStep], changes: Sequence[str]
) -> Iterator[str]:
    """Two lines for each step, one for each recipe, and their means."""
    yield "A: as the run was"
    yield f"B: {'; '.join(changes)}"
    yield f"{'step':>6}  " + "".join(f"{name:>14}" for name in SHOWN)
    for one, other in zip(ours, others, strict=True):
        yield _line(str(one.row.step), "A", [one])
        yield _line("", "B", [other])
    yield _line("mean", "A", ours)
    yield _line("", "B", others)
    num_same = sum(not step.differing for step in ours)
    yield f"A: {num_same} of {len(ours)} steps are bit for bit those of the run"


def _line(label: str, recipe: str, steps: Sequence[ReplayedStep]) -> str:
    """The means over the steps whose loss and gradient are finite; "-" if there is none."""
    finite = [step.metrics for step in steps if isinstance(step.metrics, StepMetrics)]
    values = [f"{fmean(getattr(one, name) for one in finite):.6g}" if finite else "-" for name in SHOWN]
    return f"{label:>6} {recipe}" + "".join(f"{value:>14}" for value in values)
