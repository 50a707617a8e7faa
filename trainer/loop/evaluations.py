"""The times at which a run evaluates on held-out tasks: before its first step, every `evaluation.every_steps`, and at its end.

An evaluation runs in parallel to training. It begins when the engines serve its version, and they get no newer version until it is
finished. Training continues in the meantime, as far as the lag of versions allows.
"""

import asyncio
from dataclasses import dataclass

from pipeline import retry
from trainer.loop.checkpoints import DueCheckpoints
from trainer.loop.run import Run


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """An evaluation that has begun and is not finished."""

    name: str
    version: int
    step: int


class Evaluations:
    """The evaluations of one run. Each is held once, and only one runs at a time."""

    def __init__(self, run: Run, checkpoints: DueCheckpoints) -> None:
        self._recipe = run.recipe.evaluation
        self._state = run.state
        self._heldout = run.books.heldout
        self._ledger = run.books.ledger
        self._requests = run.requests
        self._weights = run.deliveries
        self._checkpoints = checkpoints
        self._under_way: _Evaluation | None = None
        self._begun = asyncio.Event()  # set while an evaluation is in progress

    async def play_next(self) -> None:
        """Plays the next evaluation that begins."""
        await self._begun.wait()
        assert self._under_way is not None
        await self._play(self._under_way)
        self._weights.unpin()
        self._under_way = None
        self._begun.clear()
        self._state.changed.set()

    @property
    def may_checkpoint(self) -> bool:
        """Whether a resume from a checkpoint of the present step loses no evaluation: one that belongs to this step starts over."""
        return self._under_way is None or self._under_way.step == self._state.step

    def begin_before(self) -> None:
        """Evaluates the starting weights.

        Call this when the first step has its groups, because training need not wait for it until then.
        """
        if self._recipe.before and self._state.step == 0 and self._under_way is None:
            self._begin("heldout_before")

    @property
    def is_due(self) -> bool:
        """Whether the weights of the step just published are to be evaluated."""
        every, step = self._recipe.every_steps, self._state.step
        return bool(every and step and step % every == 0 and self._is_wanted(self._name_between))

    def begin_between(self) -> None:
        """Evaluates the weights of the step just published, if that is due. No evaluation may be running."""
        if self.is_due:
            self._begin(self._name_between)

    def begin_after(self) -> None:
        """Evaluate the last weights."""
        if self._recipe.after:
            self._begin("heldout_after")

    async def finished(self) -> bool:
        """Waits for the current evaluation; returns False if a stop comes before it is finished. A full Redis gets room in the meantime."""
        state = self._state
        while self._under_way is not None and not state.is_stopping:
            state.phase = "evaluating"
            state.changed.clear()
            if not await self._checkpoints.tend():
                await state.changed.wait()
        return self._under_way is None

    async def _play(self, one: _Evaluation) -> None:
        await self._weights.served(one.version)
        self._heldout.start(one.name, version=one.version, step=one.step)
        await retry.until_answered(self._requests.enqueue_evaluation)
        await self._heldout.finished()

    def _begin(self, name: str) -> None:
        if self._is_wanted(name):
            assert self._under_way is None, "one evaluation at a time"
            self._weights.pin()
            self._under_way = _Evaluation(name, self._state.version, self._state.step)
            self._begun.set()

    def _is_wanted(self, name: str) -> bool:
        return self._heldout.is_wanted and name not in self._ledger.evaluations

    @property
    def _name_between(self) -> str:
        return f"heldout_step_{self._state.step}"
