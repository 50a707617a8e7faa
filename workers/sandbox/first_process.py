"""The first process of a container, and the exchange of one command and its answer with it.

Usually it is a small program of ours (init.c, connections.c). It is sent into each container over the stream, where it replaces the bash
that started there. So nothing is mounted, and it works on remote Docker hosts, too. If it cannot run (an image without `head`, another
processor), that bash does the same work: a script, the "holder", with a protocol of its own. Whatever the protocol, a bounded head and tail
of the output are kept, and Docker's framing of an attached stream is undone here.

The holder reads a command, runs it in a new `bash -c` in the workdir with stdin closed, and reports the status after a nonce that belongs
to this command only, and the time for which the machine had no CPU for it, less exactly than starvation.c. Only files and background
processes carry over from one command to the next.

Because it is process 1, no signal from within the container can kill it, it adopts and reaps orphans, and it can kill every other process
with one `kill -9 -1`, which no fork can outrun. It ends when the stream ends (its worker died) or at the container's deadline.

Code that runs as root in the container may read the holder's memory, with the nonce, and write to its stream. So a container's last script
does not depend on a nonce: the holder itself exits with the script's status, which the kernel reports to Docker, and the kernel kills every
other process together with process 1.
"""

import secrets
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pipeline.errors import SandboxError
from workers.sandbox.connections import CONNECTION_KINDS, MAX_FRAME_BYTES, Connections

_FRAME_HEADER_BYTES = 8  # stream number, three zeros, big-endian length of the payload


class Capped:
    """Keeps the first and the last `keep_bytes` of the written data; holds at most three times that."""

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped_bytes = 0

    def write(self, data: bytes) -> None:
        """Receives all of `data`."""
        room = self._keep_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._keep_bytes:
            self._trim()

    def kept(self) -> tuple[bytes, int]:
        """Head and tail joined, and the number of bytes that are missing between them."""
        self._trim()
        return bytes(self._head + self._tail), self._dropped_bytes

    def _trim(self) -> None:
        excess = len(self._tail) - self._keep_bytes
        if excess > 0:
            del self._tail[:excess]
            self._dropped_bytes += excess


class Frames:
    """Removes Docker's framing of an attached stream, which may arrive in any pieces.

    Format: "Stream format" under "Attach to a container" in the Engine API reference.
    """

    def __init__(self) -> None:
        self._header = bytearray()
        self._stream = 0  # the stream of the current payload
        self._left_bytes = 0  # bytes of that payload that have not arrived yet

    def payloads(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The payload pieces in `data`, in order, each with its stream: 1 is stdout, 2 stderr."""
        start = 0
        while start < len(data):
            if self._left_bytes == 0:
                taken = data[start : start + _FRAME_HEADER_BYTES - len(self._header)]
                self._header += taken
                start += len(taken)
                if len(self._header) == _FRAME_HEADER_BYTES:
                    self._stream = self._header[0]
                    self._left_bytes = int.from_bytes(self._header[4:], "big")
                    self._header.clear()
                continue
            piece = data[start : start + self._left_bytes]
            self._left_bytes -= len(piece)
            start += len(piece)
            yield self._stream, piece


# Exit status of a first process whose stream or time has ended. It is not 0, which a successful last script would return.
LOST = 121

# run: `bash -c` as the container's user. root: the same as root. plain: as root, without environment files and programs of the workdir.
# clear: kill every other process. last: run a script as the user, and end with its status. user: who that is from now on.
Kind = Literal["run", "root", "plain", "clear", "last", "user"]


class Exchange(ABC):
    """One command and its answer.

    `output` is the command's output, and `notes` are the bytes from the side channel. `status` is None until the answer is complete.
    `survivors` counts the processes that were still alive after all were killed. `starved_s` is the time for which the machine had no CPU
    for the command's processes.
    """

    def __init__(self, keep_bytes: int, notes: Capped | None = None) -> None:
        self.output = Capped(keep_bytes)
        self.notes = notes or Capped(0)
        self.status: int | None = None
        self.survivors = 0
        self.starved_s = 0.0

    @abstractmethod
    def message(self, kind: Kind, text: bytes) -> bytes:
        """The bytes to write to the first process's stdin. `text` of a command holds no NUL."""

    @abstractmethod
    def feed(self, piece: bytes) -> None:
        """Processes a piece of the first process's stdout; pieces may be cut anywhere."""

    @abstractmethod
    def flush(self) -> None:
        """Processes the end of the first process's stdout."""


BUILT = Path(sys.prefix, "share", "swerve", "sandbox-init")  # infra/setup/init.sh builds it
_HEADER = struct.Struct("<cI")  # kind, bytes that follow
_END = struct.Struct("<iII")  # status, survivors, milliseconds without a CPU
_KINDS: dict[Kind, bytes] = {
    "run": b"r",
    "root": b"s",
    "plain": b"p",
    "clear": b"c",
    "last": b"l",
    "user": b"u",
}


def built_init() -> bytes:
    """The bytes of the program; empty if it was not built on this machine."""
    return BUILT.read_bytes() if BUILT.is_file() else b""


class InitExchange(Exchange):
    """An answer in the format of init.c."""

    def __init__(self, frames: "InitFrames", keep_bytes: int, notes: Capped | None = None) -> None:
        super().__init__(keep_bytes, notes)
        self._frames = frames

    def message(self, kind: Kind, text: bytes) -> bytes:
        return _HEADER.pack(_KINDS[kind], len(text)) + text

    def feed(self, piece: bytes) -> None:
        self._frames.feed(piece)

    def flush(self) -> None:
        """Does nothing, because output is passed on as it arrives."""


class InitFrames:
    """Parses the stream of one container's first process, in the format of init.c; pieces may be cut anywhere.

    Answers go to the newest exchange, frames about connections to `connections`. After a frame `l` the rest of the stream is the last
    script's output.
    """

    def __init__(self) -> None:
        self.connections: Connections | None = None
        self._answer: InitExchange | None = None
        self._pending = bytearray()  # an incomplete frame, unless it is output
        self._left_bytes = 0  # bytes of the current output frame
        self._raw = False

    def exchange(self, keep_bytes: int, notes: Capped | None = None) -> InitExchange:
        """Starts the exchange that receives the next answer."""
        self._answer = InitExchange(self, keep_bytes, notes)
        return self._answer

    def feed(self, piece: bytes) -> None:
        """Processes a piece of the stream. Raises SandboxError if it is not in the format of the first process."""
        start = 0
        while start < len(piece):
            if self._raw:
                self._write(piece[start:])
                return
            if self._left_bytes:
                taken = piece[start : start + self._left_bytes]
                self._write(taken)
                self._left_bytes -= len(taken)
            else:
                taken = piece[start : start + self._missing_bytes()]
                self._pending += taken
                self._interpret()
            start += len(taken)

    def _write(self, output: bytes) -> None:
        if self._answer is not None:
            self._answer.output.write(output)

    def _missing_bytes(self) -> int:
        if len(self._pending) < _HEADER.size:
            return _HEADER.size - len(self._pending)
        kind, length = _HEADER.unpack_from(self._pending)
        if kind == b"o":  # output is passed on as it arrives
            return 0
        if length > MAX_FRAME_BYTES:
            raise SandboxError(f"the container's first process sent a frame {kind!r} of {length} bytes")
        return _HEADER.size + length - len(self._pending)

    def _interpret(self) -> None:
        if self._missing_bytes():
            return
        kind, length = _HEADER.unpack_from(self._pending)
        body = bytes(self._pending[_HEADER.size :])
        self._pending.clear()
        if kind == b"o":
            self._left_bytes = length
        elif kind == b"l":
            self._raw = True
        elif kind == b"e" and length == _END.size:
            if self._answer is not None:
                self._answer.status, self._answer.survivors, starved_ms = _END.unpack(body)
                self._answer.starved_s = starved_ms / 1000
        elif kind in CONNECTION_KINDS:
            if self.connections is not None:
                self.connections.take(kind, body)
        else:
            raise SandboxError(f"the container's first process sent a frame {kind!r} of {length} bytes")


# Sets `used` to the CPU time of the container in nanoseconds, from its cgroup, without starting a process.
READ_USED = """
if [ -e /sys/fs/cgroup/cpuacct/cpuacct.usage ]; then read -r used </sys/fs/cgroup/cpuacct/cpuacct.usage
else read -r _ used </sys/fs/cgroup/cpu.stat && used+=000; fi
"""
CPU_NANOSECONDS = f'{READ_USED.rstrip()} && echo "$used"\n'
STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# The text that Docker mounts as /etc/hosts where there is a network. Without a network, "localhost" must still have an address for test
# suites, and other names must fail at once. "localhost" is not also ::1, because Docker turns IPv6 off in ordinary containers.
HOSTS = r"127.0.0.1\tlocalhost\n::1\tip6-localhost ip6-loopback\n"

# $1 is the deadline in seconds, $2 the workdir, $3 the size of the init program that will take over, or 0. `set -m` gives each
# command its own process group and does not ignore SIGINT as a plain `&` would. A command too long for one argument of execve is
# passed as a here-string. Descriptor 9 is the side channel: no child inherits it, but /proc/1/fd/9 leads there. Any process in the
# container may send process 1 a signal for which it has a trap. Bash runs a trap in the middle of a `read`, and a `read` in that trap
# changes the delimiter of the one outside; so a trap reads only while bash waits for a command.
HOLDER = (
    r"""
exec 9>&2 2>/dev/null
shopt -s execfail
read -r -d '' names </etc/hosts
[[ $names == *localhost* ]] || printf 'HOSTS' >>/etc/hosts
[[ -s /etc/resolv.conf ]] || printf 'nameserver 127.0.0.1\n' >/etc/resolv.conf
if (($3)) && type -P head chmod >/dev/null; then
  printf 'send\n'
  head -c "$3" >/.swerve-init || exit
  chmod 700 /.swerve-init
  exec /.swerve-init "$1" "$2" "$BASH" 2>&9 9>&-
fi
printf 'bash\n'
set -m
guard() { { sleep $(($1 - SECONDS)) && kill -USR2 1; } </dev/null >/dev/null 9>&- & }
anyone_runnable() {
  local file line
  for file in /proc/[0-9]*/stat; do
    [ "$file" != /proc/1/stat ] && read -r line <"$file" && [[ ${line##*)} == ' R'* ]] && return 0
  done
  return 1
}
kill_all() {
  ((waiting)) && anyone_runnable && was_runnable=1
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
  waiting=1
  while :; do
    wait "$1"
    status=$?
    ((status > 128)) && kill -0 "$1" && continue
    break
  done
  waiting=0
}
begin_looking() {
  was_runnable=0
  read_clocks
}
read_clocks() {
  local idle waiting
  read -r _ _ _ _ idle waiting _ </proc/stat
  READ_USED
  given_ms=$(((idle + waiting) * 10 + used / 10**6)) at_ms=$((${EPOCHREALTIME//[.,]/} / 10**3))
}
count_starved() {
  local given_before_ms=$given_ms began_ms=$at_ms
  read_clocks
  starved_ms=$((at_ms - began_ms - given_ms + given_before_ms))
  ((was_runnable && starved_ms > 0)) || starved_ms=0
}
finish() {
  kill -9 -1
  count_starved
  printf '\nend %d %d %d\n' "$status" "$used" "$starved_ms" >&9
  exit "$status"
}
deadline=$1 workdir=$2 survivors=0 waiting=0 plain_path=STANDARD_PATH
IFS=: read -r -a entries <<<"$PATH"
for entry in "${entries[@]}"; do
  case $entry/ in "$workdir"/*) ;; /*) plain_path+=:$entry ;; esac
done
trap kill_all USR1
trap '((SECONDS < deadline)) || exit LOST' USR2
guard "$deadline"
while :; do
  IFS= read -r -d '' nonce
  status=$?
  ((status > 128)) && continue
  ((status)) && exit LOST
  IFS= read -r -d '' kind && IFS= read -r -d '' command || exit LOST
  begin_looking
  printf '%s:begin\n' "$nonce"
  case $kind in
    run) (cd -- "$workdir" && exec bash -c "$command") </dev/null 2>&1 9>&- & ;;
    plain) (cd -- "$workdir" && TASK_PATH=$PATH PATH=$plain_path exec "$BASH" -p -c "$command") </dev/null 2>&1 9>&- & ;;
    last) (cd -- "$workdir" && exec "$BASH" "$command") </dev/null 2>&1 9>&- & ;;
    clear) kill_all; : & ;;
    long) (cd -- "$workdir" && exec bash /dev/fd/3 3<<<"$command") </dev/null 2>&1 9>&- & ;;
  esac
  wait_for $!
  [ "$kind" = last ] && finish
  count_starved
  printf '%s:end %d %d %d\n' "$nonce" "$status" "$survivors" "$starved_ms"
done
""".replace("HOSTS", HOSTS)
    .replace("READ_USED", READ_USED)
    .replace("STANDARD_PATH", STANDARD_PATH)
    .replace("LOST", str(LOST))
)
_LONGEST_ARGUMENT_BYTES = 128 * 1024 - 1  # Linux's MAX_ARG_STRLEN without the final NUL


class HolderExchange(Exchange):
    """Extracts one command's output from the stream: everything between its begin line and its end line, which both carry its nonce, or the
    end of the stream.
    """

    def __init__(self, keep_bytes: int, notes: Capped | None = None) -> None:
        super().__init__(keep_bytes, notes)
        self._nonce = secrets.token_hex(16).encode()
        self._begin = self._nonce + b":begin\n"
        self._end = self._nonce + b":end "
        self._begun = False
        self._pending = b""  # may be the start of a begin or end line

    def message(self, kind: Kind, text: bytes) -> bytes:
        word = "run" if kind == "root" else kind
        if word == "run" and len(text) > _LONGEST_ARGUMENT_BYTES:
            word = "long"
        return b"\0".join((self._nonce, word.encode(), text, b""))

    def feed(self, piece: bytes) -> None:
        self._pending += piece
        if not self._begun:
            # Output of background processes of earlier commands comes before the begin line.
            before, begin, after = self._pending.partition(self._begin)
            self._begun = bool(begin)
            self._pending = after if begin else before[-len(self._begin) :]
        if self._begun:
            self._feed_body()

    def flush(self) -> None:
        """Counts as output what looked like the start of an end line."""
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
            self.status, self.survivors, starved_ms = (int(number) for number in numbers.split())
            self.starved_s = starved_ms / 1000
