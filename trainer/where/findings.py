"""Where the time of a run went, from its directory: accounts of every role, the waits of rollouts, and advice."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from pipeline.rollout_store.reading import DIRECTORY, RolloutStore
from trainer.records.journal import DeliveryRow, EndRow, EpisodeRow, StepRow, journal_of, read
from trainer.records.time_rows import FleetRow, StartRow
from trainer.where.account import Account
from trainer.where.advice import Advice, Known, advice_of, is_waiting_explained
from trainer.where.engine_time import Span, engines_account, pause_spans, spans_of
from trainer.where.rollout_waits import RolloutWaits, rollout_waits
from trainer.where.slots import at_work, slots_account
from trainer.where.trainer_time import WAIT, trainer_account, window_of
from trainer.where.waiting import Waiting, waiting_of

UNEXPLAINED = (
    "Why the trainer waited for groups is unknown: the journal has no samples of the fleet (fleet.jsonl)."
)


class WhereFindings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run, as far as its records tell."""

    trainer: Account
    slots: Account
    engines: Account
    rollouts: RolloutWaits
    waiting: Waiting | None  # what slots did while the trainer waited for groups
    advice: tuple[Advice, ...]  # what would help, the most first
    unknown: tuple[str, ...] = ()


def where(run_dir: Path, *, read_rollouts: bool = True) -> WhereFindings:
    """Read the journal of the run in `run_dir`, and the rollouts that it keeps, which takes longer. Raises MalformedJournal."""
    directory = journal_of(run_dir)
    rows = list({row.request_id: row for row in read(directory, EpisodeRow)}.values())
    steps, starts = list(read(directory, StepRow)), list(read(directory, StartRow))
    endings, samples = list(read(directory, EndRow)), list(read(directory, FleetRow))
    deliveries = list(read(directory, DeliveryRow))
    trainer, slots = trainer_account(starts, steps, endings), slots_account(rows, samples)
    waiting = waiting_of(trainer.parts_s.get(WAIT, 0.0), samples)
    known = Known(
        trainer=trainer,
        slots=slots,
        waiting=waiting,
        evaluation_share=_share(rows, [row for row in rows if row.purpose == "eval"]),
        dropped_share=_share(rows, [row for row in rows if row.fate == "zero_variance"]),
    )
    return WhereFindings(
        trainer=trainer,
        slots=slots,
        engines=engines_account(
            [*_pauses(deliveries), *(_generated(run_dir) if read_rollouts else ())],
            {url for row in deliveries for url in row.engines},
            window_of(starts, steps, endings),
        ),
        rollouts=rollout_waits(rows, steps),
        waiting=waiting,
        advice=tuple(advice_of(known)),
        unknown=() if is_waiting_explained(known) else (UNEXPLAINED,),
    )


def _share(rows: Sequence[EpisodeRow], of: Sequence[EpisodeRow]) -> float:
    """The share of these rows in the time of all claims."""
    whole_s = sum(at_work(rows).values())
    return sum(at_work(of).values()) / whole_s if whole_s else 0.0


def _pauses(deliveries: Sequence[DeliveryRow]) -> Iterator[Span]:
    for row in deliveries:
        yield from pause_spans(row.pauses)


def _generated(run_dir: Path) -> Iterator[Span]:
    """What engines generated, by the rollouts that the run keeps."""
    for stored in RolloutStore(run_dir / DIRECTORY).rollouts(lambda head: not head.is_dead):
        if stored.rollout.trajectory is not None:
            yield from spans_of(stored.rollout.trajectory)
