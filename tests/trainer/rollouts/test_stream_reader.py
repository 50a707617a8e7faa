"""Each stream entry is accepted once, whatever breaks in between."""

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from benchmarks.scripted_fleet import work_off
from pipeline import stream
from pipeline.stream import Delivery
from tests.trainer.rollouts.test_intake import side as side
from tests.trainer.trainer_side import RUN, TrainerSide
from trainer.rollouts.intake import StreamReader


class Acceptor:
    """Notes what it is given to record and to accept; breaks when it is told to."""

    def __init__(self) -> None:
        self.recorded: list[str] = []
        self.accepted: list[str] = []
        self.breaks_at = -1

    async def record(self, delivery: Delivery) -> None:
        self.recorded.append(delivery.entry_id)

    async def accept(self, delivery: Delivery) -> None:
        if len(self.accepted) == self.breaks_at:
            self.breaks_at = -1
            raise RedisConnectionError("gone")
        self.accepted.append(delivery.entry_id)


async def test_what_was_delivered_into_an_error_is_accepted_by_the_next_read(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    await work_off(side.pool)
    acceptor = Acceptor()
    reader = StreamReader(side.pool, RUN, acceptor.accept, record=acceptor.record)
    acceptor.breaks_at = 1
    with pytest.raises(RedisConnectionError):
        await reader.read(block_ms=10)
    assert await reader.read(block_ms=10) == 2
    assert await reader.read(block_ms=1) == 0
    entries = [delivery.entry_id for delivery in await stream.newest_heads(side.pool, RUN, 10)]
    assert acceptor.accepted == entries[::-1]
    assert acceptor.recorded == [entries[2], entries[1], entries[1], entries[0]], (
        "recorded before it is accepted"
    )


async def test_what_was_accepted_is_not_accepted_again_by_a_recovery(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    await work_off(side.pool)
    acceptor = Acceptor()
    reader = StreamReader(side.pool, RUN, acceptor.accept, record=acceptor.record)
    assert await reader.read(block_ms=10) == 3
    assert await reader.recover() == 0
    assert await StreamReader(side.pool, RUN, acceptor.accept, record=acceptor.record).recover() == 3, (
        "a new process knows nothing of it"
    )
