"""The trainer's side of queue and stream without a learner, in a process of its own: asks, takes in, and settles each
group as soon as it is whole. What it held is acknowledged every few seconds, as a checkpoint would.
"""

import asyncio
import time
from multiprocessing.connection import Connection
from pathlib import Path

from arq.connections import ArqRedis

from benchmarks import scripted_fleet
from pipeline import connection, stream
from pipeline.request import Limits, Sampling
from trainer.admission import Admission
from trainer.dispatch import Dispatcher, RequestForm, TaskOrder, new_ids
from trainer.groups import GroupBook
from trainer.intake import Intake
from trainer.journal import Journal
from trainer.ledger import Ledger
from trainer.quarantine import Quarantine

RUN_ID = "bench"
GROUP_SIZE = 8
NUM_TASKS = 500
FOREVER = 10**9
CHECKPOINT_EVERY_S = 2.0
READ_BLOCK_MS = 200


class TrainerSide:
    def __init__(self, redis: ArqRedis, journal: Journal) -> None:
        admission = Admission(max_lag_versions=FOREVER, groups_per_step=1, num_steps=FOREVER)
        self._redis = redis
        self._book = GroupBook(admission, min_valid_members=2, stragglers="train")
        self._ledger = Ledger(journal)
        quarantine = Quarantine(journal)
        self.dispatcher = Dispatcher(
            redis,
            RequestForm(run_id=RUN_ID, limits=Limits(), agent_config="", tokenizer="", ids=new_ids()),
            TaskOrder([scripted_fleet.task(f"t{number}") for number in range(NUM_TASKS)], seed=0),
            self._book,
            ledger=self._ledger,
            quarantine=quarantine,
            group_size=GROUP_SIZE,
            sampling=Sampling(),
        )
        self.intake = Intake(
            redis,
            RUN_ID,
            book=self._book,
            ledger=self._ledger,
            quarantine=quarantine,
            vocab_size=scripted_fleet.VOCAB_SIZE,
            max_tokens=8192,
            max_refills=GROUP_SIZE // 2,
            refill=self.dispatcher.refill,
            evaluate=lambda delivery: False,
        )

    async def take_in(self) -> None:
        """For ever."""
        acknowledged_at = time.monotonic()
        while True:
            await self.intake.read(block_ms=READ_BLOCK_MS)
            while groups := self._book.take(lambda version: 0):
                for group in groups:
                    self._ledger.close_group(group, group.fates("trained"))
            if time.monotonic() - acknowledged_at > CHECKPOINT_EVERY_S:
                acknowledged_at = time.monotonic()
                await self._acknowledge()

    async def _acknowledge(self) -> None:
        state = self._ledger.state(step=0, version=0, cursor=self.dispatcher.cursor)
        await stream.acknowledge(self._redis, RUN_ID, list(state.pending))
        self._ledger.acknowledged(state)
        self.intake.forget(state.pending)


def run(parent: Connection, url: str, directory: Path, num_requests: int) -> None:
    """Asks for `num_requests`, says so, then takes in, with a journal in `directory`.

    Answers every message with the CPU seconds used and the number of answers taken in so far.
    """
    asyncio.run(_run(parent, url, directory, num_requests))


async def _run(parent: Connection, url: str, directory: Path, num_requests: int) -> None:
    with Journal(directory) as journal:
        redis = await connection.connect(url)
        side = TrainerSide(redis, journal)
        await side.intake.recover()
        await side.dispatcher.open_groups(-(-num_requests // GROUP_SIZE), version=0)
        parent.send("asked")
        taking_in = asyncio.create_task(side.take_in())
        while not taking_in.done():
            await asyncio.to_thread(parent.recv)
            parent.send((time.process_time(), side.intake.num_arrived))
        await taking_in
