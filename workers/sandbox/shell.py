"""Sends commands to a container over one attached stream to its first process, with no Docker call per command.

The first process (init.py, or holder.py where that cannot run) takes one command at a time, runs it in a new `bash -c` in the workdir with
stdin closed, and reports its output and status. Only files and background processes carry over from one command to the next.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress

from pipeline.errors import SandboxError
from workers.sandbox.exchange import Exchange
from workers.sandbox.holder import HolderExchange
from workers.sandbox.init import InitExchange
from workers.sandbox.output import Capped, Frames
from workers.sandbox.protocol import CommandResult, LastResult

# How process 1 ends the notes: status, CPU time in nanoseconds, time without a CPU in milliseconds.
LAST_NOTE = re.compile(rb"\nend (-?[0-9]{1,9}) ([0-9]{1,19}) ([0-9]{1,10})\n\Z")
LAST_NOTE_BYTES = 64
KILL = "SIGUSR1"  # makes the first process kill every other
KILL_S = 30.0
KILL_AGAIN_S = 1.0
READ_BYTES = 256 * 1024
# First lines from the container: "send" requests the init program; then "init" announces that program, or "bash" the bash of holder.py.
SEND, INIT = b"send\n", b"init\n"
STDERR = 2  # Docker's number of the container's stderr
NUL_REFUSED = b"bash: a command cannot contain a NUL byte\n"


class ContainerShell:
    """The stream to one container's first process. Commands run one at a time.

    If the caller of a command is cancelled, the command and all it started are killed before the next one runs.
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
        self._running: Exchange | None = None

    async def meet(self, init: bytes) -> None:
        """Await this once, first. Sends `init` if the container requests it, and learns which protocol to speak.

        Raises SandboxError if the container does not come up.
        """
        async with _answering():
            line = await self._first_line()
            if line == SEND:
                await self._write(init)
                line = await self._first_line()
        if line == INIT:
            self._exchange = InitExchange

    @property
    def busy(self) -> bool:
        """Whether a command is running."""
        return self._running is not None

    async def run(
        self, command: str, *, timeout_s: float, keep_bytes: int, plain: bool = False
    ) -> CommandResult:
        """Run a command; at `timeout_s` it and all it started are killed.

        A `plain` command's bash reads no environment file, imports no function and finds no program in the workdir (the original PATH is in
        TASK_PATH); it may be no longer than one argument of execve. Raises SandboxError if the container is gone.
        """
        text = _as_bytes(command)
        if b"\0" in text:
            return CommandResult(exit_code=126, output=NUL_REFUSED, dropped_bytes=0, wall_s=0.0)
        if self._running is not None:
            await self._end_by_force(self._running)
        started = time.monotonic()
        answer = self._running = self._exchange(keep_bytes)
        exit_code: int | None = None
        try:
            async with asyncio.timeout(timeout_s):
                await self._write(answer.message("plain" if plain else "run", text))
                exit_code = await self._end_of(answer)
        except TimeoutError:
            await self._end_by_force(answer)
        self._running = None
        output, dropped_bytes = answer.output.kept()
        return CommandResult(
            exit_code, output, dropped_bytes, time.monotonic() - started, starved_s=answer.starved_s
        )

    async def last(
        self, script: str, *, timeout_s: float, keep_bytes: int, keep_notes_bytes: int
    ) -> LastResult:
        """End the container with `bash script` in the workdir; `script` is a path there.

        The output is everything until every process has ended. The first process reports the status; the caller must compare it with the
        container's. Raises SandboxError if the first process did not end the container itself.
        """
        if self._running is not None:
            await self._end_by_force(self._running)
        started = time.monotonic()
        answer = self._running = self._exchange(keep_bytes, Capped(keep_notes_bytes))
        in_time = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._write(answer.message("last", script.encode()))
                await self._rest_of(answer)
        except TimeoutError:
            in_time = False
            await self._kill_until(self._rest_of(answer))
        self._running = None
        output, dropped_bytes = answer.output.kept()
        notes, _ = answer.notes.kept()
        end = LAST_NOTE.search(notes, max(len(notes) - LAST_NOTE_BYTES, 0))
        if end is None:
            raise SandboxError("the container's first process did not end by itself")
        exit_code, cpu_ns, starved_ms = (int(number) for number in end.groups())
        return LastResult(
            exit_code=exit_code if in_time else None,
            output=output,
            dropped_bytes=dropped_bytes,
            wall_s=time.monotonic() - started,
            starved_s=starved_ms / 1000,
            notes=notes[: end.start()],
            cpu_s=cpu_ns / 1e9,
        )

    async def clear(self) -> None:
        """Kill every process but the first. Raises SandboxError if any survives."""
        if self._running is not None:
            await self._end_by_force(self._running)
            return
        answer = self._exchange(keep_bytes=0)
        async with _answering():
            await self._write(answer.message("clear", b""))
            await self._end_of(answer)
        if answer.survivors:
            raise SandboxError(f"{answer.survivors} processes survived a kill")

    async def close(self) -> None:
        """Close the stream, upon which the first process ends, and the container with it."""
        self._writer.close()
        with suppress(OSError):  # the other end may have closed already
            await self._writer.wait_closed()

    async def _first_line(self) -> bytes:
        """One of the first process's first lines."""
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
        """Feed what arrives next; False at the end of the stream."""
        pieces = await self._arrived()
        for stream, piece in pieces or ():
            if stream == STDERR:
                answer.notes.write(piece)
            else:
                answer.feed(piece)
        return pieces is not None

    async def _arrived(self) -> list[tuple[int, bytes]] | None:
        """The next pieces, each with the number of its stream; None at the end."""
        try:
            data = await self._reader.read(READ_BYTES)
        except OSError as error:
            raise SandboxError(f"the container's shell cannot be read: {error}") from error
        return list(self._frames.payloads(data)) if data else None

    async def _end_by_force(self, answer: Exchange) -> None:
        await self._kill_until(self._end_of(answer))
        self._running = None
        await self.clear()

    async def _kill_until(self, end: Coroutine[None, None, object]) -> None:
        """Kill every process again and again until `end` returns: a signal may overtake the command that it should kill."""
        ending = asyncio.create_task(end)
        try:
            async with _answering():
                await self._kill_all()
                while not (await asyncio.wait({ending}, timeout=KILL_AGAIN_S))[0]:
                    # The container may have ended already, though its stream has not.
                    with suppress(SandboxError):
                        await self._kill_all()
            await ending
        finally:
            ending.cancel()
            await asyncio.wait({ending})


@asynccontextmanager
async def _answering() -> AsyncGenerator[None, None]:
    """Raises SandboxError if the block, which a living first process completes at once, takes longer than KILL_S."""
    try:
        async with asyncio.timeout(KILL_S):
            yield
    except TimeoutError as error:
        raise SandboxError(f"the container's shell did not answer within {KILL_S:.0f} s") from error


def _as_bytes(command: str) -> bytes:
    """UTF-8; a lone low surrogate becomes the byte that it escapes, any other surrogate becomes "?"."""
    try:
        return command.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return command.encode("utf-8", "replace")
