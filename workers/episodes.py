"""`python -m workers.episodes`: plays the requests that arrive on standard input, and writes their trajectories to standard output.

Other programs start it, such as `python -m trainer.evaluate --local`; pipeline/frames.py has the format. Each request must name an
endpoint: there is no queue, no router and no Redis here, only Docker. The program that starts it closes its input when all trajectories
have arrived. If the input ends before, as when its parent was killed, and at a signal, it ends its episodes and removes their containers.

Exit status: 0 all requests were played; 2 no Docker host can be used, or the input is not what it should be.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import BinaryIO

from pipeline.chat import storable
from pipeline.commandline import program
from pipeline.errors import FailureClass, class_of, describe_error
from pipeline.frames import EpisodeReport, encode_frame, read_frame, readable_frame
from pipeline.request import Claim, EpisodeStatus, RolloutRequest
from pipeline.screen import visible_line
from pipeline.trajectory import Failed, Trajectory, failed_trajectory, failure_of
from workers.grading.grade import Grader
from workers.policy.endpoint import EndpointPolicies
from workers.rollout import PatchGrader, Policies, run_rollout
from workers.sandbox.backend import command_sandboxes
from workers.sandbox.protocol import Misconfigured, Sandboxes
from workers.unqueued import session

log = logging.getLogger("swerve.worker")

REPORT_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class EpisodePlayer:
    """Plays and grades one request after the other, or several at the same time."""

    policies: Policies
    sandboxes: Sandboxes
    grader: PatchGrader
    worker: str
    report: Callable[[EpisodeReport], Awaitable[None]]

    async def frame(self, request: RolloutRequest) -> bytes:
        """The report with the trajectory of `request`, encoded. It always comes, because the caller waits for it."""
        started_at = time.time()
        try:
            return readable_frame(EpisodeReport(request_id=request.id, trajectory=await self.play(request)))
        except Exception as error:
            log.exception("%s: its trajectory could not be reported", request.id)
            trajectory = failed_trajectory(
                self._claim(request, attempt=1, at=started_at), _failure_of(error), started_at
            )
            return encode_frame(EpisodeReport(request_id=request.id, trajectory=trajectory))

    async def play(self, request: RolloutRequest) -> Trajectory:
        """The trajectory of `request`; a failed one once its budget is spent."""
        spent = Counter[FailureClass]()
        while True:
            trajectory = await self._attempt(request, attempt=spent.total() + 1)
            failed = failure_of(trajectory)
            if failed is None:
                return trajectory
            kind = class_of(failed.boundary, transient=failed.transient)
            spent[kind] += 1
            budget = request.retries.of(kind)
            log.warning("%s failed at %s: %s", request.id, failed.boundary, visible_line(failed.message))
            if spent[kind] >= budget.tries:
                return trajectory
            await asyncio.sleep(budget.wait_s(spent[kind]))

    async def _attempt(self, request: RolloutRequest, *, attempt: int) -> Trajectory:
        started_at = time.time()
        claim = self._claim(request, attempt=attempt, at=started_at)
        status = EpisodeStatus()
        async with self._reported(request.id, status):
            try:
                return await run_rollout(
                    claim, status, policies=self.policies, sandboxes=self.sandboxes, grader=self.grader
                )
            except Exception as error:
                log.exception("%s attempt %d: a bug in Swerve", request.id, attempt)
                return failed_trajectory(claim, _failure_of(error), started_at)

    def _claim(self, request: RolloutRequest, *, attempt: int, at: float) -> Claim:
        return Claim(request=request, attempt=attempt, worker=self.worker, claimed_at=at)

    @contextlib.asynccontextmanager
    async def _reported(self, request_id: str, status: EpisodeStatus) -> AsyncGenerator[None]:
        """Reports the episode's status during the block, whenever it has changed."""

        async def watch() -> None:
            known = ("", -1)
            while True:
                if (status.phase, status.turn) != known:
                    known = (status.phase, status.turn)
                    await self.report(EpisodeReport(request_id=request_id, phase=known[0], turn=known[1]))
                await asyncio.sleep(REPORT_EVERY_S)

        watching = asyncio.create_task(watch(), name=f"progress of {request_id}")
        try:
            yield
        finally:
            watching.cancel()


def _failure_of(error: Exception) -> Failed:
    """The failure for a bug in our code."""
    return Failed(boundary="worker", message=storable(f"{type(error).__name__}: {error}"), transient=True)


def main() -> int:
    argparse.ArgumentParser(
        prog=program("workers.episodes"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    writer = ReportWriter(_own_output())
    try:
        asyncio.run(_serve(command_sandboxes(fleet=f"episodes-{os.getpid()}"), writer))
    except (ValueError, Misconfigured) as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    return 0


def _own_output() -> BinaryIO:
    """Standard output, for frames only: other output of this process goes to standard error."""
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return own


class ReportWriter:
    """Writes frames, one after the other. A slow reader does not block the event loop."""

    def __init__(self, output: BinaryIO) -> None:
        self._output = output
        self._one_at_a_time = asyncio.Lock()

    async def write(self, report: EpisodeReport) -> None:
        """Raises BrokenPipeError if nobody reads any more."""
        await self.write_frame(encode_frame(report))

    async def write_frame(self, frame: bytes) -> None:
        """Raises BrokenPipeError if nobody reads any more."""
        async with self._one_at_a_time:
            await asyncio.to_thread(self._write, frame)

    def _write(self, frame: bytes) -> None:
        self._output.write(frame)
        self._output.flush()


async def _serve(sandboxes: Sandboxes, writer: ReportWriter) -> None:
    """Serves requests. Raises ValueError if no sandbox can be opened, MalformedMessage for invalid input, and Misconfigured."""
    async with session(sandboxes) as outage:
        if outage:
            raise ValueError(outage)
        async with EndpointPolicies() as policies, _requests() as requests:
            worker = f"episodes/{os.getpid()}"
            player = EpisodePlayer(policies, sandboxes, Grader(sandboxes), worker, writer.write)
            await _play_all(player, requests, writer)


async def _play_all(player: EpisodePlayer, requests: asyncio.StreamReader, writer: ReportWriter) -> None:
    """Plays requests until the end of the input; episodes that still run then are cancelled."""
    running = set[asyncio.Task[None]]()

    async def play(request: RolloutRequest) -> None:
        await writer.write_frame(await player.frame(request))

    try:
        while (request := await read_frame(requests, RolloutRequest)) is not None:
            task = asyncio.create_task(play(request), name=f"episode {request.id}")
            running.add(task)
            task.add_done_callback(running.discard)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@contextlib.asynccontextmanager
async def _requests() -> AsyncGenerator[asyncio.StreamReader]:
    """Standard input as a stream."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        yield reader
    finally:
        transport.close()


if __name__ == "__main__":
    sys.exit(main())
