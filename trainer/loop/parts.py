"""What a run is made of on rank 0, and the thread its learner lives on."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from arq.connections import ArqRedis

from trainer.loop.checkpoints import Checkpoints
from trainer.records.console import Console
from trainer.records.journal import Journal
from trainer.records.sinks import Records
from trainer.rollouts.admission import Admission
from trainer.rollouts.dispatch import Dispatcher
from trainer.rollouts.groups import GroupBook
from trainer.rollouts.heldout import HeldOut
from trainer.rollouts.intake import Intake
from trainer.rollouts.ledger import Ledger
from trainer.rollouts.quarantine import Quarantine
from trainer.weights.publish import Publisher

if TYPE_CHECKING:
    from trainer.feed import Feed

T = TypeVar("T")


class LearnerThread:
    """The learner on a thread of its own: `await learner(function, ...)` runs there, one call at a time."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")

    async def __call__(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def blocking(self, function: Callable[..., T], *arguments: object) -> T:
        """The same for callers on yet another thread."""
        return self._pool.submit(function, *arguments).result()


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of; `assembly.py` puts it together."""

    redis: ArqRedis
    feed: "Feed"
    learner: LearnerThread
    admission: Admission
    book: GroupBook
    ledger: Ledger
    quarantine: Quarantine
    journal: Journal
    intake: Intake
    dispatcher: Dispatcher
    heldout: HeldOut
    publisher: Publisher
    checkpoints: Checkpoints
    records: Records
    progress: Console
