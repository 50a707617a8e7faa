"""What a run's heartbeat says: the phase, what the next step waits for, and whether admission is open."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from pipeline.census import RunStatus
from trainer.loop.budget import AdmissionBudget
from trainer.loop.state import RunState
from trainer.recipe import Recipe
from trainer.records.alarm_row import AlarmRow
from trainer.rollouts.groups import GroupBook
from trainer.rollouts.ledger import Ledger

WAITING = "waiting for trajectories"
"""The phase that has a detail."""


class EvaluationProgress(Protocol):
    @property
    def progress(self) -> str:
        """One sentence; empty when no evaluation is under way."""
        ...


class FiringAlarms(Protocol):
    @property
    def firing(self) -> tuple[AlarmRow, ...]:
        """Those that have begun and are not over."""
        ...


class StatusWriter:
    """Of one run."""

    def __init__(
        self,
        recipe: Recipe,
        run_id: str,
        state: RunState,
        budget: AdmissionBudget,
        *,
        book: GroupBook,
        ledger: Ledger,
        heldout: EvaluationProgress,
        quarantined: Iterable[str],
        alarms: FiringAlarms,
        journal: Path,
        trouble: Callable[[], str],
    ) -> None:
        """`trouble` says why no engine serves the newest weights, or why nothing is judged; empty if all is well."""
        self._recipe = recipe
        self._run_id = run_id
        self._state = state
        self._budget = budget
        self._book = book
        self._ledger = ledger
        self._heldout = heldout
        self._quarantined = quarantined
        self._alarms = alarms
        self._journal = journal
        self._trouble = trouble

    def status(self) -> RunStatus:
        return RunStatus(
            run_id=self._run_id,
            phase=self._state.phase,
            detail=self._detail(),
            step=self._state.step,
            num_steps=self._recipe.num_steps,
            version=max(0, self._state.served_version),
            admission=self._budget.sentence(),
            journal=str(self._journal.resolve()),
            quarantined=tuple(self._quarantined),
            updated_at=time.time(),
            groups_without_signal=self._ledger.groups_without_signal,
            max_groups_without_signal=self._recipe.batch.max_groups_without_signal,
            judge_wait_s=self._recipe.judge.wait_s if self._recipe.judge.is_on else None,
            judge_required=self._recipe.judge.is_on and self._recipe.judge.required,
            alarms=tuple(f"{row.kind} since step {row.step}: {row.text}" for row in self._alarms.firing),
        )

    def _detail(self) -> str:
        book, heldout = self._book, self._heldout.progress
        if self._state.phase != WAITING:
            return heldout
        per_step, step = self._recipe.batch.groups_per_step, self._state.step + 1
        if book.num_unjudged and book.num_ready >= per_step:
            waits = (
                f"step {step} waits for the judgements of {book.num_unjudged} groups that are ready otherwise"
            )
        elif book.num_ready >= per_step:
            waits = f"step {step} waits for an older group, which would otherwise be trained too late"
        else:
            waits = (
                f"step {step} waits for {book.needed} more trajectories; "
                f"{book.num_ready} of {per_step} groups ready"
            )
            since = self._ledger.since_step
            if since.zero_variance + since.invalid:
                waits += f", {since.zero_variance} dropped without signal, {since.invalid} for failures"
        return "; ".join(one for one in (self._trouble(), waits, heldout) if one)
