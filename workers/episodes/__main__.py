"""`python -m workers.episodes`: plays the requests that arrive on standard input, and writes their trajectories to standard output.

Other programs start it, such as `python -m trainer.evaluate --local`; pipeline/frames.py has the format. Each request must
name an endpoint: there is no queue, no router and no Redis here, only Docker. Whoever starts it closes its input when all trajectories
have arrived. If the input ends before, as when its parent was killed, and at a signal, it ends its episodes and removes their containers.

Exit status: 0 all requests were played; 2 no Docker host can be used, or the input is not what it should be.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncGenerator
from typing import BinaryIO

from pipeline.errors import describe_error
from pipeline.frames import EpisodeReport, encode_frame, read_frame
from pipeline.request import RolloutRequest
from workers.episodes.playing import EpisodePlayer
from workers.grading.grade import Grader
from workers.policy.endpoint import EndpointPolicies
from workers.sandbox.backend import command_sandboxes
from workers.sandbox.protocol import Misconfigured, Sandboxes
from workers.unqueued.session import session


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m workers.episodes",
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
    """Standard output for frames alone: what others print goes to standard error."""
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return own


class ReportWriter:
    """Writes frames, one after the other. A reader that is slow holds no event loop."""

    def __init__(self, output: BinaryIO) -> None:
        self._output = output
        self._one_at_a_time = asyncio.Lock()

    async def write(self, report: EpisodeReport) -> None:
        """Raises BrokenPipeError if nobody reads any more."""
        async with self._one_at_a_time:
            await asyncio.to_thread(self._write, encode_frame(report))

    def _write(self, frame: bytes) -> None:
        self._output.write(frame)
        self._output.flush()


async def _serve(sandboxes: Sandboxes, writer: ReportWriter) -> None:
    """Raises ValueError if no sandbox can be opened, MalformedMessage for input that is none, Misconfigured."""
    async with session(sandboxes) as outage:
        if outage:
            raise ValueError(outage)
        async with EndpointPolicies() as policies, _requests() as requests:
            worker = f"episodes/{os.getpid()}"
            player = EpisodePlayer(policies, sandboxes, Grader(sandboxes), worker, writer.write)
            await _play_all(player, requests, writer)


async def _play_all(player: EpisodePlayer, requests: asyncio.StreamReader, writer: ReportWriter) -> None:
    """Until the end of the input; what still runs then is cancelled."""
    running = set[asyncio.Task[None]]()

    async def play(request: RolloutRequest) -> None:
        trajectory = await player.play(request)
        await writer.write(EpisodeReport(request_id=request.id, trajectory=trajectory))

    try:
        while (request := await read_frame(requests, RolloutRequest)) is not None:
            task = asyncio.create_task(play(request))
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
