"""How commands reach a container: one attached stream to its first process, no engine call per command.

The first process (init.py, or holder.py where that cannot run) takes one command at a time, runs it in a fresh
`bash -c` in the workdir with stdin closed, and tells its output and status. Nothing carries over but files and
whatever was left running in the background.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress

from pipeline.errors import SandboxError
from workers.sandbox.exchange import Exchange
from workers.sandbox.holder import HolderExchange
from workers.sandbox.init import InitExchange
from workers.sandbox.output import Capped, Frames
from workers.sandbox.protocol import CommandResult, LastResult

SIDE_CHANNEL = "/proc/1/fd/9"
KILL = "SIGUSR1"  # tells the first process to kill every other
KILL_S = 30.0
KILL_AGAIN_S = 1.0
READ_BYTES = 256 * 1024
SEND, INIT = (
    b"send\n",
    b"init\n",
)  # what the first process says of itself; holder.py's bash, which stays: "bash"
STDERR = 2  # number of the stream that the engine says is the container's stderr
NUL_REFUSED = b"bash: a command cannot contain a NUL byte\n"


class ContainerShell:
    """The stream to one container's first process. Commands run one at a time.

    A command whose caller went away (cancelled) is killed, with all it started, before the next one runs.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        kill_all: Callable[[], Awaitable[None]],
    ) -> None:
        """`kill_all` must send KILL to the first process."""
        self._reader = reader
        self._writer = writer
        self._kill_all = kill_all
        self._frames = Frames()
        self._exchange: type[Exchange] = HolderExchange
        self._underway: Exchange | None = None

    async def meet(self, init: bytes) -> None:
        """To be awaited once, first. `init` is sent if the container asks for it, and spoken to if it runs.

        Raises SandboxError if the container does not come up.
        """
        async with _patience():
            word = await self._word()
            if word == SEND:
                await self._write(init)
                word = await self._word()
        if word == INIT:
            self._exchange = InitExchange

    @property
    def busy(self) -> bool:
        """Whether a command is under way."""
        return self._underway is not None

    async def run(
        self, command: str, *, timeout_s: float, keep_bytes: int, plain: bool = False
    ) -> CommandResult:
        """The command's end; at `timeout_s` it and all it started is killed.

        A `plain` command's bash reads no environment file, imports no function and finds no program in the
        workdir (the PATH as it was is in TASK_PATH); it may be no longer than an argument. Raises SandboxError if the container is gone.
        """
        text = _as_bytes(command)
        if b"\0" in text:
            return CommandResult(exit_code=126, output=NUL_REFUSED, dropped_bytes=0, wall_s=0.0)
        if self._underway is not None:
            await self._end_by_force(self._underway)
        started = time.monotonic()
        answer = self._underway = self._exchange(keep_bytes)
        exit_code: int | None = None
        try:
            async with asyncio.timeout(timeout_s):
                await self._write(answer.question("plain" if plain else "run", text))
                exit_code = await self._end_of(answer)
        except TimeoutError:
            await self._end_by_force(answer)
        self._underway = None
        output, dropped_bytes = answer.output.kept()
        return CommandResult(exit_code, output, dropped_bytes, time.monotonic() - started)

    async def last(
        self, script: str, *, timeout_s: float, keep_bytes: int, keep_notes_bytes: int
    ) -> LastResult:
        """Ends the container with `bash script` in the workdir; `script` is a path there.

        The output is all that came until every process was gone. The status is the first process's word, which
        only counts if it is also the container's. Raises SandboxError if that did not have the last word.
        """
        if self._underway is not None:
            await self._end_by_force(self._underway)
        started = time.monotonic()
        answer = self._underway = self._exchange(keep_bytes, Capped(keep_notes_bytes))
        in_time = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._write(answer.question("last", script.encode()))
                await self._rest_of(answer)
        except TimeoutError:
            in_time = False
            await self._kill_until(self._rest_of(answer))
        self._underway = None
        output, dropped_bytes = answer.output.kept()
        notes, end, numbers = answer.notes.kept()[0].rpartition(b"\nend ")
        try:
            exit_code, cpu_ns = (int(number) for number in numbers.split())
        except ValueError as error:
            raise SandboxError("the container was ended from outside") from error
        return LastResult(
            exit_code=exit_code if in_time else None,
            output=output,
            dropped_bytes=dropped_bytes,
            wall_s=time.monotonic() - started,
            notes=notes if end else b"",
            cpu_s=cpu_ns / 1e9,
        )

    async def clear(self) -> None:
        """Kills every process but the first. Raises SandboxError unless that sees none left."""
        if self._underway is not None:
            await self._end_by_force(self._underway)
            return
        answer = self._exchange(keep_bytes=0)
        async with _patience():
            await self._write(answer.question("clear", b""))
            await self._end_of(answer)
        if answer.survivors:
            raise SandboxError(f"{answer.survivors} processes survived a kill")

    async def close(self) -> None:
        """Hangs up, at which the first process ends, and the container with it."""
        self._writer.close()
        with suppress(OSError):  # the other end may be gone already
            await self._writer.wait_closed()

    async def _word(self) -> bytes:
        """A line that the first process says of itself."""
        line = b""
        while not line.endswith(b"\n"):
            pieces = await self._arrived()
            if pieces is None:
                raise SandboxError(f"the container ended before its shell was up; it said {line!r}")
            line += b"".join(piece for stream, piece in pieces if stream != STDERR)
        return line

    async def _write(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise SandboxError(f"the container's shell cannot be written to: {error}") from error

    async def _end_of(self, answer: Exchange) -> int:
        while answer.status is None:
            if not await self._read_into(answer):
                raise SandboxError("the container stopped in the middle of a command")
        return answer.status

    async def _rest_of(self, answer: Exchange) -> None:
        while await self._read_into(answer):
            pass
        answer.flush()

    async def _read_into(self, answer: Exchange) -> bool:
        """False at the end of the stream."""
        pieces = await self._arrived()
        for stream, piece in pieces or ():
            if stream == STDERR:
                answer.notes.write(piece)
            else:
                answer.feed(piece)
        return pieces is not None

    async def _arrived(self) -> list[tuple[int, bytes]] | None:
        """Pieces, each with the number of its stream, or None at the end."""
        try:
            data = await self._reader.read(READ_BYTES)
        except OSError as error:
            raise SandboxError(f"the container's shell cannot be read: {error}") from error
        return list(self._frames.payloads(data)) if data else None

    async def _end_by_force(self, answer: Exchange) -> None:
        await self._kill_until(self._end_of(answer))
        self._underway = None
        await self.clear()

    async def _kill_until(self, end: Coroutine[None, None, object]) -> None:
        """Kills all there is, again and again: a signal may overtake the question that it is to end."""
        ending = asyncio.create_task(end)
        try:
            async with _patience():
                await self._kill_all()
                while not (await asyncio.wait({ending}, timeout=KILL_AGAIN_S))[0]:
                    with suppress(SandboxError):  # it may have ended just now, and its stream has not
                        await self._kill_all()
            await ending
        finally:
            ending.cancel()
            await asyncio.wait({ending})


@asynccontextmanager
async def _patience() -> AsyncGenerator[None, None]:
    """For what the first process does at once if it lives. Raises SandboxError if it takes longer than KILL_S."""
    try:
        async with asyncio.timeout(KILL_S):
            yield
    except TimeoutError as error:
        raise SandboxError(f"the container's shell did not answer within {KILL_S:.0f} s") from error


def _as_bytes(command: str) -> bytes:
    """UTF-8; a lone low surrogate stands for the byte it escapes, any other surrogate becomes "?"."""
    try:
        return command.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return command.encode("utf-8", "replace")
