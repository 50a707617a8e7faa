"""Dispatches requests, in groups, and decides which tasks are left out for the rest of the run.

`curriculum.py` chooses the source, the task and the size of each group. In the plain order, positions whose task is in quarantine are
skipped, and no other task moves. A group keeps its task and its size, which are in each of its requests and, while it is open, in the
checkpoint. A member that failed is enqueued again by itself, as a new request of its group. Every request opens a trace of its own, which
its rollout and the step that trains it join.

Training tasks whose grader cannot be trusted are in quarantine. There are two reasons: the same patch, byte for byte, was judged
differently; or MAX_GRADER_FAILURES requests in a row returned without a verdict because the grader broke, while it went on judging
other tasks. The evidence is in the journal's episode rows, so a resumed run restores it from the journal of its checkpoint.

The first reason does not apply to a calibrated task: its tests were steady with the known fix in some ten runs, so a patch that is
judged differently is itself unsteady. A policy could otherwise get rid of a task by patches that act at random.
"""

import secrets
import time
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from arq.connections import ArqRedis
from msgspec.structs import asdict, replace

from pipeline import queue, telemetry
from pipeline.deadletters import DeadLetter
from pipeline.harness import Harness
from pipeline.journal.reading import read
from pipeline.journal.rows import EpisodeRow, QuarantineRow
from pipeline.kinds import ROLLOUT
from pipeline.request import Context, Limits, Purpose, RolloutRequest, Sampling
from pipeline.task import Task
from pipeline.telemetry import span
from pipeline.trajectory import TrajectoryHead
from trainer.recipe import Recipe
from trainer.records.journal_writer import Journal, OutstandingRequest
from trainer.rollouts.curriculum import Curriculum, SourceOrder
from trainer.rollouts.groups import GroupBook, OpenGroup, group_id_of
from trainer.rollouts.ledger import Ledger

MAX_GRADER_FAILURES = 3
GRADER_FAILED = "failed:grader"


class Quarantine:
    """The tasks of one run that are no longer played, and the evidence about the others."""

    def __init__(self, journal: Journal, calibrated: Container[str] = ()) -> None:
        """Starts from the contents of `journal`, which must have been cut back to its checkpoint. `calibrated` are ids of tasks."""
        self._journal = journal
        self._calibrated = calibrated
        # Calibrated tasks one of whose patches got different verdicts, and a description of these.
        self.unsteady: dict[str, str] = {}
        # Reward and request id, by task and patch
        self._verdicts: dict[str, dict[str, tuple[float, str]]] = {}
        # Number of verdicts seen before the failure, by task and request id
        self._failures: dict[str, dict[str, int]] = {}
        self._num_verdicts = 0
        self._reasons = {row.task_id: row.reason for row in read(journal.directory, QuarantineRow)}
        for row in read(journal.directory, EpisodeRow):
            if row.purpose == "train":
                self._notice(row)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._reasons

    def __len__(self) -> int:
        return len(self._reasons)

    def __iter__(self) -> Iterator[str]:
        return iter(self._reasons)

    def reason(self, task_id: str) -> str:
        return self._reasons[task_id]

    def notice(self, head: TrajectoryHead) -> str:
        """The reason why the task of this trajectory belongs in quarantine from now on; "" if it does not, or is in quarantine already."""
        fault = self._notice(head)
        return "" if head.task_id in self else fault

    def observe(self, head: TrajectoryHead, letter: DeadLetter | None) -> None:
        """Takes a trajectory into account, and quarantines its task if its grader cannot be trusted.

        `letter` is the dead letter of a failed trajectory.
        """
        reason = self.notice(head)
        if not reason:
            return
        if head.outcome == GRADER_FAILED and letter is not None and letter.failures:
            reason += f", the last time with: {letter.failures[-1].message}"
        self.put(head.task_id, reason, request_id=head.request_id)

    def put(self, task_id: str, reason: str, *, request_id: str) -> None:
        """Puts the task into quarantine; `request_id` is that of the deciding trajectory."""
        self._reasons[task_id] = reason
        self._journal.append(QuarantineRow(task_id=task_id, reason=reason, request_id=request_id))

    def _notice(self, answer: TrajectoryHead | EpisodeRow) -> str:
        if answer.reward is not None:
            return self._contradiction(answer, answer.reward)
        if answer.outcome == GRADER_FAILED:
            return self._failure(answer)
        return ""

    def _contradiction(self, answer: TrajectoryHead | EpisodeRow, reward: float) -> str:
        self._num_verdicts += 1
        self._failures.pop(answer.task_id, None)
        if not answer.patch:
            return ""
        verdicts = self._verdicts.setdefault(answer.task_id, {})
        before, request_id = verdicts.setdefault(answer.patch, (reward, answer.request_id))
        if before == reward:
            return ""
        found = f"the same patch was worth {before:g} in {request_id} and {reward:g} in {answer.request_id}"
        if answer.task_id not in self._calibrated:
            return f"flaky: {found}"
        self.unsteady.setdefault(answer.task_id, found)
        return ""

    def _failure(self, answer: TrajectoryHead | EpisodeRow) -> str:
        failures = self._failures.setdefault(answer.task_id, {})
        failures.setdefault(answer.request_id, self._num_verdicts)
        judges_others = self._num_verdicts > next(iter(failures.values()))
        if len(failures) < MAX_GRADER_FAILURES or not judges_others:
            return ""
        return f"the grader broke on it {len(failures)} times in a row, though not on others"


_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def new_ids() -> Iterator[str]:
    """ULIDs (48 bits of milliseconds, 80 random), each above the one before, also within a millisecond."""
    last = 0
    while True:
        last = max(last + 1, (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80))
        yield "".join(_CROCKFORD[last >> shift & 31] for shift in range(125, -1, -5))


@dataclass(frozen=True, slots=True)
class RequestForm:
    """The part that all requests about the tasks of one source, or about held-out tasks, have in common."""

    run_id: str
    limits: Limits
    agent_config: str
    tokenizer: str
    ids: Iterator[str]
    control_share: float = 1.0  # share of gradings, drawn by chance, that have control runs
    num_controls: int = 1  # number of control runs of each such grading
    context: Context = field(default_factory=Context)
    report_routing: bool = False  # whether requests that are trained on report the experts of each token
    harness: Harness | None = None  # the agent program that plays; None: the built-in loop
    asides_are_trained: bool = False
    names_adapter: bool = False  # whether weight versions are adapters, which each turn names

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
            num_controls=self.num_controls,
            context=self.context,
            report_routing=self.report_routing and purpose == "train",
            harness=self.harness,
            asides_are_trained=self.asides_are_trained,
            names_adapter=self.names_adapter,
        )

    def again(self, request: RolloutRequest) -> RolloutRequest:
        """The same request as a new one, enqueued now."""
        return replace(request, id=next(self.ids), enqueued_at=time.time())


def sampling_of(recipe: Recipe) -> Sampling:
    return Sampling(**asdict(recipe.rollout.sampling))


async def enqueue(redis: ArqRedis, request: RolloutRequest) -> None:
    """Enqueue `request` with a trace of its own. Repeating the call after a broken connection changes nothing."""
    root = telemetry.rollout(request.id)
    with span("enqueue", traceparent=telemetry.queue_wait(root, ROLLOUT.name), request=request.id):
        await queue.enqueue(redis, replace(request, traceparent=root))


@dataclass(frozen=True, slots=True)
class GroupSource:
    """A source of groups: its tasks, what chooses among them, and what its requests have in common."""

    name: str
    recipe: Recipe  # the recipe as it is for its groups
    form: RequestForm
    tasks: Mapping[str, Task]
    curriculum: Curriculum


class GroupSources:
    """The sources of a run's groups, in the order in which they take turns."""

    def __init__(self, sources: Iterable[GroupSource], order: SourceOrder) -> None:
        self._sources = {source.name: source for source in sources}
        self._order = order

    def __iter__(self) -> Iterator[GroupSource]:
        return iter(self._sources.values())

    def at(self, cursor: int) -> GroupSource:
        """The source of the group at `cursor`."""
        return self._sources[self._order[cursor][0]]

    def name_at(self, cursor: int) -> str:
        """The name of that source; empty where tasks.train is given, and for what is no training group."""
        return self.at(cursor).name if cursor >= 0 else ""

    def task_at(self, cursor: int, *, live: Collection[str], quarantined: Collection[str]) -> Task:
        """The task of a new group at `cursor`, as `Curriculum.choose` chooses it among those of the source."""
        source, (_, number) = self.at(cursor), self._order[cursor]
        return source.tasks[source.curriculum.choose(number, live=live, quarantined=quarantined)]

    def observe(self, row: EpisodeRow) -> None:
        """Takes a settled episode into account."""
        for source in self:
            source.curriculum.observe(row)


class Dispatcher:
    """Enqueues training groups, in the order of their cursors."""

    def __init__(
        self,
        redis: ArqRedis,
        sources: GroupSources,
        book: GroupBook,
        *,
        ledger: Ledger,
        quarantine: Quarantine,
        open_groups: Mapping[int, OpenGroup] | None = None,
    ) -> None:
        """`open_groups` are those of the checkpoint, by cursor."""
        self._redis = redis
        self._sources = sources
        self._num_tasks = sum(len(source.tasks) for source in sources)
        self._book = book
        self._ledger = ledger
        self._quarantine = quarantine
        self._unsent: deque[RolloutRequest] = deque()
        self._restored = open_groups or {}
        # Keys are (cursor, member), in the order in which `refill` was called.
        self._refills: dict[tuple[int, int | None], None] = {}
        self.cursor = 0  # task-order position of the next group
        self.num_enqueued = 0

    async def open_groups(self, num_groups: int, *, version: int) -> None:
        """Enqueues the replacements that are due, then the next groups.

        After an error, the next call continues with the request that failed.
        """
        for cursor, member in self._refills:
            if not self._ledger.is_closed(cursor):
                self._write_out(cursor, version, member)
        self._refills.clear()
        while num_groups > 0 and not self.is_exhausted:
            num_groups -= self._write_out(self.cursor, version)
            self.cursor += 1
        while self._unsent:
            await enqueue(self._redis, self._unsent[0])
            self._unsent.popleft()
            self.num_enqueued += 1

    @property
    def is_exhausted(self) -> bool:
        """Whether every task is in quarantine."""
        return len(self._quarantine) >= self._num_tasks

    def has_yet_to_send(self, request_id: str) -> bool:
        """Whether the request was made but not enqueued yet, because Redis did not answer."""
        return any(request.id == request_id for request in self._unsent)

    def refill(self, cursor: int, member: int | None) -> None:
        """Makes the next call of `open_groups` enqueue a member of an open group again; None: every member of a group that the book does
        not know. Repeating it changes nothing.
        """
        self._refills[cursor, member] = None

    def give_up(self, request_ids: Collection[str]) -> None:
        """Drops these requests if they have not been enqueued yet."""
        self._unsent = deque(request for request in self._unsent if request.id not in request_ids)

    def _write_out(self, cursor: int, version: int, member: int | None = None) -> bool:
        """Makes the request of this member, or those of all members. Returns False if the task is in quarantine: its position is then
        skipped.
        """
        source = self._sources.at(cursor)
        # A group that lacks members, or was open in the checkpoint, keeps its task and its size.
        restored = self._restored.get(cursor)
        task = source.tasks.get(self._book.task_at(cursor) or (restored.task_id if restored else ""))
        if task is None:
            live = self._book.live_tasks(self._ledger.is_closed)
            task = self._sources.task_at(cursor, live=live, quarantined=self._quarantine)
        if task.id in self._quarantine:
            self._ledger.skip(cursor, task.id)
            return False
        size = restored.size if restored else source.curriculum.size(task.id)
        group = self._book.expect(cursor, size=size, version=version, task_id=task.id)
        group.enqueued_at = group.enqueued_at or time.time()
        made = [
            source.form.fill(
                task,
                purpose="train",
                group_id=group_id_of(cursor),
                member=member,
                group_size=group.size,
                version=version,
                sampling=sampling_of(source.recipe),
                cursor=cursor,
                group_asked_at=group.enqueued_at,
            )
            for member in (range(group.size) if member is None else (member,))
        ]
        for request in made:
            self._book.expect_request(OutstandingRequest.of(request))
        self._unsent += made
        return True
