"""Held-out evaluation: episodes on the same queue as training, counted per weight version, never trained.

There is one evaluation at a time, of one version: a publication waits until it is finished. Episodes without a reward are infrastructure
failures; they are counted and left out of the mean. An evaluation is settled as a whole, so that a checkpoint contains all of it or
nothing.
"""

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from arq.connections import ArqRedis
from msgspec.structs import replace

from pipeline.intervals import Estimate, mean, pass_at
from pipeline.journal.rows import EpisodeStamps, EvaluationRow
from pipeline.request import RolloutRequest, Sampling
from pipeline.stream import Delivery
from pipeline.task import Task
from pipeline.trajectory import TrajectoryHead
from trainer.recipe import EvaluationRecipe
from trainer.records.journal_writer import OutstandingRequest
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
    """The held-out tasks, and the current evaluation, if any."""

    def __init__(
        self,
        redis: ArqRedis,
        form: RequestForm,
        tasks: Sequence[Task],
        sets: Mapping[str, Sequence[Task]],
        recipe: EvaluationRecipe,
        *,
        sampling: Sampling,
        seed: int,
        ledger: Ledger,
        report: Callable[[EvaluationRow], object],
    ) -> None:
        """`report` gets each finished row. There must be at least as many tasks as the recipe plays. The further `sets` by name may be
        smaller; a smaller one is played as a whole.
        """
        self._redis = redis
        self._form = form
        self._sets = {
            name: [each[i] for i in np.random.default_rng(seed).permutation(len(each))]
            for name, each in {"": tasks, **sets}.items()
        }
        self._recipe = recipe
        self._sampling = sampling
        self._ledger = ledger
        self._report = report
        self._name = ""
        self._step = 0
        self._version = 0
        self._unsent: deque[RolloutRequest] = deque()
        self._awaited: dict[str, RolloutRequest] = {}
        self._parts: dict[str, _EvaluationPart] = {}  # parts of the current evaluation, by request id
        self._arrived: list[tuple[Delivery, EpisodeStamps]] = []
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_wanted(self) -> bool:
        return self._recipe.episodes + self._recipe.greedy_episodes > 0

    @property
    def progress(self) -> str:
        """The progress as text; empty if no evaluation is running."""
        if self._idle.is_set():
            return ""
        total = len(self._arrived) + len(self._awaited)
        return f"{self._name}: {len(self._arrived)} of {total} held-out episodes"

    @property
    def outstanding(self) -> list[OutstandingRequest]:
        """Outstanding requests of the current evaluation."""
        return [OutstandingRequest.of(request) for request in self._awaited.values()]

    def start(self, name: str, *, version: int, step: int) -> None:
        """Make the requests of an evaluation; `send` enqueues them. The weights must not change until it is finished."""
        assert self._idle.is_set(), "one evaluation at a time"
        self._name, self._version, self._step = name, version, step
        self._unsent, self._parts = deque(), {}
        for part, request in self._requests():
            self._unsent.append(request)
            self._parts[request.id] = part
        self._awaited = {request.id: request for request in self._unsent}
        self._arrived = []
        self._idle.clear()

    async def send(self) -> None:
        """Enqueues the episodes. After an error, the next call continues with the request that failed."""
        while self._unsent:
            await enqueue(self._redis, self._unsent[0])
            self._unsent.popleft()

    def replace(self, known: Collection[str]) -> int:
        """Makes `send` enqueue requests again that were sent and are not in `known`, the requests that Redis knows. Returns their number.
        Each gets a new id, because a worker may still play the old one.
        """
        kept = {*known, *(request.id for request in self._unsent)}
        forgotten = [request for request in self._awaited.values() if request.id not in kept]
        for request in forgotten:
            self._ledger.withdraw(OutstandingRequest.of(request), evaluation=self._name)
            again = self._form.again(request)
            del self._awaited[request.id]
            self._awaited[again.id] = again
            self._parts[again.id] = self._parts.pop(request.id)
            self._unsent.append(again)
        return len(forgotten)

    def awaits(self, request_id: str) -> bool:
        """Whether the current evaluation waits for this request's trajectory."""
        return request_id in self._awaited

    def accept(self, delivery: Delivery) -> None:
        """Accepts a trajectory for which the evaluation waits; the last one settles the evaluation."""
        del self._awaited[delivery.head.request_id]
        stamps = EpisodeStamps(
            published_at=delivery.published_at, read_at=delivery.read_at, joined_at=time.time()
        )
        self._arrived.append((delivery, stamps))
        if not self._awaited:
            self._settle()

    async def finished(self) -> None:
        """Returns when no evaluation is running."""
        await self._idle.wait()

    def _requests(self) -> Iterator[tuple["_EvaluationPart", RolloutRequest]]:
        """All episodes, each with the part of the evaluation that it belongs to."""
        recipe = self._recipe
        greedily = replace(self._sampling, temperature=0.0)
        for tasks, each in self._sets.items():
            name = f"{self._name}:{tasks}" if tasks else self._name
            for place in range(min(recipe.episodes // recipe.samples_per_task, len(each))):
                for member in range(recipe.samples_per_task):
                    group, size = f"{name}:{place}", recipe.samples_per_task
                    yield (
                        _EvaluationPart(tasks, greedy=False),
                        self._request(each[place], group, member, size, self._sampling),
                    )
            for place in range(min(recipe.greedy_episodes, len(each))):
                group = f"{name}:{GREEDY}:{place}"
                yield _EvaluationPart(tasks, greedy=True), self._request(each[place], group, 0, 1, greedily)

    def _request(
        self, task: Task, group_id: str, member: int, group_size: int, sampling: Sampling
    ) -> RolloutRequest:
        return self._form.fill(
            task,
            purpose="eval",
            group_id=group_id,
            member=member,
            group_size=group_size,
            version=self._version,
            sampling=sampling,
        )

    def _settle(self) -> None:
        for delivery, stamps in self._arrived:
            fate = "failed" if delivery.head.reward is None else "evaluated"
            self._ledger.settle(
                delivery.head, [delivery.entry_id], fate, evaluation=self._name, stamps=stamps
            )
        for part in dict.fromkeys(self._parts.values()):
            heads = [one.head for one, _ in self._arrived if self._parts[one.head.request_id] == part]
            self._report(self._row(part, heads))
        self._ledger.evaluations.append(self._name)
        self._idle.set()

    def _row(self, part: "_EvaluationPart", heads: Sequence[TrajectoryHead]) -> EvaluationRow:
        graded = [head for head in heads if head.reward is not None]
        rewards = _rewards(graded)
        found = mean(list(rewards.values())) or Estimate(0.0, 0.0, 1.0, 0)
        return EvaluationRow(
            name=self._name,
            tasks=part.tasks,
            version=self._version,
            greedy=part.greedy,
            success=found.value,
            success_low=found.low,
            success_high=found.high,
            rewards=rewards,
            num_episodes=len(graded),
            num_failed=len(heads) - len(graded),
            step=self._step,
            at=time.time(),
            mean_turns=_mean([head.num_turns for head in graded]),
            mean_sampled_tokens=_mean([head.sampled_tokens for head in graded]),
            outcomes=dict(Counter(head.outcome for head in heads).most_common()),
            pass_at=_pass_at(graded, 1 if part.greedy else self._recipe.samples_per_task),
        )


@dataclass(frozen=True, slots=True)
class _EvaluationPart:
    """The episodes of an evaluation that make up one row: a held-out set, sampled or greedy."""

    tasks: str
    greedy: bool


def _rewards(graded: Iterable[TrajectoryHead]) -> dict[str, tuple[float, ...]]:
    by_task = defaultdict[str, list[float]](list)
    for head in sorted(graded, key=lambda head: (head.task_id, head.member)):
        by_task[head.task_id].append(head.reward or 0.0)
    return {task: tuple(rewards) for task, rewards in by_task.items()}


def _pass_at(graded: Sequence[TrajectoryHead], samples: int) -> dict[str, float]:
    runs = defaultdict[str, list[bool]](list)
    for head in graded:
        runs[head.task_id].append(head.reward == 1)
    estimates = {str(k): pass_at(runs, k) for k in range(1, samples + 1)}
    return {k: one.value for k, one in estimates.items() if one is not None}


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def evaluation_of(group_id: str) -> str:
    """The name of the evaluation that a group belongs to."""
    return group_id.partition(":")[0]
