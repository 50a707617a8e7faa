"""A process that reads a run's stream as a trainer does, stores each rollout and acknowledges it: `REDIS_URL RUN_DIR`.

It prints a line after each acknowledgement, and never ends by itself.
"""

import asyncio
import sys
from pathlib import Path

from pipeline import connection, stream
from pipeline.stream import Delivery
from trainer.recipe import RolloutsRecipe
from trainer.rollouts.intake import StreamReader
from trainer.rollouts.recording import RolloutRecorder


async def read_for_ever(redis_url: str, run_dir: Path, run_id: str) -> None:
    redis = await connection.connect(redis_url)
    accepted: list[tuple[str, str]] = []

    async def accept(delivery: Delivery) -> None:
        accepted.append((delivery.entry_id, delivery.head.request_id))

    with RolloutRecorder(redis, run_id, run_dir, RolloutsRecipe()) as recorder:
        reader = StreamReader(redis, run_id, accept, record=recorder.record)
        await reader.recover()
        while True:
            await reader.read(block_ms=20)
            await recorder.flush()
            await stream.acknowledge(redis, run_id, accepted)
            reader.forget(accepted)
            accepted.clear()
            print(flush=True)


if __name__ == "__main__":
    asyncio.run(read_for_ever(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
