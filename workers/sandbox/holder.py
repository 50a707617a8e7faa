"""The first process of a container where init.py's cannot run: a bash, and how it is spoken to.

It reads a command, runs it in a fresh `bash -c` in the workdir with stdin closed, and reports the status behind a
nonce that only this one command has. It holds nothing of a command's shell, so nothing carries over but files
and whatever was left running in the background.

Being process 1 it cannot be signalled to death from within, adopts and reaps orphans, and can kill every
other process of the container with one `kill -9 -1`, which no fork outruns. It ends when the stream ends (its
worker died) or at the container's deadline.

Code that is root in the container may read this holder's memory, a nonce in it, and write to its stream. The
last script of a container therefore needs none: the holder itself ends with the script's status, which the
kernel tells the engine, and with process 1 the kernel ends every other.
"""

import secrets

from workers.sandbox.exchange import Exchange, Kind
from workers.sandbox.output import Capped

# Prints the CPU time of the container in nanoseconds, by its cgroup. No process is started for it.
CPU_NANOSECONDS = """
cd /sys/fs/cgroup
if [ -e cpuacct/cpuacct.usage ]; then read -r used <cpuacct/cpuacct.usage && echo "$used"
else read -r _ used <cpu.stat && echo "${used}000"; fi
"""
STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# What Docker mounts where there is a network: a test suite's "localhost" must have an address without one, and a name
# that has none must be refused at once. Not also ::1, which does not answer in an ordinary container, for Docker turns
# IPv6 off there.
HOSTS = r"127.0.0.1\tlocalhost\n::1\tip6-localhost ip6-loopback\n"

# $1 deadline in seconds, $2 workdir, $3 size of the init that is to take over, or 0. `set -m` gives each command
# its own process group and leaves SIGINT alone, which a plain `&` would ignore. A command too long for one
# argument of execve travels as a here-string. Descriptor 9 is the side channel: nothing that is started
# inherits it, but /proc/1/fd/9 leads there. Anybody in the container may send process 1 a signal that it has a
# trap for.
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
    run) (cd -- "$workdir" && exec bash -c "$command") </dev/null 2>&1 9>&- & ;;
    plain) (cd -- "$workdir" && TASK_PATH=$PATH PATH=$plain_path exec "$BASH" -p -c "$command") </dev/null 2>&1 9>&- & ;;
    last) (cd -- "$workdir" && exec "$BASH" "$command") </dev/null 2>&1 9>&- & ;;
    clear) kill_all; : & ;;
    long) (cd -- "$workdir" && exec bash /dev/fd/3 3<<<"$command") </dev/null 2>&1 9>&- & ;;
  esac
  wait_for $!
  [ "$kind" = last ] && finish
  printf '%s:end %d %d\n' "$nonce" "$status" "$survivors"
done
""".replace("HOSTS", HOSTS)
    .replace("CPU_NANOSECONDS", CPU_NANOSECONDS)
    .replace("STANDARD_PATH", STANDARD_PATH)
)
LONGEST_ARGUMENT_BYTES = 128 * 1024 - 1  # MAX_ARG_STRLEN of Linux, less its closing NUL


class HolderExchange(Exchange):
    """Picks one command's output out of the stream: all between its begin and its end line, both of which
    carry its nonce, or the end of the stream.
    """

    def __init__(self, keep_bytes: int, notes: Capped | None = None) -> None:
        super().__init__(keep_bytes, notes)
        self._nonce = secrets.token_hex(16).encode()
        self._begin = self._nonce + b":begin\n"
        self._end = self._nonce + b":end "
        self._begun = False
        self._pending = b""  # not yet told apart from a begin or end line

    def question(self, kind: Kind, text: bytes) -> bytes:
        word = "long" if kind == "run" and len(text) > LONGEST_ARGUMENT_BYTES else kind
        return b"\0".join((self._nonce, word.encode(), text, b""))

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
        """What may have begun an end line was output."""
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
