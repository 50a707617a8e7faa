"""Where the time of a run's steps went, summed up over their rows."""

from collections.abc import Iterator, Sequence

import msgspec

from trainer.records.journal import StepRow

PARTS = (
    "wait_s",
    "forward_s",
    "backward_s",
    "optimizer_s",
    "audit_s",
    "export_s",
    "engines_s",
    "checkpoint_s",
    "evaluation_s",
    "other_s",
)
"""The fields of a step's row that sum up to its `wall_s`."""


class StepSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Of the steps whose rows say it. Older journals tell nothing: zeros."""

    wall_s: float = 0.0
    parts_s: dict[str, float] = {}  # by name, without "_s"; their sum is `wall_s`
    tokens_per_s: float = 0.0  # of all samples, while the learner trained
    # Of the devices' peak, while the learner trained; None where the peak is not known.
    utilisation: float | None = None


def step_seconds(rows: Sequence[StepRow]) -> StepSeconds:
    """Sum up the rows of a run."""
    told = [row for row in rows if row.wall_s]
    train_s = sum(row.train_s for row in told)
    shares = [row.utilisation * row.train_s for row in told if row.utilisation is not None]
    return StepSeconds(
        wall_s=sum(row.wall_s for row in told),
        parts_s={name.removesuffix("_s"): sum(getattr(row, name) for row in told) for name in PARTS},
        tokens_per_s=sum(row.num_sample_tokens for row in told) / train_s if train_s else 0.0,
        utilisation=sum(shares) / train_s if train_s and len(shares) == len(told) else None,
    )


def lines_of(found: StepSeconds) -> Iterator[str]:
    """For people; nothing of journals that do not tell."""
    if not found.wall_s:
        return
    parts = (f"{name} {seconds / found.wall_s:.1%}" for name, seconds in found.parts_s.items())
    yield f"{found.wall_s:,.1f} s: {', '.join(parts)}"
    share = "" if found.utilisation is None else f", {found.utilisation:.1%} of the devices' peak"
    yield f"{found.tokens_per_s:,.0f} tokens a second while training{share}"
