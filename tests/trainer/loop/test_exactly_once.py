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
from typing import Any, Self, cast

import pytest
from arq.connections import ArqRedis
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from redis.asyncio import ConnectionPool, UnixDomainSocketConnection

from pipeline import keys, queue, stream
from pipeline.journal.reading import read
from pipeline.journal.rows import EpisodeRow, JudgementRow
from pipeline.kinds import JUDGE, KINDS
from pipeline.rollout_store.reading import RolloutStore
from tests.pipeline.judging import judge_all
from tests.trainer.loop.mortal import Died, Fuse, MortalConnection
from tests.trainer.loop.world import WORLD, World
from tests.trainer.trainer_side import RUN, TrainerSide
from tests.trainer.trajectories import behind
from trainer.batching.collate import make_batch
from trainer.learner import directories
from trainer.loop.checkpoints import Checkpoints, CheckpointWriter
from trainer.loop.learner_thread import LearnerThread
from trainer.loop.state import RunState
from trainer.recipe import JudgeRecipe
from trainer.records.journal_writer import Journal
from trainer.rollouts.closing import Deadlines
from trainer.rollouts.groups import GroupBook
from trainer.rollouts.ledger import LedgerState, decode_state

MAX_EXAMPLES = 25
History = list[list[str]]  # request ids of each step


class ListLearner:
    """Its weights are the request ids of each step, which a checkpoint keeps beside the ledger."""

    def __init__(self) -> None:
        self.history: History = []
        self.scores: list[dict[str, dict[int, float] | None]] = []  # of each step, by request id
        self.dies_halfway = False
        self.is_save_written = False

    @property
    def here(self) -> Self:
        return self

    async def call(self, name: str, *arguments: Any) -> None:
        getattr(self, name)(*arguments)

    def begin_save(self, directory: Path, extra: bytes) -> None:
        self.begun, self.fixed = directory, (json.dumps([self.history, self.scores]), extra)

    def finish_save(self) -> None:
        history, extra = self.fixed
        with directories.atomic_directory(self.begun) as partial:
            (partial / "history").write_text(history)
            if self.dies_halfway:
                raise Died
            (partial / "state").write_bytes(extra)

    def restore(self, directory: Path) -> bytes:
        self.history, self.scores = json.loads((directory / "history").read_text())
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
            judge=JudgeRecipe(method="rule", name="commands", wait_s=0.0 if has_deadlines else 1e9),
        )
        deadline_s = 0.0 if has_deadlines else 1e9
        self.deadlines = Deadlines(
            redis, self.side.book, self.side.closer, deadline_s=lambda cursor: deadline_s, queue_s=None
        )
        self.checkpoint = CheckpointWriter(
            checkpoints,
            cast(LearnerThread, self.learner),
            self.state,
            self.side.books,
            self.side.streams,
            self.side.recorder,
        )

    @property
    def history(self) -> History:
        return self.learner.history

    async def begin(self) -> None:
        await self.side.recovery.restore(self.restored)
        await self.side.recovery.enqueue_missing(version=len(self.history))
        await self.side.requests.sweep()
        await self.side.judging.requests.sweep()

    async def ask(self, _: int) -> None:
        steps = len(self.history)
        room = self.side.admission.room(
            begun_steps=steps, served_steps=steps, live_groups=self.side.book.num_live
        )
        await self.side.requests.enqueue_groups(min(room, 2), version=steps)

    async def take_in(self, _: int) -> None:
        await self.side.streams.read(block_ms=1)

    async def tend(self, _: int) -> None:
        """Groups wait for judgements, for ever unless there are deadlines."""
        await self.side.judging.tend()

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
        members = [one for group in groups for one in group.members.values()]
        trained = set(batch.request_ids)
        self.learner.scores.append(
            {
                one.head.request_id: dict(one.scores) if one.scores is not None else None
                for one in members
                if one.head.request_id in trained
            }
        )
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

    async def begin_keeping(self, _: int) -> None:
        """A checkpoint of now, which other actions may follow before it is finished."""
        self.state.step = len(self.history)
        await self.checkpoint.begin()

    async def finish_keeping(self, number: int) -> None:
        self.learner.dies_halfway = number % 4 == 0
        await self.checkpoint.finish()


TRAINER = (
    *("ask", "take_in", "take_in", "tend", "close_overdue", "step", "step"),
    *("keep", "begin_keeping", "finish_keeping", "finish_keeping"),
)
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
            await judge_all(self.world.redis, 0.5, None)
            while await trainer.side.streams.read(block_ms=1):
                pass
            await trainer.tend(0)
            await trainer.side.dispatcher.open_groups(0, version=0)
            await trainer.step(0)
            still_open = [await queue.open_ids(self.world.redis, RUN, kind) for kind in KINDS]
            if not trainer.side.book.num_live and not any(still_open):
                break
            if number % 10 == 9:
                await trainer.keep(1)
        await trainer.keep(1)
        await self.the_books_balance(trainer)
        await self.the_judgements_balance(trainer)

    async def the_judgements_balance(self, trainer: Trainer) -> None:
        """Each trajectory is judged once at most, and what was said of it is accounted for once."""
        redis = self.world.redis
        assert await queue.open_ids(redis, RUN, JUDGE) == []
        assert (await redis.xpending(keys.stream(RUN, JUDGE), stream.GROUP))["pending"] == 0
        assert await stream.unacknowledged_bytes(redis, RUN, JUDGE) == 0
        rows = {row.rollout_id: row for row in read(trainer.journal.directory, JudgementRow)}
        assert len(rows) == len(list(read(trainer.journal.directory, JudgementRow)))
        judged = {
            delivery.head.rollout_id for delivery in await stream.newest_heads(redis, RUN, 10_000, JUDGE)
        }
        assert judged <= rows.keys()
        assert {name for name, row in rows.items() if row.scores} <= judged
        trained = {one for step in trainer.history for one in step}
        if not self.has_deadlines:
            told = {name: rows[name].fate for name in trained}
            assert set(told.values()) <= {"joined"}, "every step had the judgements that it waited for"
        seen = {name for scores in trainer.learner.scores for name, one in scores.items() if one is not None}
        assert {name for name, row in rows.items() if row.fate == "joined"} & trained == seen

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


ONE_GROUP = [
    *(("ask", 0), ("work", 0), ("work", 1), ("work", 0), ("take_in", 0), ("tend", 0)),
    *(("judge", 0), ("judge", 0), ("judge", 0), ("take_in", 0), ("tend", 0), ("step", 0)),
]
"""A group with signal comes back, is judged and trained."""


@pytest.mark.slow
@example(script=[*ONE_GROUP, ("keep", 0)], has_deadlines=False)  # dies while the learner writes
@example(script=[*ONE_GROUP, ("keep", 1), *ONE_GROUP, ("keep", 0)], has_deadlines=False)
# dies with a checkpoint under way, and takes a step while one is
@example(script=[*ONE_GROUP, ("begin_keeping", 1), *ONE_GROUP, ("finish_keeping", 0)], has_deadlines=False)
@example(script=[*ONE_GROUP, ("begin_keeping", 1), *ONE_GROUP, ("finish_keeping", 1)], has_deadlines=False)
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
