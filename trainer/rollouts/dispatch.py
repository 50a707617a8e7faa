"""Requests out: which task comes next, in groups.

The order of tasks is a pure function of the seed and the cursor, so a resumed run continues where it was. Places whose task is in
quarantine are skipped, and no other task moves. A member that failed is enqueued again by itself, as a new request of its
group. Every request opens a trace of its own, which its rollout and the step that trains it join.
"""

import secrets
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from arq.connections import ArqRedis
from msgspec.structs import replace

from pipeline import queue, trace_ids
from pipeline.kinds import ROLLOUT
from pipeline.request import Context, Limits, Purpose, RolloutRequest, Sampling
from pipeline.task import Task
from pipeline.telemetry import span
from trainer.records.episodes import OutstandingRequest
from trainer.rollouts.groups import GroupBook, group_id_of
from trainer.rollouts.ledger import Ledger
from trainer.rollouts.quarantine import Quarantine

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

    def __len__(self) -> int:
        return len(self._tasks)

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
    control_share: float = 1.0  # of the passes, drawn by chance, that are followed by a control run
    context: Context = field(default_factory=Context)
    report_routing: bool = False  # of experts, by requests that are trained on

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
        group_asked_at: float = 0.0,
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
            group_asked_at=group_asked_at,
            cursor=cursor,
            control_share=self.control_share,
            context=self.context,
            report_routing=self.report_routing and purpose == "train",
        )


async def enqueue(redis: ArqRedis, request: RolloutRequest) -> None:
    """Enqueue `request` with a trace of its own. Repeating the call after a broken connection changes nothing."""
    root = trace_ids.rollout(request.id)
    with span("enqueue", traceparent=trace_ids.queue_wait(root, ROLLOUT.name), request=request.id):
        await queue.enqueue(redis, replace(request, traceparent=root))


class Dispatcher:
    """Enqueues training groups, in the order of their cursors."""

    def __init__(
        self,
        redis: ArqRedis,
        form: RequestForm,
        order: TaskOrder,
        book: GroupBook,
        *,
        ledger: Ledger,
        quarantine: Quarantine,
        group_size: int,
        sampling: Sampling,
    ) -> None:
        self._redis = redis
        self._form = form
        self._order = order
        self._book = book
        self._ledger = ledger
        self._quarantine = quarantine
        self._group_size = group_size
        self._sampling = sampling
        self._unsent: deque[RolloutRequest] = deque()
        self._refills: dict[tuple[int, int], None] = {}  # (cursor, member), in order
        self.cursor = 0  # of the next group
        self.num_enqueued = 0

    async def open_groups(self, num_groups: int, *, version: int) -> None:
        """Enqueue what is to be refilled, then the next groups. After an error, the next call goes on with the request that
        failed.
        """
        for cursor, member in self._refills:
            if not self._ledger.is_closed(cursor):
                self._write_out(cursor, [member], version)
        self._refills.clear()
        while num_groups > 0 and not self.is_exhausted:
            num_groups -= self._write_out(self.cursor, range(self._group_size), version)
            self.cursor += 1
        while self._unsent:
            await enqueue(self._redis, self._unsent[0])
            self._unsent.popleft()
            self.num_enqueued += 1

    @property
    def is_exhausted(self) -> bool:
        """Every task is in quarantine."""
        return len(self._quarantine) >= len(self._order)

    def has_yet_to_send(self, request_id: str) -> bool:
        """Whether it is made and not enqueued yet, for Redis did not answer."""
        return any(request.id == request_id for request in self._unsent)

    def refill(self, cursor: int, member: int) -> None:
        """Have a member of an open group enqueued again by the next call of `open_groups`. Repeating it changes nothing."""
        self._refills[cursor, member] = None

    def give_up(self, request_ids: Collection[str]) -> None:
        """Do not enqueue these any more, if that has not happened yet."""
        self._unsent = deque(request for request in self._unsent if request.id not in request_ids)

    def _write_out(self, cursor: int, members: Sequence[int], version: int) -> bool:
        """Make the requests of these members. False if the task is in quarantine: then its place is skipped."""
        task = self._order[cursor]
        if task.id in self._quarantine:
            self._ledger.skip(cursor, task.id)
            return False
        group = self._book.expect(cursor, size=self._group_size, version=version, task_id=task.id)
        group.enqueued_at = group.enqueued_at or time.time()
        made = [
            self._form.fill(
                task,
                purpose="train",
                group_id=group_id_of(cursor),
                member=member,
                group_size=self._group_size,
                version=version,
                sampling=self._sampling,
                cursor=cursor,
                group_asked_at=group.enqueued_at,
            )
            for member in members
        ]
        for request in made:
            self._book.expect_request(OutstandingRequest.of(request))
        self._unsent += made
        return True
