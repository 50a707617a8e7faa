"""The judge requests of a run: one for each trajectory that joins its group with a reward.

A request is enqueued when its trajectory has joined, and again whenever Redis may have lost it: its id is made of the
trajectory's, so that enqueuing it twice changes nothing. It is withdrawn when its group has left the book without it. Enqueuing
is one script of Redis, so that a sweep never meets half of it.
"""

import time
from dataclasses import dataclass

from arq.connections import ArqRedis

from pipeline import deadletters, queue, request_store, stream, trace_ids
from pipeline.judge import Judge, JudgementHead, JudgeRequest, judge_request_id
from pipeline.kinds import JUDGE
from pipeline.message import MalformedMessage
from trainer.records.judgement_row import JudgementFate, JudgementRow
from trainer.rollouts.groups import GroupBook, cursor_of
from trainer.rollouts.ledger import Ledger
from trainer.rollouts.members import Member, MemberJudgement, judgement_row


@dataclass(frozen=True, slots=True)
class AwaitedJudgement:
    """An outstanding request, and the member that waits for it."""

    request: JudgeRequest
    cursor: int
    member: Member


class JudgeRequests:
    """Of one run. Every coroutine may be called again after Redis was away."""

    def __init__(
        self, redis: ArqRedis, run_id: str, judge: Judge | None, *, book: GroupBook, ledger: Ledger
    ) -> None:
        """Without a `judge` nothing is enqueued; what an earlier process enqueued is withdrawn."""
        self._redis = redis
        self._run_id = run_id
        self._judge = judge
        self._book = book
        self._ledger = ledger
        self._unsent: dict[str, JudgeRequest] = {}
        self._awaited: dict[str, AwaitedJudgement] = {}  # by rollout id

    def want(self, cursor: int, member: Member) -> None:
        """Have a member judged that has joined its group, by the next call of `send`. Nothing happens for one without a reward."""
        if self._judge is None or not member.is_valid:
            return
        head = member.head
        request = JudgeRequest(
            id=judge_request_id(head.request_id),
            run_id=self._run_id,
            purpose="train",
            group_id=head.group_id,
            enqueued_at=time.time(),
            group_asked_at=self._book.enqueued_at(cursor),
            traceparent=trace_ids.group_wait(head.request_id),
            rollout_id=head.request_id,
            task=head.task_id,
            judge=self._judge,
        )
        member.awaits_judgement = True
        self._awaited[head.request_id] = AwaitedJudgement(request, cursor, member)
        self._unsent[request.id] = request

    def arrived(self, rollout_id: str) -> AwaitedJudgement | None:
        """Nothing is awaited for this rollout any more. Returns what was."""
        awaited = self._awaited.pop(rollout_id, None)
        if awaited is not None:
            awaited.member.awaits_judgement = False
            self._unsent.pop(awaited.request.id, None)
        return awaited

    async def send(self) -> None:
        """Enqueue what is wanted. After an error, the next call goes on with the request that failed."""
        while self._unsent:
            request = next(iter(self._unsent.values()))
            await queue.enqueue(self._redis, request, JUDGE)
            self._unsent.pop(request.id, None)

    async def withdraw_unneeded(self) -> None:
        """Withdraw the requests of members that have left the book. One that is answered already is left to its judgement."""
        gone = {one.request.id: one for one in self._awaited.values() if not self._is_in_book(one)}
        if not gone:
            return
        for request_id in gone:
            self._unsent.pop(request_id, None)
        for request_id in await queue.withdraw(self._redis, self._run_id, list(gone), JUDGE):
            awaited = self.arrived(gone[request_id].request.rollout_id)
            if awaited is not None:
                waited_s = time.time() - awaited.request.enqueued_at
                self.settle_apart(awaited, MemberJudgement("late", waited_s=waited_s))

    def settle_apart(self, awaited: AwaitedJudgement, judgement: MemberJudgement) -> None:
        """Settle what a member without a place in the book was awaiting: it changes nothing any more. While a step has the group
        and has not settled it, the member keeps the judgement, and is settled with it.
        """
        cursor, member = awaited.cursor, awaited.member
        if self._ledger.is_closed(cursor):
            judgement.fate = self.fate_apart(cursor, judgement.fate)
            row = judgement_row(member.head, judgement, cursor=cursor)
            self._ledger.settle_judgement(row, judgement.entries)
        else:
            member.judgement = judgement

    def fate_apart(self, cursor: int, fate: JudgementFate) -> JudgementFate:
        """The fate of a judgement whose group is settled: nobody needed it unless a step took the group."""
        return fate if self._book.has_taken(cursor) or fate == "failed" else "unneeded"

    async def sweep(self) -> int:
        """Enqueue lost requests again; returns how many. Fail those that were dead-lettered as unreadable."""
        requeued = await queue.sweep(self._redis, self._run_id, JUDGE)
        dead = set(await deadletters.unanswered(self._redis, self._run_id, JUDGE))
        for awaited in list(self._awaited.values()):
            if awaited.request.id in dead:
                await stream.publish_unreadable(self._redis, _failed_head(awaited.request), JUDGE)
        return len(requeued)

    async def replace_forgotten(self) -> int:
        """Have requests enqueued again that Redis has forgotten; returns how many."""
        known = set(await queue.open_ids(self._redis, self._run_id, JUDGE))
        forgotten = {
            awaited.request.id: awaited.request
            for awaited in self._awaited.values()
            if awaited.request.id not in known and awaited.request.id not in self._unsent
        }
        self._unsent |= forgotten
        return len(forgotten)

    async def withdraw_strangers(self) -> None:
        """Withdraw open requests that nobody awaits: of groups that an earlier process settled, or of a judge that the recipe no
        longer has.
        """
        expected = self._ledger.pending_judgement_ids | {one.request.id for one in self._awaited.values()}
        strangers = [
            request_id
            for request_id in await queue.open_ids(self._redis, self._run_id, JUDGE)
            if request_id not in expected
        ]
        found = {request_id: await self._read(request_id) for request_id in strangers}
        for request_id in await queue.withdraw(self._redis, self._run_id, strangers, JUDGE):
            request = found[request_id]
            if request is not None:
                self._ledger.settle_judgement(_withdrawn_row(request), [])

    async def _read(self, request_id: str) -> JudgeRequest | None:
        try:
            return await request_store.read(self._redis, request_id, JUDGE)
        except MalformedMessage:
            return None

    def _is_in_book(self, awaited: AwaitedJudgement) -> bool:
        head = awaited.member.head
        return self._book.find(awaited.cursor, head.member) is awaited.member


def _withdrawn_row(request: JudgeRequest) -> JudgementRow:
    """The row of a request of which only Redis still knows."""
    return JudgementRow(
        rollout_id=request.rollout_id,
        group_id=request.group_id,
        task_id=request.task,
        cursor=cursor_of(request.group_id),
        fate="unneeded",
        waited_s=time.time() - request.enqueued_at,
    )


def _failed_head(request: JudgeRequest) -> JudgementHead:
    """The head that is published for a request that no worker can carry out, because it cannot be read."""
    now = time.time()
    return JudgementHead(
        request_id=request.id,
        run_id=request.run_id,
        outcome="failed:request",
        rollout_id=request.rollout_id,
        group_id=request.group_id,
        task_id=request.task,
        num_steps=0,
        num_scored=0,
        num_votes=0,
        num_valid_votes=0,
        score_mean=None,
        body_bytes=0,
        attempt=0,
        worker="",
        enqueued_at=request.enqueued_at,
        claimed_at=now,
        finished_at=now,
    )
