"""When a run evaluates on held-out tasks: before its first step, every so many steps, and at its end.

An evaluation plays beside training. It begins when the engines serve its version, and no newer one is brought to them until it is
finished: training goes on meanwhile, as far as the lag of versions allows.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from pipeline import retry
from trainer.loop.open_requests import OpenRequests
from trainer.loop.state import RunState
from trainer.recipe import EvaluationRecipe
from trainer.rollouts.heldout import HeldOut
from trainer.rollouts.ledger import Ledger


class EvaluatedWeights(Protocol):
    """The weights that engines serve."""

    def pin(self) -> None:
        """Bring no newer version to the engines than the present one."""
        ...

    def unpin(self) -> None: ...

    async def served(self, version: int) -> None:
        """Return when the engines serve it."""
        ...


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """An evaluation that has begun and is not finished."""

    name: str
    version: int
    step: int


class Evaluations:
    """Of one run, each held once, one at a time."""

    def __init__(
        self,
        recipe: EvaluationRecipe,
        state: RunState,
        *,
        heldout: HeldOut,
        ledger: Ledger,
        requests: OpenRequests,
        weights: EvaluatedWeights,
        tend_checkpoints: Callable[[], Awaitable[bool]],
    ) -> None:
        """`tend_checkpoints` finishes and writes checkpoints as needed, and returns whether there was anything to do."""
        self._recipe = recipe
        self._state = state
        self._heldout = heldout
        self._ledger = ledger
        self._requests = requests
        self._weights = weights
        self._tend_checkpoints = tend_checkpoints
        self._under_way: _Evaluation | None = None
        self._begun = asyncio.Event()  # set while one is under way

    async def run(self) -> None:
        """Play each evaluation that begins, for ever."""
        while True:
            await self._begun.wait()
            assert self._under_way is not None
            await self._play(self._under_way)
            self._weights.unpin()
            self._under_way = None
            self._begun.clear()
            self._state.changed.set()

    @property
    def may_checkpoint(self) -> bool:
        """Whether a resume from a checkpoint of the present step holds every evaluation: those of this step start over."""
        return self._under_way is None or self._under_way.step == self._state.step

    def begin_before(self) -> None:
        """With the starting weights. Call when the first step has its groups: training need not wait for it until then."""
        if self._recipe.before and self._state.step == 0 and self._under_way is None:
            self._begin("heldout_before")

    @property
    def is_due(self) -> bool:
        """Whether the weights of the step just published are to be evaluated."""
        every, step = self._recipe.every_steps, self._state.step
        return bool(every and step and step % every == 0 and self._is_wanted(self._name_between))

    def begin_between(self) -> None:
        """With the weights of the step just published, if it is one to be evaluated. None may be under way."""
        if self.is_due:
            self._begin(self._name_between)

    def begin_after(self) -> None:
        """With the last weights."""
        if self._recipe.after:
            self._begin("heldout_after")

    async def finished(self) -> bool:
        """Wait for an evaluation under way; False if told to stop before it is finished. A full Redis gets room meanwhile."""
        state = self._state
        while self._under_way is not None and not state.is_stopping:
            state.phase = "evaluating"
            state.changed.clear()
            if not await self._tend_checkpoints():
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
