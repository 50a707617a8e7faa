"""Each rollout that arrives is written to the run's store before its stream entry is acknowledged.

A thread packs and writes, so that the event loop is never blocked. The waiting data is bounded in bytes: above the bound, intake waits for
the disk.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

from arq.connections import ArqRedis

from pipeline import deadletters, stream
from pipeline.judge import Judgement, JudgementHead
from pipeline.kinds import JUDGE
from pipeline.message import MalformedMessage, decode_body
from pipeline.rollout_store.reading import DIRECTORY
from pipeline.rollout_store.record import StoredRollout, TrainedHead
from pipeline.stream import Delivery
from pipeline.trajectory import Trajectory, TrajectoryHead
from trainer.batching.batch import Batch, SampleTokens, num_tokens, trained_tokens
from trainer.learner import directories
from trainer.recipe import RolloutsRecipe
from trainer.records.rollout_writer import RolloutWriter

log = logging.getLogger("swerve.trainer")

Keep = Literal["all", "none"] | float
T = TypeVar("T")

MAX_WAITING_BYTES = 64 * 1024**2  # size of the bodies that wait, still compressed


class RolloutRecorder:
    """Records the rollouts of one run. It is a context manager: leaving it writes what waits and closes the store."""

    def __init__(self, redis: ArqRedis, run_id: str, run_dir: Path, recipe: RolloutsRecipe) -> None:
        """Opens the store. Raises ValueError if it cannot be written, DiskFull if a full disk is the reason."""
        self._redis = redis
        self._run_id = run_id
        self._place = run_dir / DIRECTORY
        self._keep: Keep = recipe.keep
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._waiting_bytes = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts")
        self._writer = None
        if recipe.keep != "none":
            with self._named():
                self._writer = RolloutWriter(self._place, max_bytes=recipe.max_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises ValueError or DiskFull if something could not be written, unless the block raised already."""
        try:
            if self._writer is not None:
                with self._named():
                    self._thread.submit(self._writer.close).result()
        except (OSError, ValueError):
            if error is None:
                raise
        finally:
            self._thread.shutdown()

    async def record(self, delivery: Delivery) -> None:
        """Queues the rollout for writing.

        Repeating it changes nothing. Raises ValueError or DiskFull if an earlier one could not be written.
        """
        head, writer = delivery.head, self._writer
        if writer is None or not is_kept(head, self._keep):
            return
        await self._make_room()
        body = await stream.read_packed_body(self._redis, head.request_id)
        letter = None
        if head.reward is None:
            letter = await deadletters.find(self._redis, head.run_id, head.request_id)
        failures = () if letter is None else letter.failures

        def write() -> None:
            writer.add(
                head,
                StoredRollout(
                    trajectory=None if body is None else _decoded(body, Trajectory), failures=failures
                ),
            )

        self._write_beside(write, len(body or b""))

    async def record_judgement(self, delivery: Delivery[JudgementHead]) -> None:
        """Queues the judgement of a kept rollout for writing, with the text of its votes. It behaves like `record` otherwise."""
        head, writer = delivery.head, self._writer
        if writer is None or not is_group_kept(head.run_id, head.group_id, self._keep):
            return
        await self._make_room()
        body = await stream.read_packed_body(self._redis, head.request_id, JUDGE)
        if body is None:
            return

        def write() -> None:
            judgement = _decoded(body, Judgement)
            if judgement is not None:
                writer.add_judgement(head, judgement)

        self._write_beside(write, len(body))

    def record_trained(self, batch: Batch, tokens: Sequence[SampleTokens], *, version: int) -> None:
        """Queues for writing what a step did with the tokens of the kept rollouts. No step waits for the disk: if too much is waiting
        already, these are left out with a warning.
        """
        writer = self._writer
        if writer is None or not tokens:
            return
        if self._unwritten_bytes > MAX_WAITING_BYTES:
            log.warning("the trained tokens of step %d are not kept: the disk does not keep up", batch.step)
            return
        drawn = {
            sample.request_id
            for sample in batch.samples
            if is_group_kept(self._run_id, sample.group_id, self._keep)
        }
        kept = [one for one in tokens if one.request_id in drawn]

        def write() -> None:
            for request_id, found in trained_tokens(batch, kept, version=version).items():
                head = TrainedHead(
                    rollout_id=request_id, step=batch.step, version=version, num_tokens=num_tokens(found)
                )
                writer.add_trained(head, found)

        self._write_beside(write, sum(one.num_bytes for one in kept))

    async def flush(self) -> None:
        """Returns when everything recorded is on disk. Raises ValueError or DiskFull if it cannot be written."""
        if self._writer is None:
            return
        for written, _ in list(self._waiting):
            await self._carry_out(written)
        await self._carry_out(asyncio.get_running_loop().run_in_executor(self._thread, self._writer.sync))

    def _write_beside(self, write: Callable[[], None], num_bytes: int) -> None:
        """Has the thread write a body of `num_bytes`."""
        self._waiting.append((asyncio.get_running_loop().run_in_executor(self._thread, write), num_bytes))
        self._waiting_bytes += num_bytes

    @property
    def _unwritten_bytes(self) -> int:
        return sum(num_bytes for written, num_bytes in self._waiting if not written.done())

    async def _make_room(self) -> None:
        """Waits until at most MAX_WAITING_BYTES are waiting; raises errors that occurred in the meantime."""
        while self._waiting and (self._waiting[0][0].done() or self._waiting_bytes > MAX_WAITING_BYTES):
            written, num_bytes = self._waiting[0]
            await self._carry_out(written)
            # Another call may have removed it in the meantime
            if self._waiting and self._waiting[0][0] is written:
                self._waiting.popleft()
                self._waiting_bytes -= num_bytes

    async def _carry_out(self, written: asyncio.Future[None]) -> None:
        with self._named():
            await asyncio.shield(written)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Turns an OSError raised in the block, which writes to the store, into a ValueError with the fix; a full disk still raises
        DiskFull.
        """
        try:
            with directories.writing(self._place):
                yield
        except directories.DiskFull:
            raise
        except OSError as error:
            raise ValueError(
                f"{self._place} cannot be written ({error.strerror or error}): correct its permissions, or set "
                'rollouts.keep to "none"'
            ) from error


def is_kept(head: TrajectoryHead, keep: Keep) -> bool:
    """Whether a rollout is kept. If `keep` is a share, a hash of the group's name selects whole groups, and every failure is kept."""
    return (head.reward is None and not isinstance(keep, str)) or is_group_kept(
        head.run_id, head.group_id, keep
    )


def is_group_kept(run_id: str, group_id: str, keep: Keep) -> bool:
    """Whether the rollouts of this group that did not fail are kept."""
    if isinstance(keep, str):
        return keep == "all"
    drawn = hashlib.blake2b(f"{run_id}/{group_id}".encode(), digest_size=8).digest()
    return int.from_bytes(drawn, "big") < keep * 2**64


def _decoded(body: bytes, kind: type[T]) -> T | None:
    """The decoded body; None if no release of ours wrote it: its head is kept nevertheless."""
    try:
        return decode_body(body, kind)
    except MalformedMessage:
        return None
