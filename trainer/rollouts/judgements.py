"""What becomes of each judgement that arrives: it joins its member once, or it changes nothing.

A judgement joins while its member's group is in the book. Once a step has taken the group, the step's batch stays as it is: the
judgement is settled as late with its group. A judgement whose group is settled, or that repeats another, is settled or
released at once. Whatever the case, its stream entry ends up in the ledger.
"""

import logging
import time

from arq.connections import ArqRedis

from pipeline import keys, stream
from pipeline.judge import Judgement, JudgementHead
from pipeline.kinds import JUDGE
from pipeline.message import MalformedMessage
from pipeline.stream import Delivery
from trainer.records.judgement_row import JudgedTurn, JudgementRow
from trainer.rollouts.groups import GroupBook, cursor_of
from trainer.rollouts.judge_requests import JudgeRequests
from trainer.rollouts.ledger import Ledger
from trainer.rollouts.members import Member, MemberJudgement

log = logging.getLogger("swerve.trainer")


class JudgementIntake:
    """Of one run."""

    def __init__(self, redis: ArqRedis, *, book: GroupBook, ledger: Ledger, requests: JudgeRequests) -> None:
        self._redis = redis
        self._book = book
        self._ledger = ledger
        self._requests = requests

    async def accept(self, delivery: Delivery[JudgementHead]) -> None:
        """Decide what becomes of a judgement, and do it. May be called again if Redis went away during the look-up."""
        judgement = await self._load(delivery)
        published: bytes | None = await self._redis.get(keys.published(delivery.head.request_id, JUDGE))
        is_copy = published is not None and published.decode() != delivery.entry_id
        self._apply(delivery.head, judgement, is_copy=is_copy)

    async def _load(self, delivery: Delivery[JudgementHead]) -> MemberJudgement:
        head = delivery.head
        found = MemberJudgement(
            "joined", waited_s=max(0.0, time.time() - head.enqueued_at), entries=[delivery.entry_id]
        )
        try:
            judgement = await stream.read_body(self._redis, head.request_id, JUDGE)
        except MalformedMessage as error:
            judgement, found.error = None, str(error)
        if judgement is None:
            found.fate, found.error = "failed", found.error or f"{head.outcome}: its body is not in Redis"
        elif judgement.failed is not None:
            found.fate, found.error = "failed", f"{judgement.failed.boundary}: {judgement.failed.message}"
        else:
            found.turns = tuple(JudgedTurn.of(step) for step in judgement.steps)
            found.judge = judgement.judge
            _check_turns(found, judgement)
        return found

    def _apply(self, head: JudgementHead, judgement: MemberJudgement, *, is_copy: bool) -> None:
        """The one place where a judgement changes the books. What is in them now decides: the look-up took a while."""
        cursor = cursor_of(head.group_id)
        awaited = self._requests.arrived(head.rollout_id)
        if judgement.fate == "failed":
            log.warning("%s was not judged: %s", head.rollout_id, judgement.error)
        member = self._book.find_rollout(cursor, head.rollout_id)
        if member is not None and (awaited is not None or member.judgement is not None):
            _join(member, judgement)
        elif awaited is not None:
            judgement.fate = "failed" if judgement.fate == "failed" else "late"
            self._requests.settle_apart(awaited, judgement)
        elif is_copy:
            self._ledger.release_judgement(head.rollout_id, judgement.entries)
        else:
            self._ledger.settle_judgement(self._row(head, judgement, cursor), judgement.entries)

    def _row(self, head: JudgementHead, judgement: MemberJudgement, cursor: int) -> JudgementRow:
        """The row of a judgement that nobody awaits."""
        fate = "failed" if judgement.fate == "failed" else self._requests.fate_apart(cursor, "late")
        return JudgementRow(
            rollout_id=head.rollout_id,
            group_id=head.group_id,
            task_id=head.task_id,
            cursor=cursor,
            fate=fate,
            turns=judgement.turns,
            num_turns=head.num_steps,
            judge=judgement.judge,
            error=judgement.error,
            waited_s=judgement.waited_s,
        )


def _join(member: Member, judgement: MemberJudgement) -> None:
    """Once: a second judgement only takes the place of a failed one, which a person had carried out again."""
    held = member.judgement
    if held is None:
        member.judgement = judgement
    elif held.fate == "failed" and judgement.fate == "joined":
        judgement.entries[:0] = held.entries
        member.judgement = judgement
    else:
        held.entries += judgement.entries


def _check_turns(found: MemberJudgement, judgement: Judgement) -> None:
    """A judgement that names a turn twice cannot be joined: then the judge has failed."""
    turns = [step.turn for step in judgement.steps]
    if len(set(turns)) < len(turns):
        found.fate, found.turns, found.error = "failed", (), "request: the judgement names a turn twice"
