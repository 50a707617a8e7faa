"""A request's whole life, walked at random with a crash wherever there can be one, against a model of what was promised.

Each change of state is one script, so a crash falls before it or after it; whoever crashed after it has not heard the
answer and may ask again. Workers that die leave their claims behind and may wake up late. Redis itself may lose what is
in the queue. The trainer here keeps its books as the real one does: what a checkpoint holds is trained for good, what it
does not hold was never trained, and a restart goes back to it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from pipeline import connection, deadletters, keys, queue, stream
from pipeline.queue import Lease
from pipeline.request import Claim, RolloutRequest
from pipeline.stream import Delivery
from pipeline.trajectory import Failed
from tests.pipeline import samples

T = TypeVar("T")
BROKEN = Failed(boundary="sandbox", message="gone", transient=True)
RUN = samples.RUN


@dataclass(slots=True)
class Model:
    """One request as it should be. `generation` counts the budgets it was given: a person may requeue the dead."""

    request: RolloutRequest
    state: str = "queued"  # queued, claimed, lost, published, answered, dead, gone
    in_force: int = 0  # the attempt that may act, if any
    made: int = 0
    unended: int = 0
    generation: int = 0
    entries: list[str] = field(default_factory=list[str])  # of every publication, the newest last
    holds_bytes: bool = False


@dataclass(slots=True)
class Trainer:
    """What it has settled: `trained` ids, and pairs to acknowledge with the checkpoint that holds them."""

    trained: list[str] = field(default_factory=list[str])
    pending: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def copy(self) -> "Trainer":
        return Trainer(list(self.trained), list(self.pending))


class Life(RuleBasedStateMachine):
    """`url` is of a Redis that is ours alone."""

    requests = Bundle("requests")
    claims = Bundle("claims")

    def __init__(self, url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.pool = self.do(connection.connect(url))
        self.do(self.pool.flushdb())
        self.do(stream.open_reader(self.pool, RUN))
        self.models: dict[str, Model] = {}
        self.trainer, self.checkpoint = Trainer(), Trainer()
        self.held: list[Delivery] = []

    def teardown(self) -> None:
        self.do(self.pool.aclose())
        self.runner.close()

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    # The trainer asks

    @rule(target=requests, purpose=st.sampled_from(["train", "train", "eval"]))
    def enqueue(self, purpose: str) -> str:
        request = samples.request(purpose=purpose)
        self.do(queue.enqueue(self.pool, request))
        self.models[request.id] = Model(request)
        return request.id

    @rule(one=requests)
    def enqueue_again_not_having_heard(self, one: str) -> None:
        model = self.models[one]
        if model.state != "gone":
            self.do(queue.enqueue(self.pool, model.request))
            if model.state == "lost":
                model.state = "queued"

    @rule(one=requests)
    def withdraw(self, one: str) -> None:
        model = self.models[one]
        if model.state in ("queued", "claimed", "lost"):
            self.do(queue.withdraw(self.pool, RUN, [one]))
            model.state, model.in_force = "gone", 0

    @rule()
    def sweep(self) -> None:
        lost = {one for one, model in self.models.items() if model.state == "lost"}
        assert set(self.do(queue.sweep(self.pool, RUN))) == lost
        for one in lost:
            self.models[one].state = "queued"

    # Workers

    @rule(target=claims, count=st.integers(1, 3))
    def take(self, count: int) -> Any:
        waiting = sum(model.state == "queued" for model in self.models.values())
        taken = [one for one in self.do(queue.take(self.pool, "host/1", count)) if isinstance(one, Claim)]
        assert len(taken) == min(count, waiting)
        for claim in taken:
            self._claimed(claim)
        return multiple(*taken)

    def _claimed(self, claim: Claim) -> None:
        model = self.models[claim.request.id]
        assert model.state == "queued"
        model.made += 1
        assert (claim.attempt, claim.num_unended) == (model.made, model.unended)
        model.state, model.in_force = "claimed", claim.attempt
        model.unended += 1

    @rule(target=claims, one=requests)
    def claim_by_name(self, one: str) -> Any:
        model = self.models[one]
        if model.state == "dead":  # nobody is told of it: it is in no queue
            return multiple()
        answer = self.do(queue.claim(self.pool, one, "host/2"))
        if model.state == "lost":
            model.state = "queued"
        match model.state:
            case "queued":
                assert isinstance(answer, Claim)
                self._claimed(answer)
                return answer
            case "claimed":
                assert answer == "held"
            case "gone":
                assert answer == "gone"
            case _:
                assert answer == "answered"
        return multiple()

    @rule(claim=claims)
    def renew(self, claim: Claim) -> None:
        lease = Lease(worker=claim.worker, attempt=claim.attempt, claimed_at=claim.claimed_at, phase="agent")
        model = self.models[claim.request.id]
        may = model.in_force == claim.attempt and model.state in ("claimed", "queued", "lost")
        assert self.do(queue.renew(self.pool, claim, lease)) == may
        if may:
            model.state = "claimed"  # a worker that woke up before anybody else took it goes on

    @rule(one=requests)
    def a_worker_dies_and_its_lease_lapses(self, one: str) -> None:
        model = self.models[one]
        if model.state == "claimed":
            self.do(self.pool.delete(keys.lease(one)))
            self.do(self.pool.zadd(keys.queue(), {one: time.time() * 1000 - 1}, xx=True))
            in_queue = self.do(self.pool.zscore(keys.queue(), one)) is not None
            model.state = "queued" if in_queue else "lost"

    @rule(claim=claims, counted=st.booleans())
    def return_to_queue(self, claim: Claim, counted: bool) -> None:
        model = self.models[claim.request.id]
        may = model.in_force == claim.attempt and model.state in ("claimed", "queued", "lost")
        failure = deadletters.attempt_failure(claim, BROKEN) if counted else None
        assert self.do(queue.return_to_queue(self.pool, claim, failure=failure)) == may
        if may:
            model.state, model.in_force = "queued", 0
            model.unended -= 1

    @rule(claim=claims)
    def publish(self, claim: Claim) -> None:
        model = self.models[claim.request.id]
        verdict = self.do(stream.publish(self.pool, samples.trajectory(claim)))
        assert verdict == self._verdict(model, claim)
        if verdict == "published":
            self._published(model, "published")

    @rule(claim=claims)
    def dead_letter(self, claim: Claim) -> None:
        model = self.models[claim.request.id]
        failed = samples.trajectory(claim, turns=(), outcome=BROKEN, reward=None)
        verdict = self.do(
            deadletters.dead_letter(self.pool, failed, [deadletters.attempt_failure(claim, BROKEN)])
        )
        assert verdict == self._verdict(model, claim)
        if verdict == "published":
            self._published(model, "dead")

    def _verdict(self, model: Model, claim: Claim) -> str:
        if model.state == "gone":
            return "withdrawn"
        if claim.attempt != model.made:
            return "fenced"
        if model.state in ("published", "answered", "dead"):
            return "duplicate"
        return "published" if model.in_force == claim.attempt else "fenced"

    def _published(self, model: Model, state: str) -> None:
        model.state, model.in_force, model.holds_bytes = state, 0, True
        model.unended -= 1
        entry = self.do(self.pool.get(keys.published(model.request.id)))
        assert entry is not None
        model.entries.append(entry.decode())

    # People

    @rule(one=requests)
    def requeue(self, one: str) -> None:
        model = self.models[one]
        if model.state != "dead":
            return
        self.do(deadletters.requeue(self.pool, RUN, one))
        model.state, model.holds_bytes = "queued", False
        model.made += 1
        model.unended = 0
        model.generation += 1

    @rule(one=requests)
    def drop(self, one: str) -> None:
        model = self.models[one]
        if model.state == "dead":
            self.do(deadletters.drop(self.pool, RUN, one))
            model.state = "gone"

    # Redis

    @rule(one=requests)
    def the_queue_loses_it(self, one: str) -> None:
        model = self.models[one]
        if model.state in ("queued", "claimed"):
            self.do(self.pool.zrem(keys.queue(), one))
            self.do(self.pool.delete(keys.arq_job(one)))
            model.state = "lost" if model.state == "queued" else "claimed"

    # The learner

    @rule(count=st.integers(1, 3))
    def read(self, count: int) -> None:
        self.held += self.do(stream.read_new(self.pool, RUN, count=count, block_ms=None))

    @rule()
    def train(self) -> None:
        """A step takes what is held; what never had a reward is settled without training."""
        for delivery in self.held:
            head = delivery.head
            if head.reward is not None and head.request_id not in self.trainer.trained:
                self.trainer.trained.append(head.request_id)
            self.trainer.pending.append((delivery.entry_id, head.request_id))
        self.held = []

    @rule(acknowledges=st.booleans())
    def write_a_checkpoint_and_perhaps_die_before_acknowledging(self, acknowledges: bool) -> None:
        self.checkpoint = self.trainer.copy()
        if acknowledges:
            self._acknowledge(self.checkpoint.pending)
            self.trainer.pending = []
        else:
            self.restart_the_trainer()

    @rule()
    def restart_the_trainer(self) -> None:
        """Back to the checkpoint: what it holds is acknowledged, what was delivered beyond it is read again."""
        self.trainer = self.checkpoint.copy()
        self._acknowledge(self.checkpoint.pending)
        self.held = self.do(stream.read_unacknowledged(self.pool, RUN))
        trained = set(self.trainer.trained)
        again = [delivery.head.request_id for delivery in self.held if delivery.head.reward is not None]
        assert not trained & set(again), "what a checkpoint holds is not given out again"

    def _acknowledge(self, pairs: list[tuple[str, str]]) -> None:
        self.do(stream.acknowledge(self.pool, RUN, pairs))
        for entry, one in pairs:
            model = self.models[one]
            if model.entries and model.entries[-1] == entry and model.state in ("published", "dead", "gone"):
                model.holds_bytes = False
                model.state = "answered" if model.state == "published" else model.state

    # What must always hold

    @invariant()
    def each_request_is_in_exactly_one_state(self) -> None:
        for one, model in self.models.items():
            assert self.do(self._observed(one)) == model.state, one

    async def _observed(self, one: str) -> str:
        async with self.pool.pipeline(transaction=True) as pipe:
            pipe.exists(keys.request(one))
            pipe.hexists(keys.dead(RUN), one)
            pipe.exists(keys.published(one))
            pipe.zscore(keys.open_requests(RUN), one)
            pipe.exists(keys.lease(one))
            pipe.zscore(keys.queue(), one)
            known, dead, published, owed, leased, queued = await pipe.execute()
        if not known:
            assert (dead, owed, leased, queued) == (False, None, 0, None)
            return "gone"
        if dead:
            assert (published, leased, queued) == (1, 0, None)
            return "dead"
        if published:
            assert (leased, queued) == (0, None)
            return "answered" if owed is None else "published"
        assert owed is not None, "what is not answered is owed"
        if leased:
            return "claimed"
        return "lost" if queued is None else "queued"

    @invariant()
    def nothing_is_published_twice(self) -> None:
        heads = self.do(stream.newest_heads(self.pool, RUN, 1000))
        found = Counter(delivery.head.request_id for delivery in heads)
        for one, model in self.models.items():
            assert found[one] == len(model.entries) <= model.generation + 1

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        assert max(Counter(self.trainer.trained).values(), default=0) <= 1

    @invariant()
    def bytes_are_those_of_what_is_not_acknowledged(self) -> None:
        counted = self.do(self.pool.hgetall(keys.unacknowledged_bytes(RUN)))
        total, _ = int(counted.pop(b"", 0)), counted.pop(b"kept", 0)
        assert {raw.decode() for raw in counted} == {
            one for one, model in self.models.items() if model.holds_bytes
        }
        assert sum(map(int, counted.values())) == total

    @invariant()
    def nothing_published_is_lost_to_the_learner(self) -> None:
        """It is unread, held, settled and waiting for a checkpoint, or in one."""
        known = [*self.held, *self.do(self._unread())]
        ids = {one.head.request_id for one in known} | {one for _, one in self.trainer.pending}
        for one, model in self.models.items():
            assert model.state != "published" or one in ids

    async def _unread(self) -> list[Delivery]:
        (group,) = await self.pool.xinfo_groups(keys.stream(RUN))
        after = _order(group["last-delivered-id"].decode())
        newest = await stream.newest_heads(self.pool, RUN, 1000)
        return [one for one in newest if _order(one.entry_id) > after]


def _order(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))


# Quick: whatever happens in whatever order, a request is in one state and trained once.
def test_a_request_is_always_in_one_state_and_trained_at_most_once(redis_url: str) -> None:
    walk = settings(max_examples=20, stateful_step_count=40)
    run_state_machine_as_test(lambda: Life(redis_url), settings=walk)
