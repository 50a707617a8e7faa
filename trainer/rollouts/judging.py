"""Judging on the trainer's side: requests out, groups that wait for judgements, and whether any judge works.

Trajectories and judgements travel alike: `judge_requests.py` enqueues and withdraws, `judgements.py` takes in what arrives,
`judge_waits.py` says how long a group waits. None of it touches a reward.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from arq.connections import ArqRedis

from pipeline.judge import Judge
from trainer.recipe import JudgeRecipe
from trainer.rollouts.groups import GroupBook
from trainer.rollouts.judge_requests import JudgeRequests
from trainer.rollouts.judge_waits import JudgementWaits, JudgePresence
from trainer.rollouts.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Judging:
    """Of one run. Every coroutine may be called again after Redis was away."""

    requests: JudgeRequests
    waits: JudgementWaits
    presence: JudgePresence

    @classmethod
    def of_run(
        cls,
        redis: ArqRedis,
        run_id: str,
        recipe: JudgeRecipe,
        judge: Judge | None,
        *,
        book: GroupBook,
        ledger: Ledger,
        say: Callable[[str], None],
    ) -> Self:
        """`judge` is what requests carry; None if the recipe has none."""
        presence = JudgePresence(redis, recipe, say=say)
        return cls(
            requests=JudgeRequests(redis, run_id, judge, book=book, ledger=ledger),
            waits=JudgementWaits(book, presence, recipe, say=say),
            presence=presence,
        )

    async def tend(self) -> None:
        """Enqueue and withdraw requests, and release groups that need not wait any longer."""
        self.waits.release(time.monotonic())
        await self.requests.withdraw_unneeded()
        await self.requests.send()
