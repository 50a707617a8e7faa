"""Sends commands to a container over one attached stream to its first process, with no Docker call per command. Some of them write files.

The first process (first_process.py) takes one command at a time, runs it in a new `bash -c` in the workdir with stdin closed, and reports
its output and status. Only files and background processes carry over from one command to the next. Connections to a port of the container
(connections.py) travel on the same stream.

A process for each written file would cost more than its content, so bash writes the files itself if it can.
"""

import asyncio
import base64
import posixpath
import re
import shlex
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress

from pipeline.errors import SandboxError, TaskBroken
from pipeline.task import File
from workers.sandbox.connections import Connections, ProtocolFactory, why_not
from workers.sandbox.first_process import Capped, Exchange, Frames, HolderExchange, InitFrames, Kind
from workers.sandbox.protocol import CannotServe, CommandResult, LastResult
from workers.sandbox.users import ContainerUser

# The last line of the notes: status, CPU time in nanoseconds, time without a CPU in milliseconds.
LAST_NOTE = re.compile(rb"\nend (-?[0-9]{1,9}) ([0-9]{1,19}) ([0-9]{1,10})\n\Z")
LAST_NOTE_BYTES = 64
KILL = "SIGUSR1"  # makes the first process kill every other
# Time limit for the first process to answer, which it does at once on an idle machine. With hundreds of busy processes beside it, killing a
# fork bomb was seen to take longer than 30 s, and that is not a failure of the sandbox.
KILL_S = 300.0
KILL_AGAIN_S = 1.0
READ_BYTES = 256 * 1024
# First lines from the container: "send" requests the init program; then "init" announces that program, or "bash" the holder.
SEND, INIT = b"send\n", b"init\n"
STDERR = 2  # Docker's number of the container's stderr
NUL_REFUSED = b"bash: a command cannot contain a NUL byte\n"

LONGEST_COMMAND_BYTES = 120 * 1024  # length of a plain command, which leaves room for the words that start it


class ContainerShell:
    """The stream to one container's first process. Commands run one at a time.

    If the caller of a command is cancelled, the command and all it started are killed before the next one runs. Any coroutine that waits
    for something on the stream reads it, one piece at a time, and passes every piece to its recipient. So without connections nothing is
    read while no command runs, and the output of background processes costs nothing.
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
        self._reading = asyncio.Lock()
        self._init: InitFrames | None = None
        self._why_no_init = "the container has not started"
        self._is_built = False
        self._running: Exchange | None = None

    async def meet(self, init: bytes) -> None:
        """Await this once, before all else. Sends `init` if the container requests it, and finds out which protocol to use.

        Raises SandboxError if the container does not come up.
        """
        self._is_built = bool(init)
        async with _answering():
            self._why_no_init = (
                "the image has no head or no chmod" if init else "`make setup` has not compiled it"
            )
            line = await self._first_line()
            if line == SEND:
                self._why_no_init = "it cannot run in the image, which may be for another processor"
                self._writer.write(init)
                line = await self._first_line()
        if line == INIT:
            self._init = InitFrames()

    async def become(self, user: ContainerUser, *, with_home: bool) -> None:
        """Makes `user` run all later commands that are not root's, and sets HOME to its home if `with_home`.

        Raises TaskBroken if the image's bash is the first process, which cannot do that.
        """
        if self._init is None:
            why = (
                f"user: commands of this image run as user {user.id}, and its first process is the image's bash, which cannot "
                f"leave root, because our program is not: {self._why_no_init}. Fix that, or set the task's user to root"
            )
            raise TaskBroken(why) if self._is_built else SandboxError(why)
        await self._ask("user", user.request(with_home=with_home))

    @property
    def busy(self) -> bool:
        """Whether a command is running."""
        return self._running is not None

    async def run(
        self,
        command: str,
        *,
        timeout_s: float,
        keep_bytes: int,
        plain: bool = False,
        as_root: bool = False,
    ) -> CommandResult:
        """Run a command of the container's user, or of root; at `timeout_s` it and all it started are killed.

        A `plain` command is root's, and its bash reads no environment file, imports no function and finds no program in the workdir (the
        original PATH is in TASK_PATH); it may be no longer than one argument of execve. Raises SandboxError if the container is gone.
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
                # Whether the container has ended is read, also while it takes in a long command.
                kind = "plain" if plain else "root" if as_root else "run"
                self._writer.write(answer.message(kind, text))
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
        if self._init is not None and self._init.connections is not None:
            self._init.connections.lose(None)
        started = time.monotonic()
        answer = self._running = self._exchange(keep_bytes, Capped(keep_notes_bytes))
        in_time = True
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(answer.message("last", script.encode()))
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
        answer = await self._ask("clear", b"")
        if answer.survivors:
            raise SandboxError(f"{answer.survivors} processes survived a kill")

    async def _ask(self, kind: Kind, body: bytes) -> Exchange:
        """Sends a request that is answered at once, and returns the answer."""
        answer = self._running = self._exchange(keep_bytes=0)
        async with _answering():
            self._writer.write(answer.message(kind, body))
            await self._end_of(answer)
        self._running = None
        return answer

    @asynccontextmanager
    async def serve(self, port: int, protocol_factory: ProtocolFactory) -> AsyncGenerator[None]:
        """Serves connections until the context exits. Raises CannotServe, and SandboxError if the container is gone."""
        if not 0 < port < 2**16:
            raise ValueError(f"port: {port} is not a port; ports are 1 to 65535")
        if self._init is None:
            raise CannotServe(
                "the container's first process is the image's bash, which carries no connections, because our program is not: "
                f"{self._why_no_init}. Fix that to serve in this image (workers/README.md, process 1)"
            )
        assert self._init.connections is None, "a container serves one port at a time"
        connections = self._init.connections = Connections(self._writer.write, port, protocol_factory)
        reading = asyncio.create_task(self._read_for(connections), name="connections of a container")
        try:
            async with _answering():
                connections.listen()
                error = await connections.listening
            if error:
                raise CannotServe(why_not(port, error))
            yield
        finally:
            try:
                await self._stop(connections)
            finally:
                self._init.connections = None
                reading.cancel()
                await asyncio.wait({reading})

    async def _stop(self, connections: Connections) -> None:
        """Returns when no process in the container can connect any more."""
        if connections.is_over:
            return
        with suppress(SandboxError):  # no process can connect any more if the container is gone
            async with _answering():
                await connections.close()

    async def _read_for(self, connections: Connections) -> None:
        """Reads for connections, whether or not a command runs, until the stream ends."""
        error = SandboxError("the container has ended")
        try:
            while await self._read_next():
                pass
        except SandboxError as why:
            error = why
        connections.lose(error)

    async def close(self) -> None:
        """Closes the stream, after which the first process ends, and the container with it."""
        if self._writer.transport.get_write_buffer_size():
            self._writer.transport.abort()  # nobody reads the bytes that are still in the buffer
        self._writer.close()
        with suppress(OSError):  # the other end may have closed already
            await self._writer.wait_closed()

    async def _first_line(self) -> bytes:
        """Returns one of the first process's first lines."""
        line = b""
        while not line.endswith(b"\n"):
            pieces = await self._arrived()
            if pieces is None:
                raise SandboxError(f"the container ended before its shell was up; it said {line!r}")
            line += b"".join(piece for stream, piece in pieces if stream != STDERR)
        return line

    async def _end_of(self, answer: Exchange) -> int:
        while answer.status is None:
            if not await self._read_next(answer):
                raise SandboxError("the container stopped in the middle of a command")
        return answer.status

    async def _rest_of(self, answer: Exchange) -> None:
        while await self._read_next():
            pass
        answer.flush()

    async def _read_next(self, awaited: Exchange | None = None) -> bool:
        """Passes on what arrives next, unless `awaited` is complete by then; returns False at the end of the stream."""
        async with self._reading:
            if awaited is not None and awaited.status is not None:
                return True
            pieces = await self._arrived()
            for stream, piece in pieces or ():
                self._hand_on(stream, piece)
        return pieces is not None

    def _hand_on(self, stream: int, piece: bytes) -> None:
        if stream == STDERR:
            if self._running is not None:
                self._running.notes.write(piece)
        elif (receiver := self._running or self._init) is not None:
            receiver.feed(piece)

    def _exchange(self, keep_bytes: int, notes: Capped | None = None) -> Exchange:
        if self._init is None:
            return HolderExchange(keep_bytes, notes)
        return self._init.exchange(keep_bytes, notes)

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
        """Kills every process again and again until `end` returns: a signal may overtake the command that it should kill."""
        ending = asyncio.create_task(end, name="end of a container's command")
        try:
            async with _answering():
                await self._kill_all()
                while not (await asyncio.wait({ending}, timeout=KILL_AGAIN_S))[0]:
                    # The container may have ended although its stream has not.
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
    """The command as UTF-8; a lone low surrogate becomes the byte that it escapes, any other surrogate becomes "?"."""
    try:
        return command.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return command.encode("utf-8", "replace")


def writing(files: Sequence[File], workdir: str) -> str:
    """The command that writes `files`, at least one, and creates their directories."""
    paths = [posixpath.join(workdir, file.path) for file in files]
    steps = [f"mkdir -p {shlex.join(dict.fromkeys(posixpath.dirname(path) for path in paths))}"]
    steps += [
        f"{printing(file.content)} >{shlex.quote(path)}" for file, path in zip(files, paths, strict=True)
    ]
    for mode in {file.mode for file in files}:
        of_mode = [path for file, path in zip(files, paths, strict=True) if file.mode == mode]
        steps.append(f"chmod {mode:o} {shlex.join(of_mode)}")
    return " && ".join(steps)


def printing(content: bytes) -> str:
    """The command that prints `content`. Outside ASCII, bash's reading of its command depends on the container's locale."""
    encoded = f"base64 -d <<<'{base64.b64encode(content).decode()}'"
    *lines, last = content.decode("ascii", "replace").split("\0")
    if not content.isascii() or (lines and last):
        return encoded
    plain = f"printf '%s\\0' {shlex.join(lines)}" if lines else f"printf %s {shlex.quote(last)}"
    return plain if len(plain) <= len(encoded) else encoded


def fits(command: str) -> bool:
    """Whether `command` is short enough to be a plain one."""
    return len(command.encode(errors="replace")) <= LONGEST_COMMAND_BYTES
