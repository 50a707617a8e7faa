"""Which processes survive a command that was stopped at its time limit, for every way of detaching that a shell knows.

They are counted from outside: the processes in the container's cgroup whose name is the mark of this one command.
"""

import asyncio
import json
import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu_meter import cgroup
from benchmarks.mini_swe_agent import RIVAL
from benchmarks.report import Comparison
from workers.sandbox.protocol import Sandbox

TIMEOUT_S = 1  # the rival takes whole seconds
WHAT = "commands that are stopped at their time limit, with daemons, new sessions and double forks"

# MARK becomes the name of each process that tries to survive.
ESCAPES = r"""
mark() { exec -a MARK sleep 1000; }
mark &
(trap '' TERM HUP INT; mark) &
nohup bash -c 'exec -a MARK sleep 1000' >/dev/null 2>&1 &
setsid bash -c 'exec -a MARK sleep 1000' >/dev/null 2>&1 &
setsid bash -c '(exec -a MARK sleep 1000) & (exec -a MARK sleep 1000) & wait' &
((mark &) &)
(setsid bash -c '(exec -a MARK sleep 1000 >/dev/null 2>&1 &) ; exit' &)
disown -a
python3 - <<'END'
import os
if not os.fork():
    os.setsid()
    os.environ.clear()
    if not os.fork():
        for stream in range(3):
            os.close(stream)
        os.execv("/bin/sleep", ["MARK", "1000"])
    os._exit(0)
END
mark
"""


async def compared_survivors(
    sandboxes: Sequence[Sandbox], rivals: Sequence[Any], *, num_ours: int, num_rival: int
) -> Comparison:
    """Surviving processes per run, on average."""
    ours = await _in_turns([_ours(sandbox) for sandbox in sandboxes], num_ours)
    theirs = await _in_turns([_theirs(rival) for rival in rivals], num_rival)
    failed = sum(count > 0 for count in ours)
    return Comparison(
        name="steps",
        ours=sum(ours) / len(ours),
        rival=sum(theirs) / len(theirs),
        rival_name=RIVAL,
        unit=f"processes that survive a timed-out command, mean; {failed} of {len(ours)} runs of ours left any, "
        f"{sum(count > 0 for count in theirs)} of {len(theirs)} of the rival's",
    )


async def _in_turns(places: Sequence[Any], num_runs: int) -> list[int]:
    """Each place has one run at a time."""
    remaining = iter(range(num_runs))

    async def turns(place: Any) -> list[int]:
        return [await place() for _ in remaining]

    found = await asyncio.gather(*map(turns, places))
    return [count for some in found for count in some]


def _ours(sandbox: Sandbox) -> Any:
    async def once() -> int:
        mark = f"swerve-{secrets.token_hex(6)}"
        processes = await _cgroup_of(sandbox.id)
        result = await sandbox.run(ESCAPES.replace("MARK", mark), timeout_s=TIMEOUT_S)
        assert result.exit_code is None, result
        return _num_marked(processes, mark)

    return once


def _theirs(rival: Any) -> Any:
    async def once() -> int:
        mark = f"rival-{secrets.token_hex(6)}"
        processes = await _cgroup_of(rival.container_id)
        command = {"command": ESCAPES.replace("MARK", mark)}
        result = await asyncio.to_thread(rival.execute, command, timeout=TIMEOUT_S)
        assert result["returncode"] == -1, result
        return _num_marked(processes, mark)

    return once


async def _cgroup_of(container: str) -> Path:
    words = ["docker", "inspect", container]
    asked = await asyncio.to_thread(subprocess.run, words, capture_output=True, check=True)
    return cgroup(json.loads(asked.stdout)[0]["State"]["Pid"], "cpuacct") / "cgroup.procs"


def _num_marked(processes: Path, mark: str) -> int:
    count = 0
    for pid in processes.read_text().split():
        try:
            count += mark in Path("/proc", pid, "cmdline").read_text(errors="replace").split("\0")
        except OSError:
            continue  # it has ended meanwhile
    return count
