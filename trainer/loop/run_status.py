"""What a run's heartbeat says: the phase, what the next step waits for, and whether admission is open."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from pipeline.census import RunStatus
from trainer.loop.budget import AdmissionBudget
from trainer.loop.state import RunState
from trainer.recipe import Recipe
from trainer.rollouts.groups import GroupBook
from trainer.rollouts.ledger import Ledger

WAITING = "waiting for trajectories"
"""The phase that has a detail."""


class EvaluationProgress(Protocol):
    @property
    def progress(self) -> str:
        """One sentence; empty when no evaluation is under way."""
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
        journal: Path,
    ) -> None:
        self._recipe = recipe
        self._run_id = run_id
        self._state = state
        self._budget = budget
        self._book = book
        self._ledger = ledger
        self._heldout = heldout
        self._quarantined = quarantined
        self._journal = journal

    def status(self) -> RunStatus:
        return RunStatus(
            run_id=self._run_id,
            phase=self._state.phase,
            detail=self._detail(),
            step=self._state.step,
            num_steps=self._recipe.num_steps,
            version=max(0, self._state.version),
            admission=self._budget.sentence(),
            journal=str(self._journal.resolve()),
            quarantined=tuple(self._quarantined),
            updated_at=time.time(),
            groups_without_signal=self._ledger.groups_without_signal,
            max_groups_without_signal=self._recipe.batch.max_groups_without_signal,
        )

    def _detail(self) -> str:
        book, heldout = self._book, self._heldout.progress
        if self._state.phase != WAITING:
            return heldout
        per_step, step = self._recipe.batch.groups_per_step, self._state.step + 1
        if book.num_ready >= per_step:
            waits = f"step {step} waits for an older group, which would otherwise be trained too late"
        else:
            waits = (
                f"step {step} waits for {book.needed} more trajectories; "
                f"{book.num_ready} of {per_step} groups ready"
            )
            since = self._ledger.since_step
            if since.zero_variance + since.invalid:
                waits += f", {since.zero_variance} dropped without signal, {since.invalid} for failures"
        return f"{waits}; {heldout}" if heldout else waits
