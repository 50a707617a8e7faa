"""Reads the streams of a run so that each entry is accepted once, and decides the fate of each trajectory that arrives.

Intake has three stages: look up what Redis knows about a trajectory, decide, apply the decision. There are five decisions. A trajectory
belongs to the current evaluation; or it joins its group; or it failed through no fault of policy or task, and its member is enqueued again;
or it repeats one that its group holds; or it is no longer needed, and is dropped. In every case, its stream entry is settled in the ledger.

A connection that breaks during a read leaves entries that Redis counts as delivered and that nobody has seen. After any error,
and after a restart, a reader therefore starts with entries that were delivered and not acknowledged. Trajectories are read before
judgements, so that a judgement finds its member. Both are acknowledged with the checkpoint that contains their fates.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, assert_never

from arq.connections import ArqRedis
from msgspec import structs

from pipeline import deadletters, keys, stream
from pipeline.errors import FailureClass
from pipeline.journal.rows import EpisodeStamps, Fate
from pipeline.kinds import JUDGE, ROLLOUT, H, JobKind
from pipeline.message import MalformedMessage
from pipeline.stream import Delivery
from pipeline.trajectory import TrajectoryHead
from trainer.batching.batch import Sample
from trainer.batching.samples import AlteredReply, samples_of
from trainer.learner.families.registry import read_architecture
from trainer.recipe import Recipe
from trainer.records.alarms import FORMAT_ERRORS
from trainer.rollouts.books import Books
from trainer.rollouts.groups import Member, cursor_of
from trainer.rollouts.heldout import evaluation_of
from trainer.rollouts.judging import JudgementIntake
from trainer.rollouts.ledger import LedgerState
from trainer.rollouts.recording import RolloutRecorder

log = logging.getLogger("swerve.trainer")

REFILLED: tuple[FailureClass, ...] = ("infrastructure", "grader")
"""Failures that say nothing about the policy or the task: the member is enqueued once more."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Redis's data about a trajectory besides its head, as far as the decision needs it."""

    samples: tuple[Sample, ...] = ()
    fault: str = ""  # the reason why its tokens must not reach the learner
    is_altered: bool = False  # whether the fault is that the tokens are not those that the engine sampled
    letter: deadletters.DeadLetter | None = None  # the dead letter of a failed request
    is_copy: bool = False  # a second copy of a publication, under another entry


@dataclass(frozen=True, slots=True)
class Evaluate:
    """The trajectory belongs to the current evaluation."""


@dataclass(frozen=True, slots=True)
class Join:
    """The trajectory joins its group as this member."""

    cursor: int
    member: Member


@dataclass(frozen=True, slots=True)
class Refill:
    """The trajectory failed through no fault of policy or task: its member is enqueued again."""

    cursor: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """The trajectory is a second copy of one that its group holds: its entry is acknowledged with the first."""

    of: Member


@dataclass(frozen=True, slots=True)
class Drop:
    """The trajectory is not needed.

    It is settled with `fate`; without one it is only acknowledged, because it is a copy of a settled one.
    """

    why: str
    fate: Fate | None
    cursor: int = -1
    evaluation: str = ""


Decision = Evaluate | Join | Refill | Repeat | Drop


class Intake:
    """The intake of one run."""

    def __init__(self, books: Books) -> None:
        self._redis = books.redis
        self._book = books.groups
        self._ledger = books.ledger
        self._quarantine = books.quarantine
        self._closer = books.closer
        self._heldout = books.heldout
        self._refill = books.dispatcher.refill
        self._judge = books.judging.requests.want
        self._sources = books.sources
        self._samples_of = partial(
            samples_of,
            vocab_size=books.inputs.tokenizer.vocab_size,
            max_tokens=books.recipe.learner.micro_batch_tokens,
            routing_width=_routing_width(books.recipe),
        )
        self.num_arrived = 0
        self.num_refused = 0
        self.last_failed = ""  # request id
        # Request id, and the first reply without a command, of the first episode that format errors ended.
        self.first_unusable: tuple[str, str] | None = None

    async def accept(self, delivery: Delivery) -> None:
        """Decides the fate of a trajectory, and applies the decision.

        The call may be repeated if Redis became unavailable during the look-up.
        """
        findings = await self._look_up(delivery)
        self._apply(delivery, self._decide(delivery.head, findings))

    async def _look_up(self, delivery: Delivery) -> Findings:
        head = delivery.head
        cursor = _cursor(head)
        if not self._is_wanted(cursor, head):
            published: bytes | None = await self._redis.get(keys.published(head.request_id))
            return Findings(is_copy=published is not None and published.decode() != delivery.entry_id)
        if head.purpose == "eval" or self._is_held(cursor, head):
            return Findings()
        if head.reward is None:
            return Findings(letter=await deadletters.find(self._redis, head.run_id, head.request_id))
        return await self._load(head)

    async def _load(self, head: TrajectoryHead) -> Findings:
        """The samples of a graded trajectory, or the reason why it has none."""
        try:
            trajectory = await stream.read_body(self._redis, head.request_id)
            if trajectory is None:
                raise ValueError("its body is not in Redis")
            if head.outcome == FORMAT_ERRORS and self.first_unusable is None:
                replies = (turn.text for turn in trajectory.turns if not turn.actions)
                self.first_unusable = head.request_id, next(replies, "")
            samples = await asyncio.to_thread(self._samples_of, trajectory)
        except (MalformedMessage, ValueError) as error:
            self.num_refused += 1
            log.error("%s rejected: invalid samples: %s", head.request_id, error)
            return Findings(fault=str(error), is_altered=isinstance(error, AlteredReply))
        return Findings(samples)

    def _decide(self, head: TrajectoryHead, findings: Findings) -> Decision:
        """Decides from the present state of the books: during the look-up, a step may have taken the group."""
        cursor = _cursor(head)
        if not self._is_wanted(cursor, head):
            return self._drop(cursor, head, findings)
        if head.purpose == "eval":
            return Evaluate()
        assert cursor is not None, "a head without a group is not wanted"
        held = self._book.find(cursor, head.member)
        if held is not None and self._is_held(cursor, head):
            return Repeat(held)
        self._quarantine.observe(head, findings.letter)
        if self._may_refill(cursor, head, findings):
            return Refill(cursor)
        member = Member(
            head, findings.samples, entries=[], fault=findings.fault, is_altered=findings.is_altered
        )
        return Join(cursor, member)

    def _drop(self, cursor: int | None, head: TrajectoryHead, findings: Findings) -> Drop:
        if findings.is_copy:
            return Drop("is a second copy", fate=None)
        fate: Fate = "failed" if head.reward is None else "late"
        if head.purpose == "eval":
            return Drop("arrived after its evaluation", fate, evaluation=evaluation_of(head.group_id))
        if cursor is None:
            return Drop(f"belongs to {head.group_id!r}, which is not a group of a training run", "refused")
        return Drop("arrived when its group no longer waited for it", fate, cursor)

    def _apply(self, delivery: Delivery, decision: Decision) -> None:
        """Applies the decision. No other function changes the books for a trajectory."""
        head, entries = delivery.head, [delivery.entry_id]
        stamps = EpisodeStamps(published_at=delivery.published_at, read_at=delivery.read_at)
        match decision:
            case Evaluate():
                self._heldout.accept(delivery)
            case Join(cursor, member):
                member.entries += entries
                member.stamps = structs.replace(stamps, joined_at=time.time())
                self._join(cursor, member)
            case Refill(cursor):
                self.last_failed = head.request_id
                self._book.forget(cursor, head.member)
                self._ledger.refill(head, entries, cursor=cursor, stamps=stamps)
                self._refill(cursor, head.member)
            case Repeat(member):
                log.warning("%s came twice; the second copy is dropped", head.request_id)
                member.entries += entries
            case Drop():
                log.warning("%s %s; dropped", head.request_id, decision.why)
                if decision.fate is None:
                    self._ledger.release(head, entries)
                else:
                    self._ledger.settle(
                        head,
                        entries,
                        decision.fate,
                        cursor=decision.cursor,
                        evaluation=decision.evaluation,
                        stamps=stamps,
                    )
            case _:
                assert_never(decision)

    def _join(self, cursor: int, member: Member) -> None:
        """Puts the member into its group, replacing a failed one, and closes the group if that completes it."""
        head = member.head
        if head.reward is None:
            self.last_failed = head.request_id
        replaced = self._book.find(cursor, head.member)
        if replaced is not None and replaced.head.request_id == head.request_id:
            member.entries[:0] = replaced.entries
        elif replaced is not None:
            self._ledger.settle(
                replaced.head, replaced.entries, "failed", cursor=cursor, stamps=replaced.stamps
            )
        group = self._book.hold(cursor, member)
        self.num_arrived += 1
        self._judge(cursor, member)
        if head.task_id in self._quarantine:
            self._closer.drop_quarantined()
        elif group is not None:
            self._closer.close(group)

    def _is_wanted(self, cursor: int | None, head: TrajectoryHead) -> bool:
        """Whether its group or evaluation waits for it, or holds the same trajectory already."""
        if head.purpose == "eval":
            return self._heldout.awaits(head.request_id)
        if cursor is None or self._ledger.is_closed(cursor) or self._book.has_taken(cursor):
            return False
        held = self._book.find(cursor, head.member)
        if held is None:
            return head.reward is not None or self._book.awaits(cursor, head)
        return held.head.request_id == head.request_id or _replaces(head, held.head)

    def _is_held(self, cursor: int | None, head: TrajectoryHead) -> bool:
        """Whether its group holds the same trajectory."""
        held = None if cursor is None else self._book.find(cursor, head.member)
        return held is not None and held.head.request_id == head.request_id and not _replaces(head, held.head)

    def _may_refill(self, cursor: int, head: TrajectoryHead, findings: Findings) -> bool:
        """Whether it failed through no fault of policy or task, and its group has refills left."""
        return (
            head.reward is None
            and head.task_id not in self._quarantine
            and self._ledger.num_refills(cursor) < self._sources.at(cursor).recipe.refills_of(head.group_size)
            and findings.letter is not None
            and findings.letter.kind in REFILLED
        )


def _routing_width(recipe: Recipe) -> int:
    """The number of experts that engines report for each token. The model is read only if the recipe asks for them."""
    if not recipe.learner.routing_replay:
        return 0
    return read_architecture(Path(recipe.model)).reported_experts(recipe.learner)


def _cursor(head: TrajectoryHead) -> int | None:
    """The position of its group in the task order; None if it belongs to no training group."""
    try:
        return cursor_of(head.group_id)
    except ValueError:
        return None


def _replaces(new: TrajectoryHead, old: TrajectoryHead) -> bool:
    """Whether `new` may replace `old`: a dead request that a person requeued may still complete its group."""
    return old.reward is None and new.reward is not None


READ_AT_ONCE = 64


class StreamReader(Generic[H]):
    """The trainer's side of the stream of one run and one kind of job; one reader at a time."""

    def __init__(
        self,
        redis: ArqRedis,
        run_id: str,
        accept: Callable[[Delivery[H]], Awaitable[None]],
        *,
        record: Callable[[Delivery[H]], Awaitable[None]],
        kind: JobKind[Any, Any, H] = ROLLOUT,
    ) -> None:
        """Each entry is passed to `record`, which stores it, and then to `accept`.

        If one of them raises, both get the same entry again later.
        """
        self._kind = kind
        self._redis = redis
        self._run_id = run_id
        self._accept = accept
        self._record = record
        self._turn = asyncio.Lock()
        self._accepted: set[str] = set()  # entries that are not acknowledged
        self._may_have_lost = False  # whether a read failed since the last recovery

    async def recover(self) -> int:
        """Accepts entries that were delivered before and neither accepted nor acknowledged; returns their number."""
        async with self._turn:
            return await self._recover()

    async def read(self, *, block_ms: int | None) -> int:
        """Accepts new entries, waiting up to `block_ms` for the first (None: not at all).

        After an error, accepts those that were lost in it. Returns their number.
        """
        async with self._turn:
            if self._may_have_lost:
                return await self._recover()
            self._may_have_lost = True
            num_accepted = await self._accept_all(
                await stream.read_new(
                    self._redis, self._run_id, count=READ_AT_ONCE, block_ms=block_ms, kind=self._kind
                )
            )
            self._may_have_lost = False
            return num_accepted

    def forget(self, acknowledged: Iterable[tuple[str, str]]) -> None:
        """These (stream entry, request id) pairs will not be delivered again."""
        self._accepted.difference_update(entry for entry, _ in acknowledged)

    async def _recover(self) -> int:
        self._may_have_lost = True
        await stream.open_reader(self._redis, self._run_id, self._kind)
        deliveries = await stream.read_unacknowledged(self._redis, self._run_id, self._kind)
        num_accepted = await self._accept_all(deliveries)
        self._may_have_lost = False
        return num_accepted

    async def _accept_all(self, deliveries: list[Delivery[H]]) -> int:
        """Accepts the deliveries that were not accepted before: a Redis restored from an older snapshot delivers some again as new."""
        new = [delivery for delivery in deliveries if delivery.entry_id not in self._accepted]
        for delivery in new:
            await self._record(delivery)
            await self._accept(delivery)
            self._accepted.add(delivery.entry_id)
        return len(new)


class RunStreams:
    """The two streams of one run."""

    def __init__(self, books: Books, intake: Intake, recorder: RolloutRecorder) -> None:
        """Each arrival is first recorded and then accepted."""
        self._redis = redis = books.redis
        self._run_id = run_id = books.run_id
        self._rollouts = StreamReader(redis, run_id, intake.accept, record=recorder.record)
        self._judgements = StreamReader(
            redis,
            run_id,
            JudgementIntake(
                redis,
                books.groups,
                books.ledger,
                books.judging.requests,
                has_teacher=books.recipe.judge.method == "teacher",
            ).accept,
            record=recorder.record_judgement,
            kind=JUDGE,
        )

    async def open(self) -> bool:
        """Makes the trainer's consumer groups, once. Returns False if both existed."""
        was_made = await stream.open_reader(self._redis, self._run_id)
        return await stream.open_reader(self._redis, self._run_id, JUDGE) or was_made

    async def acknowledge(self, state: LedgerState) -> None:
        """Acknowledge what is settled in a checkpoint. Repeating it changes nothing."""
        await stream.acknowledge(self._redis, self._run_id, state.pending)
        self._rollouts.forget(state.pending)
        await stream.acknowledge(self._redis, self._run_id, state.pending_judgements, JUDGE)
        self._judgements.forget(state.pending_judgements)

    async def recover(self) -> int:
        """Accepts entries that were delivered before and neither accepted nor acknowledged. Returns their number."""
        return await self._rollouts.recover() + await self._judgements.recover()

    async def read(self, *, block_ms: int) -> int:
        """Accepts new entries, waiting up to `block_ms` for a trajectory. Returns their number."""
        num_rollouts = await self._rollouts.read(block_ms=block_ms)
        return num_rollouts + await self._judgements.read(block_ms=None)
