"""Exactly once to the gradient: the trainer's books against a real Redis, with a trainer that may die between any two
commands it sends, before Redis hears of them or before it hears the answer.

The learner is a list of who was trained in which step: it goes into the checkpoint and comes back from it, as weights do.
"""

import asyncio
import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arq.connections import ArqRedis
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from redis.asyncio import ConnectionPool, UnixDomainSocketConnection
from redis.exceptions import ResponseError

from benchmarks.scripted_fleet import finish
from pipeline import deadletters, keys, queue, stream
from pipeline.message import encode
from pipeline.request import Claim
from pipeline.rollout_store.reading import RolloutStore
from pipeline.trajectory import Failed
from tests.trainer.trainer_side import GROUP_SIZE, RUN, TrainerSide
from tests.trainer.trajectories import behind
from trainer.batching.collate import make_batch
from trainer.learner import directories
from trainer.loop.checkpoints import Checkpoints, CheckpointWriter
from trainer.loop.state import RunState
from trainer.records.journal import EpisodeRow, Journal, read
from trainer.rollouts.deadlines import Deadlines
from trainer.rollouts.groups import GroupBook
from trainer.rollouts.ledger import LedgerState, decode_state

MAX_EXAMPLES = 25
LOST = Failed(boundary="sandbox", message="the host went down", transient=True)
IMAGE_GONE = Failed(boundary="sandbox", message="no such image", transient=False)
VERDICTS: tuple[float | Failed, ...] = (0.0, 1.0, 0.0, 1.0, LOST, IMAGE_GONE)

History = list[list[str]]  # request ids of each step


class Died(Exception):
    """The trainer is no more."""


class Fuse:
    """Burns with every command sent; at its end the trainer dies, before or after Redis has done as it was told. What
    is `again` burns from then on, so the next life may end while it begins.
    """

    def __init__(self) -> None:
        self.left = self.again = 0
        self.is_heard = False

    def light(self, number: int) -> None:
        self.left, self.again, self.is_heard = 1 + number // 2, number % 5, number % 2 == 1

    def burns_out(self) -> bool:
        if self.left:
            self.left -= 1
            if not self.left:
                self.left, self.again = self.again, 0
                return True
        return False


class MortalConnection(UnixDomainSocketConnection):
    def __init__(self, *, fuse: Fuse, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fuse = fuse
        self.is_ready = False

    async def on_connect(self) -> None:
        self.is_ready = False
        await super().on_connect()
        self.is_ready = True

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if not self.is_ready or not self.fuse.burns_out():
            return await super().send_packed_command(command, check_health)
        if self.fuse.is_heard:
            await super().send_packed_command(command, check_health)
            with contextlib.suppress(ResponseError):
                await self.read_response()
        raise Died


class ListLearner:
    """Its weights are the request ids of each step, which a checkpoint keeps beside the ledger."""

    def __init__(self) -> None:
        self.history: History = []
        self.dies_halfway = False

    async def save(self, directory: Path, extra: bytes) -> None:
        with directories.atomic_directory(directory) as partial:
            (partial / "history").write_text(json.dumps(self.history))
            if self.dies_halfway:
                raise Died
            (partial / "state").write_bytes(extra)

    def restore(self, directory: Path) -> bytes:
        self.history = json.loads((directory / "history").read_text())
        return (directory / "state").read_bytes()


class Trainer:
    """One life: from the newest checkpoint until it dies, or the test ends."""

    def __init__(self, redis: ArqRedis, root: Path, *, has_deadlines: bool) -> None:
        checkpoints = Checkpoints(root / "checkpoints", keep=2)
        latest = checkpoints.latest()
        self.learner = ListLearner()
        self.restored = decode_state(self.learner.restore(latest)) if latest else LedgerState()
        self.state = RunState.resumed(self.restored, [])
        self.journal = Journal(root / "journal")
        self.journal.truncate_to(self.restored.journal)
        self.side = TrainerSide(
            redis,
            self.journal,
            restored=self.restored,
            tasks=[f"t{i}" for i in range(5)],
            max_lag_versions=2,
            stragglers="train",
            max_refills=1,
            keep="all",
        )
        deadline_s = 0.0 if has_deadlines else 1e9
        self.deadlines = Deadlines(
            redis, self.side.book, self.side.closer, deadline_s=deadline_s, queue_s=None
        )
        self.checkpoint = CheckpointWriter(
            redis,
            RUN,
            checkpoints,
            self.learner,
            state=self.state,
            ledger=self.side.ledger,
            cursor=lambda: self.side.dispatcher.cursor,
            flush_rollouts=self.side.recorder.flush,
            forget=self.side.reader.forget,
        )

    @property
    def history(self) -> History:
        return self.learner.history

    async def begin(self) -> None:
        await self.side.recovery.restore(self.restored)
        await self.side.recovery.enqueue_missing(GROUP_SIZE, version=len(self.history))
        await self.side.requests.sweep()

    async def ask(self, _: int) -> None:
        steps = len(self.history)
        room = self.side.admission.room(
            begun_steps=steps, published_steps=steps, live_groups=self.side.book.num_live
        )
        await self.side.requests.enqueue_groups(min(room, 2), version=steps)

    async def take_in(self, _: int) -> None:
        await self.side.reader.read(block_ms=1)

    async def close_overdue(self, _: int) -> None:
        await self.deadlines.close_overdue()
        await self.side.requests.withdraw_surplus()

    async def step(self, _: int) -> None:
        groups = self.side.book.take(behind(len(self.history)))
        if groups is None:
            return
        batch, fates = make_batch(
            groups,
            step=len(self.history) + 1,
            lag_of=behind(len(self.history)),
            temperature=1.0,
            kind="leave_one_out",
            withhold_beyond=None,
        )
        self.history.append(list(batch.request_ids))
        for group in groups:
            members = group.members.items()
            self.side.ledger.close_group(
                group, {number: fates[one.head.request_id] for number, one in members}
            )

    async def keep(self, number: int) -> None:
        """The loop's own order, which the test is about; it may die while the learner writes."""
        self.state.step = len(self.history)
        self.learner.dies_halfway = number % 4 == 0
        await self.checkpoint.write()


class World:
    """Everything but the trainer: workers, people, and a stream that delivers twice."""

    def __init__(self, redis: ArqRedis) -> None:
        self.redis = redis
        self.claims: list[Claim] = []
        self.was_requeued = False

    async def work(self, number: int) -> None:
        """Claim a request and answer it."""
        await self.claim(number)
        await self.answer(number)

    async def claim(self, _: int) -> None:
        taken = await queue.take(self.redis, "w", 1)
        self.claims += [one for one in taken if isinstance(one, Claim)]

    async def answer(self, number: int) -> None:
        """Perhaps of a request that was withdrawn meanwhile, or whose group is closed."""
        if self.claims:
            claim = self.claims.pop(number % len(self.claims))
            await finish(self.redis, claim, lambda request: VERDICTS[number % len(VERDICTS)])

    async def copy(self, number: int) -> None:
        heads = await stream.newest_heads(self.redis, RUN, 20)
        if heads:
            head = heads[number % len(heads)].head
            await self.redis.xadd(keys.stream(RUN), {"head": encode(head)})

    async def requeue(self, number: int) -> None:
        dead = sorted(await deadletters.listed(self.redis, RUN))
        if dead:
            self.was_requeued = True
            await deadletters.requeue(self.redis, RUN, dead[number % len(dead)])


WORLD = ("work", "work", "work", "claim", "answer", "copy", "requeue")
TRAINER = ("ask", "take_in", "take_in", "close_overdue", "step", "step", "keep")
Script = list[tuple[str, int]]

actions = st.tuples(st.sampled_from((*WORLD, *TRAINER, "die")), st.integers(0, 47))


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """In memory, for every checkpoint waits for the disk."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as name:
        yield Path(name)


class Story:
    """Lives of a trainer, one after the other, on one Redis."""

    def __init__(self, path: str, root: Path, *, has_deadlines: bool) -> None:
        self.path = path
        self.root = root
        self.has_deadlines = has_deadlines
        self.fuse = Fuse()

    async def tell(self, script: Script) -> None:
        pool = ConnectionPool(connection_class=UnixDomainSocketConnection, path=self.path)
        self.world = World(ArqRedis(pool))
        await self.world.redis.flushdb()
        self.trainer = await self.born()
        try:
            for name, number in script:
                if name in WORLD:
                    await getattr(self.world, name)(number)
                elif name == "die":
                    self.fuse.light(number)
                else:
                    await self.acts(name, number)
            await self.ends(self.trainer)
        finally:
            await self.dies(self.trainer)
            await pool.disconnect()

    async def acts(self, name: str, number: int) -> None:
        try:
            await getattr(self.trainer, name)(number)
            self.the_book_counts_what_is_in_it(self.trainer.side.book)
        except Died:
            await self.dies(self.trainer)
            self.trainer = await self.born()

    def the_book_counts_what_is_in_it(self, book: GroupBook) -> None:
        live = (*book._open.values(), *book._ready.values())
        assert book.num_awaited == sum(group.num_missing for group in book._open.values())
        assert book.held_bytes == sum(group.num_bytes for group in live)
        assert book._live_by_version == Counter(group.enqueued_version for group in live)

    async def dies(self, trainer: Trainer) -> None:
        trainer.journal.close()
        trainer.side.recorder.__exit__(None, None, None)
        await trainer.side.pool.connection_pool.disconnect()

    async def born(self) -> Trainer:
        """It may die while it begins, too."""
        while True:
            pool = ConnectionPool(connection_class=MortalConnection, path=self.path, fuse=self.fuse)
            self.trainer = trainer = Trainer(ArqRedis(pool), self.root, has_deadlines=self.has_deadlines)
            try:
                await self.nothing_is_acknowledged_that_no_checkpoint_holds(trainer)
                await trainer.begin()
            except Died:
                await self.dies(trainer)
            else:
                return trainer

    async def nothing_is_acknowledged_that_no_checkpoint_holds(self, trainer: Trainer) -> None:
        redis = self.world.redis
        if not await redis.exists(keys.stream(RUN)):
            return
        held = {row.request_id for row in read(trainer.journal.directory, EpisodeRow)}
        stored = self.stored_ids()
        (group,) = await redis.xinfo_groups(keys.stream(RUN)) or [{"last-delivered-id": b"0-0"}]
        unsettled = (
            await redis.xpending_range(keys.stream(RUN), stream.GROUP, "-", "+", 10_000) if group else []
        )
        waiting = {row["message_id"].decode() for row in unsettled}
        for delivery in await stream.newest_heads(redis, RUN, 10_000):
            delivered = _order(delivery.entry_id) <= _order(group["last-delivered-id"].decode())
            if delivered and delivery.entry_id not in waiting:
                assert delivery.head.request_id in held
                assert delivery.head.request_id in stored

    def stored_ids(self) -> Counter[str]:
        """How many copies of each rollout the store has."""
        store = RolloutStore(self.root / "rollouts")
        return Counter(one.head.head.request_id for one in store.rollouts(lambda _: True) if not one.fault)

    async def ends(self, trainer: Trainer) -> None:
        """Every worker answers, and the trainer sees to all of it."""
        self.fuse.left = 0
        while self.world.claims:
            await self.world.answer(1)
        for number in range(200):
            await trainer.close_overdue(0)
            await self.world.work(number % 2)
            while await trainer.side.reader.read(block_ms=1):
                pass
            await trainer.side.dispatcher.open_groups(0, version=0)
            await trainer.step(0)
            if not trainer.side.book.num_live and not await queue.open_ids(self.world.redis, RUN):
                break
            if number % 10 == 9:
                await trainer.keep(1)
        await trainer.keep(1)
        await self.the_books_balance(trainer)

    async def the_books_balance(self, trainer: Trainer) -> None:
        redis = self.world.redis
        assert trainer.side.book.num_live == 0
        assert await queue.open_ids(redis, RUN) == []
        assert (await redis.xpending(keys.stream(RUN), stream.GROUP))["pending"] == 0
        assert await stream.unacknowledged_bytes(redis, RUN) == 0
        rows = list(read(trainer.journal.directory, EpisodeRow))
        times = Counter(one for step in trainer.history for one in step)
        assert max(times.values(), default=0) <= 1, "trained twice"
        assert set(times) == {row.request_id for row in rows if row.fate == "trained"}
        if not self.world.was_requeued:
            assert max(Counter(row.request_id for row in rows).values(), default=0) <= 1
        heads = [delivery.head for delivery in await stream.newest_heads(redis, RUN, 10_000)]
        assert self.stored_ids() == Counter({head.request_id for head in heads}), "each is stored once"
        answered = {head.request_id for head in heads if head.reward is not None}
        told = {row.request_id: row.fate for row in rows if row.reward is not None}
        assert set(told) == answered, "every valid answer is accounted for, and by its own row"
        if not self.has_deadlines and not self.world.was_requeued:
            assert "late" not in told.values(), "nobody went on without it"


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence)


ONE_GROUP = [("ask", 0), ("work", 0), ("work", 1), ("work", 0), ("take_in", 0), ("step", 0)]
"""A group with signal comes back and is trained."""


@example(script=[*ONE_GROUP, ("keep", 0)], has_deadlines=False)  # dies while the learner writes
@example(script=[*ONE_GROUP, ("keep", 1), *ONE_GROUP, ("keep", 0)], has_deadlines=False)
# dies before its first acknowledgement
@example(script=[*ONE_GROUP, ("die", 2), ("keep", 1)], has_deadlines=False)
@example(script=[*ONE_GROUP, ("die", 5), ("keep", 1)], has_deadlines=False)  # after Redis heard of it
@settings(
    max_examples=MAX_EXAMPLES,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(script=st.lists(actions, min_size=10, max_size=60), has_deadlines=st.booleans())
def test_whenever_the_trainer_dies_each_answer_is_in_one_step_at_most_and_none_is_lost(
    redis_url: str, script: Script, has_deadlines: bool
) -> None:
    path = redis_url.removeprefix("unix://").partition("?")[0]
    with directory() as root:
        asyncio.run(Story(path, root, has_deadlines=has_deadlines).tell(script))
