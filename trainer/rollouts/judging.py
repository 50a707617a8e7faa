"""Judging on the trainer's side: sending requests, receiving judgements, and groups that wait for them. None of it changes a reward.

requests   One for each trajectory that joins its group with a reward, enqueued when it has joined, and again whenever Redis may have lost
           it: its id is made from the trajectory's, so that enqueuing it twice changes nothing. It is withdrawn when its group has left the
           book without it. One Redis script enqueues it, so a sweep never finds it half enqueued.
waits      A group that is ready waits until each of its members is judged, at most for the time in the recipe. It does not wait if no judge
           has worked for a while, because no judgement would arrive in time. With `required` it waits in any case, and admission is closed
           while no judge works. If scores change no advantage, no group waits.
intake     A judgement joins while its member's group is in the book. Once a step has taken the group, the step's batch does not change any
           more: the judgement is settled as late, together with its group. A judgement whose group is settled, or that repeats another, is
           settled or released at once. In every case, its stream entry is settled in the ledger.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from arq.connections import ArqRedis

from pipeline import census, deadletters, keys, queue, request_store, stream, telemetry
from pipeline.journal.rows import JudgedTurn, JudgementFate, JudgementRow
from pipeline.judge import Judge, Judgement, JudgementHead, JudgeRequest, judge_request_id
from pipeline.kinds import JUDGE
from pipeline.message import MalformedMessage
from pipeline.stream import Delivery
from pipeline.trajectory import logprob_fault
from trainer.batching.credit import GradedMember, logprobs_of, reverse_kl
from trainer.recipe import JudgeRecipe, Recipe
from trainer.rollouts.groups import Group, GroupBook, Member, MemberJudgement, cursor_of, judgement_row
from trainer.rollouts.ledger import Ledger

log = logging.getLogger("swerve.trainer")

LOOK_S = 5.0  # pause between two looks at the judges' heartbeats
# Time without a working judge after which judging counts as out; redeployed judges are back earlier
OUTAGE_S = 60.0
_NO_LOGPROBS = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class AwaitedJudgement:
    """An outstanding request, and the member that waits for it."""

    request: JudgeRequest
    cursor: int
    member: Member


class JudgeRequests:
    """The judge requests of one run. Every coroutine may be called again after Redis was unavailable."""

    def __init__(
        self,
        redis: ArqRedis,
        run_id: str,
        judge: Judge | None,
        *,
        book: GroupBook,
        ledger: Ledger,
        late_s: float,
    ) -> None:
        """Nothing is enqueued without a `judge`, and requests that an earlier process enqueued are withdrawn.

        After a step has taken its group, a request stays in the queue for `late_s`.
        """
        self._late_s = late_s
        self._redis = redis
        self._run_id = run_id
        self._judge = judge
        self._book = book
        self._ledger = ledger
        self._unsent: dict[str, JudgeRequest] = {}
        self._awaited: dict[str, AwaitedJudgement] = {}  # keys are ids of rollouts

    def want(self, cursor: int, member: Member) -> None:
        """Requests a judgement of a member that has joined its group; the next call of `send` enqueues it.

        A member without a reward is ignored.
        """
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
            traceparent=telemetry.group_wait(head.request_id),
            rollout_id=head.request_id,
            task=head.task_id,
            judge=self._judge,
        )
        member.awaits_judgement = True
        self._awaited[head.request_id] = AwaitedJudgement(request, cursor, member)
        self._unsent[request.id] = request

    def arrived(self, rollout_id: str) -> AwaitedJudgement | None:
        """Ends the wait for this rollout's judgement. Returns the request and member that waited for it."""
        awaited = self._awaited.pop(rollout_id, None)
        if awaited is not None:
            awaited.member.awaits_judgement = False
            self._unsent.pop(awaited.request.id, None)
        return awaited

    async def send(self) -> None:
        """Enqueues the wanted requests. After an error, the next call continues with the request that failed."""
        while self._unsent:
            request = next(iter(self._unsent.values()))
            await queue.enqueue(self._redis, request, JUDGE)
            self._unsent.pop(request.id, None)

    async def withdraw_unneeded(self, *, is_end: bool = False) -> None:
        """Withdraws the requests of members that have left the book; before the end of the run, not those that may be judged late.

        A request that is already answered is not withdrawn.
        """
        left = [one for one in self._awaited.values() if not self._is_in_book(one)]
        gone = {one.request.id: one for one in left if is_end or not self._may_be_late(one)}
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
        """Settles the request of a member that is no longer in the book, because its judgement changes nothing any more.

        While a step has taken the group without settling it, the member keeps the judgement, and is settled with it.
        """
        cursor, member = awaited.cursor, awaited.member
        if self._ledger.is_closed(cursor):
            judgement.fate = self.fate_apart(cursor, judgement.fate)
            row = judgement_row(member.head, judgement, cursor=cursor)
            self._ledger.settle_judgement(row, judgement.entries)
        else:
            member.judgement = judgement

    def fate_apart(self, cursor: int, fate: JudgementFate) -> JudgementFate:
        """The fate of a judgement whose group is settled: "not needed", unless a step took the group."""
        return fate if self._book.has_taken(cursor) or fate == "failed" else "unneeded"

    async def sweep(self) -> int:
        """Enqueues lost requests again; returns their number. Those that were dead-lettered as unreadable are settled as failed."""
        requeued = await queue.sweep(self._redis, self._run_id, JUDGE)
        dead = set(await deadletters.unanswered(self._redis, self._run_id, JUDGE))
        for awaited in list(self._awaited.values()):
            if awaited.request.id in dead:
                await stream.publish_unreadable(self._redis, _failed_head(awaited.request), JUDGE)
        return len(requeued)

    async def replace_forgotten(self) -> int:
        """Makes requests that Redis has lost be enqueued again; returns their number."""
        known = set(await queue.open_ids(self._redis, self._run_id, JUDGE))
        forgotten = {
            awaited.request.id: awaited.request
            for awaited in self._awaited.values()
            if awaited.request.id not in known and awaited.request.id not in self._unsent
        }
        self._unsent |= forgotten
        return len(forgotten)

    async def withdraw_strangers(self) -> None:
        """Withdraws open requests that no member awaits: those of groups that an earlier process settled, or of a judge that the recipe no
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

    def _may_be_late(self, awaited: AwaitedJudgement) -> bool:
        if (
            not self._book.has_taken(awaited.cursor)
            or time.time() > awaited.request.enqueued_at + self._late_s
        ):
            return False
        if self._ledger.is_closed(awaited.cursor):
            awaited.member.samples = ()  # the samples are trained, so only its head is still needed
        return True

    def _is_in_book(self, awaited: AwaitedJudgement) -> bool:
        head = awaited.member.head
        return self._book.find(awaited.cursor, head.member) is awaited.member


class JudgePresence:
    """Whether a judge works, according to heartbeats."""

    def __init__(self, redis: ArqRedis, recipe: JudgeRecipe, *, say: Callable[[str], None]) -> None:
        self._redis = redis
        self._recipe = recipe
        self._say = say
        self._looked_at = float("-inf")
        self._seen_at = time.monotonic()  # when a judge last worked; at first, when this object was made
        self._is_out = False
        self.trouble = ""  # why no judge works at the moment; empty if one does

    async def look(self) -> None:
        """Reads the heartbeats, unless they were read a moment ago."""
        now = time.monotonic()
        if not self._recipe.is_on or now < self._looked_at + LOOK_S:
            return
        alive, _ = await census.workers(self._redis)
        self._looked_at = now
        judges = [status for status in alive if status.kind == JUDGE.name]
        paused = [status.paused for status in judges if status.paused]
        self.trouble = ""
        if not judges:
            self.trouble = "no judge is alive; start `python -m workers.judge`"
        elif len(paused) == len(judges):
            self.trouble = f"every judge is paused: {paused[0]}"
        else:
            self._seen_at = now
        self._note(is_out=bool(self.trouble) and now >= self._seen_at + OUTAGE_S)

    @property
    def is_out(self) -> bool:
        """Whether no judge has worked for OUTAGE_S."""
        return self._is_out

    @property
    def closed_because(self) -> str:
        """The reason why no group may be enqueued; empty if the judges are not the reason."""
        return f"judge.required, and {self.trouble}" if self._recipe.required and self.trouble else ""

    def _note(self, *, is_out: bool) -> None:
        if is_out and not self._is_out and not self._recipe.required:
            self._say(f"{self.trouble}; groups are trained without judgements until one works")
        if self._is_out and not is_out:
            self._say("a judge works again")
        self._is_out = is_out


class JudgementWaits:
    """The groups of one book that are ready except for their judgements."""

    def __init__(
        self,
        book: GroupBook,
        presence: JudgePresence,
        recipe: JudgeRecipe,
        *,
        say: Callable[[str], None],
        are_read: bool,
    ) -> None:
        """`are_read`: whether scores can change an advantage; if not, no group waits."""
        self._are_read = are_read
        self._book = book
        self._presence = presence
        self._recipe = recipe
        self._say = say
        self._since: dict[int, float] = {}  # when each held group became ready, on the monotonic clock

    def hold(self, group: Group) -> None:
        """Called when a group has become ready: makes it wait while one of its members awaits its judgement."""
        if self._are_read and _num_awaited(group):
            self._book.hold_back(group.cursor)
            group.released_at = 0.0
            self._since[group.cursor] = time.monotonic()

    def release(self, now: float) -> None:
        """Releases the groups that are judged, or have waited long enough at `now`, on the monotonic clock."""
        held = self._book.unjudged
        for group in held:
            num_awaited = _num_awaited(group)
            waited_s = now - self._since[group.cursor]
            if not num_awaited:
                self._release(group)
            elif not self._recipe.required and (self._presence.is_out or waited_s >= self._recipe.wait_s):
                self._release(group)
                if not self._presence.is_out:
                    self._say(
                        f"group {group.cursor} ({group.task_id}) waited {waited_s:.0f} s for its judgements and goes on "
                        f"without {num_awaited} of {len(group.rewards)}"
                    )
        cursors = {group.cursor for group in held}
        self._since = {cursor: since for cursor, since in self._since.items() if cursor in cursors}

    def _release(self, group: Group) -> None:
        group.released_at = time.time()
        self._book.release(group.cursor)


class Judging:
    """The judging of one run. Every coroutine may be called again after Redis was unavailable."""

    def __init__(
        self,
        redis: ArqRedis,
        run_id: str,
        recipe: Recipe,
        judge: Judge | None,
        book: GroupBook,
        ledger: Ledger,
        *,
        say: Callable[[str], None],
    ) -> None:
        """`judge` is the judge in requests; None if the recipe has none. If the recipe's credit reads no scores, groups do not wait for
        them, and judges may deliver them after the step, for measurement.
        """
        reads_judgements = recipe.credit.reads_judgements
        late_s = 0.0 if reads_judgements else recipe.judge.wait_s
        self.presence = JudgePresence(redis, recipe.judge, say=say)
        self.requests = JudgeRequests(redis, run_id, judge, book=book, ledger=ledger, late_s=late_s)
        self.waits = JudgementWaits(book, self.presence, recipe.judge, say=say, are_read=reads_judgements)

    async def tend(self) -> None:
        """Enqueue and withdraw requests, and release groups that need not wait any longer."""
        self.waits.release(time.monotonic())
        await self.requests.withdraw_unneeded()
        await self.requests.send()


class JudgementIntake:
    """Receives the judgements of one run."""

    def __init__(
        self,
        redis: ArqRedis,
        book: GroupBook,
        ledger: Ledger,
        requests: JudgeRequests,
        *,
        has_teacher: bool = False,
    ) -> None:
        """`has_teacher`: a judgement joins only with the log-prob of every trained token of its member."""
        self._redis = redis
        self._book = book
        self._ledger = ledger
        self._requests = requests
        self._has_teacher = has_teacher

    async def accept(self, delivery: Delivery[JudgementHead]) -> None:
        """Decides the fate of a judgement, and applies the decision.

        The call may be repeated if Redis became unavailable during the look-up.
        """
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
            if self._has_teacher:
                found.logprobs = logprobs_of(judgement)
            _check_turns(found, judgement)
        return found

    def _apply(self, head: JudgementHead, judgement: MemberJudgement, *, is_copy: bool) -> None:
        """Applies a judgement to the books. No other function does. Their present content decides, because the look-up took a while."""
        cursor = cursor_of(head.group_id)
        awaited = self._requests.arrived(head.rollout_id)
        member = self._book.find_rollout(cursor, head.rollout_id)
        if member is not None:
            _check_logprobs(judgement, member)
        if judgement.fate == "failed":
            log.warning("%s was not judged: %s", head.rollout_id, judgement.error)
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
        """The row of a judgement that no member awaits."""
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


def _withdrawn_row(request: JudgeRequest) -> JudgementRow:
    """The row of a request that only Redis still knows."""
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


def _num_awaited(group: Group) -> int:
    """The number of members whose judgements have not arrived."""
    return sum(member.awaits_judgement for member in group.members.values())


def _join(member: Member, judgement: MemberJudgement) -> None:
    """Joins a judgement to its member, once. A second judgement only replaces a failed one, if a person has retried its request."""
    held = member.judgement
    if held is None:
        member.judgement = judgement
    elif held.fate == "failed" and judgement.fate == "joined":
        judgement.entries[:0] = held.entries
        member.judgement = judgement
    else:
        held.entries += judgement.entries


def _check_turns(found: MemberJudgement, judgement: Judgement) -> None:
    """Marks a judgement that names a turn twice as failed, because it cannot be joined."""
    turns = [step.turn for step in judgement.steps]
    if len(set(turns)) < len(turns):
        found.fate, found.turns, found.error = "failed", (), "request: the judgement names a turn twice"


def _check_logprobs(found: MemberJudgement, member: Member) -> None:
    """Marks a teacher's judgement as failed unless it has a usable log-prob of every trained token of the member."""
    if found.fate != "joined" or found.logprobs is None:
        return
    for reply in (reply for sample in member.samples for reply in sample.replies):
        logprobs = found.logprobs.get(reply.turn, _NO_LOGPROBS)
        if fault := logprob_fault(logprobs.tolist(), reply.end - reply.start):
            found.fate, found.turns, found.logprobs = "failed", (), None
            found.error = f"judge: turn {reply.turn}: {fault}"
            return
    found.reverse_kl = reverse_kl(GradedMember(0.0, member.samples, logprobs=found.logprobs))
