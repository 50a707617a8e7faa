"""Asks out: which task comes next, in groups, each request owed in Redis before it is queued.

The order of tasks is a pure function of the seed and the cursor, so a resumed run goes on where the order
stood. Every request opens its own trace, which its rollout and the step that trains it join.
"""

import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from arq.connections import ArqRedis
from msgspec.structs import replace

from pipeline import queue
from pipeline.request import Limits, Purpose, RolloutRequest, Sampling
from pipeline.task import Task
from pipeline.telemetry import current_traceparent, span
from trainer.groups import GroupBook, group_id_of

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def new_ids() -> Iterator[str]:
    """ULIDs (48 bits of milliseconds, 80 random), each above the one before, also within a millisecond."""
    last = 0
    while True:
        last = max(last + 1, (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80))
        yield "".join(_CROCKFORD[last >> shift & 31] for shift in range(125, -1, -5))


class TaskOrder:
    """All tasks once per epoch, shuffled anew each time. Raises ValueError if there are none."""

    def __init__(self, tasks: Sequence[Task], *, seed: int) -> None:
        if not tasks:
            raise ValueError("tasks.train holds no task; give a file with at least one")
        self._tasks = tasks
        self._seed = seed

    def __getitem__(self, cursor: int) -> Task:
        epoch, place = divmod(cursor, len(self._tasks))
        return self._tasks[np.random.default_rng((self._seed, epoch)).permutation(len(self._tasks))[place]]


@dataclass(frozen=True, slots=True)
class RequestForm:
    """What all requests of a run have in common."""

    run_id: str
    limits: Limits
    agent_config: str
    tokenizer: str
    ids: Iterator[str]

    def fill(
        self,
        task: Task,
        *,
        purpose: Purpose,
        group_id: str,
        member: int,
        group_size: int,
        version: int,
        sampling: Sampling,
        cursor: int = 0,
    ) -> RolloutRequest:
        return RolloutRequest(
            id=next(self.ids),
            run_id=self.run_id,
            purpose=purpose,
            task=task,
            group_id=group_id,
            member=member,
            group_size=group_size,
            version_at_enqueue=version,
            sampling=sampling,
            limits=self.limits,
            agent_config=self.agent_config,
            tokenizer=self.tokenizer,
            enqueued_at=time.time(),
            cursor=cursor,
        )


async def enqueue(redis: ArqRedis, request: RolloutRequest) -> None:
    """Owe and queue `request` as the root of its own trace. Doing it again after a broken connection
    changes nothing.
    """
    with span(
        "enqueue",
        run=request.run_id,
        request=request.id,
        task=request.task.id,
        purpose=request.purpose,
        member=request.member,
    ):
        await queue.enqueue(redis, replace(request, traceparent=current_traceparent()))


class Dispatcher:
    """Asks for training groups, in the order of their cursors."""

    def __init__(
        self,
        redis: ArqRedis,
        form: RequestForm,
        order: TaskOrder,
        book: GroupBook,
        *,
        group_size: int,
        sampling: Sampling,
    ) -> None:
        self._redis = redis
        self._form = form
        self._order = order
        self._book = book
        self._group_size = group_size
        self._sampling = sampling
        self._unsent: deque[RolloutRequest] = deque()
        self.cursor = 0  # of the next group
        self.num_enqueued = 0

    async def open_groups(self, num_groups: int, *, version: int) -> None:
        """Ask for the next groups. After an error, the next call goes on with the request that failed."""
        for _ in range(num_groups):
            self._write_out(self.cursor, range(self._group_size), version)
            self.cursor += 1
        while self._unsent:
            await enqueue(self._redis, self._unsent[0])
            self._unsent.popleft()
            self.num_enqueued += 1

    async def complete_group(self, cursor: int, missing: Sequence[int], *, version: int) -> None:
        """Ask for members that a crash kept from being asked for, or that Redis has lost."""
        self._write_out(cursor, missing, version)
        await self.open_groups(0, version=version)

    def _write_out(self, cursor: int, members: Sequence[int], version: int) -> None:
        self._book.expect(cursor, size=self._group_size, version=version)
        self._unsent += [
            self._form.fill(
                self._order[cursor],
                purpose="train",
                group_id=group_id_of(cursor),
                member=member,
                group_size=self._group_size,
                version=version,
                sampling=self._sampling,
                cursor=cursor,
            )
            for member in members
        ]
