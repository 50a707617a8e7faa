"""The summary of a run of supervised fine-tuning, computed from its journal: held-out loss before and after, and what was trained.

Held-out rows are the draws of every interval. The change is paired: it is over the same rows, before and after.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from pipeline.intervals import HEADING, Estimate, clustered_mean
from pipeline.journal.reading import journal_of, read
from pipeline.journal.rows import EndRow, HeldoutLossRow, ImitationStepRow, PublicationRow, SkippedBatchRow
from pipeline.screen import lines
from trainer.records.run_directory import State, read_state


class HeldoutChange(msgspec.Struct, frozen=True, kw_only=True):
    """A number of the held-out rows in the first measurement and in the last, and the paired difference of the two."""

    before: Estimate
    after: Estimate | None  # None: there is one measurement only
    change: Estimate | None  # None: the same, or the rows are not the same


class ImitationSummary(msgspec.Struct, frozen=True, kw_only=True):
    state: State
    state_sentence: str
    steps: int
    skipped: int  # steps whose batch was not finite
    num_rows: int  # trained rows, each as often as it was trained
    num_trained_tokens: int
    loss_first: float | None  # nats per token, mean over the first tenth of the steps, weighted by tokens
    loss_last: float | None  # the same over the last tenth
    train_s: float
    tokens_per_s: float  # tokens of all samples, per second in which the learner trained
    loss: HeldoutChange | None  # nats per token; None: nothing was measured
    likeliest: HeldoutChange | None  # share of tokens that greedy decoding gives
    measurements: tuple[HeldoutLossRow, ...]
    weights: str  # directory of the weights; empty if there is none


def summarize_imitation(run_dir: Path) -> ImitationSummary:
    """Read the journal of the run in `run_dir`. Raises MalformedJournal."""
    directory = journal_of(run_dir)
    steps, endings = list(read(directory, ImitationStepRow)), list(read(directory, EndRow))
    state = read_state(run_dir, steps, endings)
    found, published = list(read(directory, HeldoutLossRow)), list(read(directory, PublicationRow))
    train_s, tenth = sum(row.train_s for row in steps), max(1, len(steps) // 10)
    return ImitationSummary(
        state=state.state,
        state_sentence=state.sentence,
        steps=len(steps),
        skipped=sum(1 for _ in read(directory, SkippedBatchRow)),
        num_rows=sum(len(row.rows) for row in steps),
        num_trained_tokens=sum(row.num_trained_tokens for row in steps),
        loss_first=_mean_loss(steps[:tenth]),
        loss_last=_mean_loss(steps[-tenth:]),
        train_s=train_s,
        tokens_per_s=sum(row.num_sample_tokens for row in steps) / train_s if train_s else 0.0,
        loss=_change(found, "row_losses") if found else None,
        likeliest=_change(found, "row_likeliest") if found else None,
        measurements=tuple(found),
        weights=str(run_dir / "weights" / f"v{published[-1].version:06d}") if published else "",
    )


def _mean_loss(steps: list[ImitationStepRow]) -> float | None:
    num_tokens = sum(row.num_trained_tokens for row in steps)
    return sum(row.loss * row.num_trained_tokens for row in steps) / num_tokens if num_tokens else None


def _change(found: list[HeldoutLossRow], name: str) -> HeldoutChange:
    first, last, change = found[0], found[-1], None
    before, after = (
        one.loss_estimate if name == "row_losses" else one.share_estimate for one in (first, last)
    )
    if len(found) == 1:
        return HeldoutChange(before=before, after=None, change=None)
    if first.row_tokens == last.row_tokens:
        pairs = zip(getattr(first, name), getattr(last, name), strict=True)
        change = clustered_mean(
            (after - before, size) for (before, after), size in zip(pairs, first.row_tokens, strict=True)
        )
    return HeldoutChange(before=before, after=after, change=change)


def imitation_table(summary: ImitationSummary, run_dir: Path) -> str:
    """The summary as text."""
    first, last = ("-" if one is None else f"{one:.4f}" for one in (summary.loss_first, summary.loss_last))
    rows = [
        f"{run_dir}   {summary.steps} steps of supervised fine-tuning, {summary.state_sentence}",
        "",
        *_heldout_lines(summary),
        f"{'trained':<22}{summary.num_rows:,} rows, {summary.num_trained_tokens:,} tokens; loss {first} in the first tenth of the steps, "
        f"{last} in the last",
        f"{'learner':<22}{summary.train_s:,.1f} s, {summary.tokens_per_s:,.0f} tokens a second while training",
    ]
    if summary.skipped:
        rows.append(f"{'skipped':<22}{summary.skipped} steps, whose loss or gradient was not finite")
    rows += [
        f"{'measured':<22}step {row.step}: {row.sentence.removeprefix('held out, ')}"
        for row in summary.measurements
    ]
    if summary.weights:
        rows.append(f"{'weights':<22}{summary.weights}")
    return lines(rows)


def _heldout_lines(summary: ImitationSummary) -> Iterator[str]:
    if summary.loss is None or summary.likeliest is None:
        yield f"{'held out':<22}nothing was measured"
        return
    first, last = summary.measurements[0], summary.measurements[-1]
    names = (
        (f"step {first.step}", f"step {last.step}", "change")
        if last is not first
        else (f"step {first.step}",)
    )
    yield _heldout_line("held out", names).rstrip() + f"   {HEADING}"
    loss, likeliest = summary.loss, summary.likeliest
    yield _heldout_line(
        "  loss, nats a token", (_plain(loss.before), _plain(loss.after), _plain(loss.change, "+.4f"))
    )
    yield _heldout_line(
        "  greedy tokens, %", (_cell(likeliest.before), _cell(likeliest.after), _cell(likeliest.change, "+"))
    )


def _heldout_line(name: str, cells: Iterable[str]) -> str:
    return (f"{name:<22}" + "".join(f"{cell:>30}" for cell in cells)).rstrip()


def _cell(found: Estimate | None, sign: str = "") -> str:
    return "" if found is None else found.cell(sign)


def _plain(found: Estimate | None, form: str = ".4f") -> str:
    """The estimate for a table whose heading names the interval."""
    return "" if found is None else found.plain(form).replace(", 95 %)", ")")
