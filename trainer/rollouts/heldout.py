"""Held-out evaluation: episodes on the same queue as training, counted per weight version, never trained.

One evaluation at a time, under one version: a publication waits until it is finished. Episodes without a reward are
infrastructure failures; they are counted and left out of the mean. An evaluation is settled as a whole, so that a checkpoint
holds all of it or nothing.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from arq.connections import ArqRedis
from msgspec.structs import replace

from pipeline.request import RolloutRequest, Sampling
from pipeline.stream import Delivery
from pipeline.task import Task
from trainer.recipe import EvaluationRecipe
from trainer.records.episodes import OutstandingRequest
from trainer.records.journal import EvaluationRow
from trainer.rollouts.dispatch import RequestForm, enqueue
from trainer.rollouts.ledger import Ledger

GREEDY = "greedy"


@dataclass(frozen=True, slots=True)
class Round:
    """All episodes at one temperature, outside a run."""

    temperature: float  # 0 is greedy
    recipe: EvaluationRecipe

    @property
    def name(self) -> str:
        return f"t{self.temperature:g}"


class HeldOut:
    """The held-out tasks, and the one evaluation that may be under way."""

    def __init__(
        self,
        redis: ArqRedis,
        form: RequestForm,
        tasks: Sequence[Task],
        recipe: EvaluationRecipe,
        *,
        sampling: Sampling,
        seed: int,
        ledger: Ledger,
        report: Callable[[EvaluationRow], None],
    ) -> None:
        """`report` is given each finished row. There are at least as many tasks as the recipe plays."""
        self._redis = redis
        self._form = form
        self._tasks = [tasks[i] for i in np.random.default_rng(seed).permutation(len(tasks))]
        self._recipe = recipe
        self._sampling = sampling
        self._ledger = ledger
        self._report = report
        self._name = ""
        self._step = 0
        self._version = 0
        self._unsent: deque[RolloutRequest] = deque()
        self._awaited: dict[str, OutstandingRequest] = {}
        self._arrived: list[Delivery] = []
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_wanted(self) -> bool:
        return self._recipe.episodes + self._recipe.greedy_episodes > 0

    @property
    def progress(self) -> str:
        """For people; empty when nothing is under way."""
        if self._idle.is_set():
            return ""
        total = len(self._arrived) + len(self._awaited)
        return f"{self._name}: {len(self._arrived)} of {total} held-out episodes"

    @property
    def outstanding(self) -> list[OutstandingRequest]:
        """Outstanding requests of the evaluation under way."""
        return list(self._awaited.values())

    def start(self, name: str, *, version: int, step: int) -> None:
        """Make the requests of an evaluation; `send` enqueues them. The weights must not change until it is finished."""
        assert self._idle.is_set(), "one evaluation at a time"
        self._name, self._version, self._step = name, version, step
        self._unsent = deque(self._requests())
        self._awaited = {request.id: OutstandingRequest.of(request) for request in self._unsent}
        self._arrived = []
        self._idle.clear()

    async def send(self) -> None:
        """Enqueue the episodes. After an error, the next call goes on with the request that failed."""
        while self._unsent:
            await enqueue(self._redis, self._unsent[0])
            self._unsent.popleft()

    def awaits(self, request_id: str) -> bool:
        """Whether the evaluation under way waits for this request's trajectory."""
        return request_id in self._awaited

    def accept(self, delivery: Delivery) -> None:
        """Take a trajectory that it waits for; the last one settles the evaluation."""
        del self._awaited[delivery.head.request_id]
        self._arrived.append(delivery)
        if not self._awaited:
            self._settle()

    async def finished(self) -> None:
        """Return when no evaluation is under way."""
        await self._idle.wait()

    def _requests(self) -> Iterator[RolloutRequest]:
        recipe = self._recipe
        for place in range(recipe.episodes // recipe.samples_per_task):
            for member in range(recipe.samples_per_task):
                yield self._request(
                    place, f"{self._name}:{place}", member, recipe.samples_per_task, self._sampling
                )
        for place in range(recipe.greedy_episodes):
            yield self._request(
                place, f"{self._name}:{GREEDY}:{place}", 0, 1, replace(self._sampling, temperature=0.0)
            )

    def _request(
        self, place: int, group_id: str, member: int, group_size: int, sampling: Sampling
    ) -> RolloutRequest:
        return self._form.fill(
            self._tasks[place],
            purpose="eval",
            group_id=group_id,
            member=member,
            group_size=group_size,
            version=self._version,
            sampling=sampling,
        )

    def _settle(self) -> None:
        for delivery in self._arrived:
            fate = "failed" if delivery.head.reward is None else "evaluated"
            self._ledger.settle(delivery.head, [delivery.entry_id], fate, evaluation=self._name)
        for greedy in (False, True):
            rewards = [d.head.reward for d in self._arrived if (f":{GREEDY}:" in d.head.group_id) == greedy]
            if rewards:
                self._report(self._row(rewards, greedy=greedy))
        self._ledger.evaluations.append(self._name)
        self._idle.set()

    def _row(self, rewards: Sequence[float | None], *, greedy: bool) -> EvaluationRow:
        graded = [reward for reward in rewards if reward is not None]
        mean = fmean(graded) if graded else 0.0
        return EvaluationRow(
            name=self._name,
            version=self._version,
            greedy=greedy,
            success=mean,
            standard_error=standard_error(mean, len(graded)),
            num_episodes=len(graded),
            num_failed=len(rewards) - len(graded),
            step=self._step,
            at=time.time(),
        )


def evaluation_of(group_id: str) -> str:
    """The name of the evaluation that a group belongs to."""
    return group_id.partition(":")[0]


def standard_error(mean: float, num_episodes: int) -> float:
    """Of a share in [0, 1] over independent episodes: sqrt(p (1 - p) / n); 0 of no episodes."""
    return math.sqrt(mean * (1 - mean) / num_episodes) if num_episodes else 0.0
