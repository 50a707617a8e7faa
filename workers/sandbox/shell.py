"""How commands reach a container: one attached stream to its first process, no engine call per command.

The first process is a bash that runs HOLDER. It reads a command, runs it in a fresh `bash -c` in the workdir
with stdin closed, and reports the status behind a nonce that only this one command has. It holds nothing of a
command's shell, so nothing carries over but files and whatever was left running in the background.

Being process 1 it cannot be signalled to death from within, adopts and reaps orphans, and can kill every
other process of the container with one `kill -9 -1`, which no fork outruns. It ends when the stream ends (its
worker died) or at the container's deadline.

Code that is root in the container may read the holder's memory, a nonce in it, and write to its stream. The
last script of a container therefore needs none: the holder itself ends with the script's status, which the
kernel tells the engine, and with process 1 the kernel ends every other.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from pipeline.errors import SandboxError
from workers.sandbox.command import CommandResult, LastResult
from workers.sandbox.output import Capped, Frames

# Prints the CPU time of the container in nanoseconds, by its cgroup. No process is started for it.
CPU_NANOSECONDS = """
cd /sys/fs/cgroup
if [ -e cpuacct/cpuacct.usage ]; then read -r used <cpuacct/cpuacct.usage && echo "$used"
else read -r _ used <cpu.stat && echo "${used}000"; fi
"""
STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# $1 deadline in seconds, $2 workdir. `set -m` gives each command its own process group and leaves SIGINT
# alone, which a plain `&` would ignore. A command too long for one argument of execve travels as a here-
# string. Descriptor 9 is the side channel: nothing that is started inherits it, but /proc/1/fd/9 leads there.
# Anybody in the container may send process 1 a signal that it has a trap for.
HOLDER = r"""
exec 9>&2 2>/dev/null
set -m
guard() { { sleep $(($1 - SECONDS)) && kill -USR2 1; } </dev/null >/dev/null 9>&- & }
kill_all() {
  for round in {1..200}; do
    kill -9 -1
    processes=(/proc/[0-9]*)
    survivors=$((${#processes[@]} - 1))
    ((survivors)) || break
    sleep 0.02
  done
  guard "$deadline"
}
wait_for() {
  while :; do
    wait "$1"
    status=$?
    ((status > 128)) && kill -0 "$1" && continue
    break
  done
}
finish() {
  printf '\nend %d ' "$status" >&9
  { CPU_NANOSECONDS } >&9
  exit "$status"
}
deadline=$1 workdir=$2 survivors=0 plain_path=STANDARD_PATH
IFS=: read -r -a entries <<<"$PATH"
for entry in "${entries[@]}"; do
  case $entry/ in "$workdir"/*) ;; /*) plain_path+=:$entry ;; esac
done
trap kill_all USR1
trap '((SECONDS < deadline)) || exit' USR2
guard "$deadline"
while :; do
  IFS= read -r -d '' nonce
  status=$?
  ((status > 128)) && continue
  ((status)) && exit
  IFS= read -r -d '' kind && IFS= read -r -d '' command || exit
  printf '%s:begin\n' "$nonce"
  case $kind in
    short) (cd -- "$workdir" && exec bash -c "$command") </dev/null 2>&1 9>&- & ;;
    plain) (cd -- "$workdir" && PATH=$plain_path exec "$BASH" -p -c "$command") </dev/null 2>&1 9>&- & ;;
    last) (cd -- "$workdir" && exec "$BASH" "$command") </dev/null 2>&1 9>&- & ;;
    clear) kill_all; : & ;;
    long) (cd -- "$workdir" && exec bash /dev/fd/3 3<<<"$command") </dev/null 2>&1 9>&- & ;;
  esac
  wait_for $!
  [ "$kind" = last ] && finish
  printf '%s:end %d %d\n' "$nonce" "$status" "$survivors"
done
""".replace("CPU_NANOSECONDS", CPU_NANOSECONDS).replace("STANDARD_PATH", STANDARD_PATH)
SIDE_CHANNEL = "/proc/1/fd/9"
KILL = "SIGUSR1"  # tells the holder to kill everything but itself
KILL_S = 30.0
LONGEST_ARGUMENT_BYTES = 128 * 1024 - 1  # MAX_ARG_STRLEN of Linux, less its closing NUL
READ_BYTES = 256 * 1024
STDERR = 2  # number of the stream that the engine says is the container's stderr
NUL_REFUSED = b"bash: a command cannot contain a NUL byte\n"


class Shell:
    """The stream to one container's holder. Commands run one at a time.

    A command whose caller went away (cancelled) is killed, with all it started, before the next one runs.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        kill_all: Callable[[], Awaitable[None]],
    ) -> None:
        """`kill_all` must send KILL to the holder."""
        self._reader = reader
        self._writer = writer
        self._kill_all = kill_all
        self._frames = Frames()
        self._underway: _Answer | None = None

    @property
    def busy(self) -> bool:
        """Whether a command is under way."""
        return self._underway is not None

    async def run(
        self, command: str, *, timeout_s: float, keep_bytes: int, plain: bool = False
    ) -> CommandResult:
        """The command's end; at `timeout_s` it and all it started is killed.

        A `plain` command's bash reads no environment file, imports no function and finds no program in the
        workdir; it may be no longer than an argument. Raises SandboxError if the container is gone.
        """
        text = _as_bytes(command)
        if b"\0" in text:
            return CommandResult(exit_code=126, output=NUL_REFUSED, dropped_bytes=0, wall_s=0.0)
        if self._underway is not None:
            await self._end_by_force(self._underway)
        started = time.monotonic()
        answer = self._underway = _Answer(keep_bytes)
        kind = b"plain" if plain else b"short" if len(text) <= LONGEST_ARGUMENT_BYTES else b"long"
        exit_code: int | None = None
        try:
            async with asyncio.timeout(timeout_s):
                await self._ask(answer, kind, text)
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

        The output is all that came until every process was gone. The status is the holder's word, which only
        counts if it is also the container's. Raises SandboxError if the holder did not have the last word.
        """
        if self._underway is not None:
            await self._end_by_force(self._underway)
        started = time.monotonic()
        answer = self._underway = _Answer(keep_bytes, Capped(keep_notes_bytes))
        in_time = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._ask(answer, b"last", script.encode())
                await self._rest_of(answer)
        except TimeoutError:
            in_time = False
            async with _patience():
                await self._kill_all()
                await self._rest_of(answer)
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
        """Kills every process but the holder. Raises SandboxError unless the holder sees none left."""
        if self._underway is not None:
            await self._end_by_force(self._underway)
            return
        answer = _Answer(keep_bytes=0)
        async with _patience():
            await self._ask(answer, b"clear")
            await self._end_of(answer)
        if answer.survivors:
            raise SandboxError(f"{answer.survivors} processes survived a kill")

    async def close(self) -> None:
        """Hangs up, at which the holder ends, and the container with it."""
        self._writer.close()
        with suppress(OSError):  # the other end may be gone already
            await self._writer.wait_closed()

    async def _ask(self, answer: "_Answer", kind: bytes, command: bytes = b"") -> None:
        try:
            self._writer.write(b"\0".join((answer.nonce, kind, command, b"")))
            await self._writer.drain()
        except OSError as error:
            raise SandboxError(f"the container's shell cannot be written to: {error}") from error

    async def _end_of(self, answer: "_Answer") -> int:
        while answer.status is None:
            if not await self._read_into(answer):
                raise SandboxError("the container stopped in the middle of a command")
        return answer.status

    async def _rest_of(self, answer: "_Answer") -> None:
        while await self._read_into(answer):
            pass
        answer.flush()

    async def _read_into(self, answer: "_Answer") -> bool:
        """False at the end of the stream."""
        try:
            data = await self._reader.read(READ_BYTES)
        except OSError as error:
            raise SandboxError(f"the container's shell cannot be read: {error}") from error
        for stream, piece in self._frames.payloads(data):
            if stream == STDERR:
                answer.notes.write(piece)
            else:
                answer.feed(piece)
        return bool(data)

    async def _end_by_force(self, answer: "_Answer") -> None:
        async with _patience():
            await self._kill_all()
            await self._end_of(answer)
        self._underway = None
        await self.clear()


@asynccontextmanager
async def _patience() -> AsyncGenerator[None, None]:
    """For what the holder does at once if it lives. Raises SandboxError if it takes longer than KILL_S."""
    try:
        async with asyncio.timeout(KILL_S):
            yield
    except TimeoutError as error:
        raise SandboxError(f"the container's shell did not answer within {KILL_S:.0f} s") from error


class _Answer:
    """Picks one command's output out of the stream: all between its begin and its end line, both of which
    carry its nonce, or the end of the stream. `notes` is what came over the side channel meanwhile.
    """

    def __init__(self, keep_bytes: int, notes: Capped | None = None) -> None:
        self.nonce = secrets.token_hex(16).encode()
        self.output = Capped(keep_bytes)
        self.notes = notes or Capped(0)
        self.status: int | None = None
        self.survivors = 0
        self._begin = self.nonce + b":begin\n"
        self._end = self.nonce + b":end "
        self._begun = False
        self._pending = b""  # not yet told apart from a begin or end line

    def feed(self, piece: bytes) -> None:
        self._pending += piece
        if not self._begun:
            # what comes before was printed by something that an earlier command left running
            before, begin, after = self._pending.partition(self._begin)
            self._begun = bool(begin)
            self._pending = after if begin else before[-len(self._begin) :]
        if self._begun:
            self._feed_body()

    def flush(self) -> None:
        """The stream has ended: what may have begun an end line was output."""
        if self._begun:
            self.output.write(self._pending)
            self._pending = b""

    def _feed_body(self) -> None:
        body, end, line = self._pending.partition(self._end)
        if not end:
            surely = max(len(self._pending) - len(self._end), 0)
            self.output.write(self._pending[:surely])
            self._pending = self._pending[surely:]
            return
        self.output.write(body)
        self._pending = end + line
        numbers, newline, _ = line.partition(b"\n")
        if newline:
            self.status, self.survivors = (int(number) for number in numbers.split())


def _as_bytes(command: str) -> bytes:
    """UTF-8; a lone low surrogate stands for the byte it escapes, any other surrogate becomes "?"."""
    try:
        return command.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return command.encode("utf-8", "replace")
