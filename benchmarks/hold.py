"""How long hostile input holds a worker's event loop: `python -m benchmarks.hold [--json] [--short]`.

A ticker sleeps for a millisecond, again and again, while the worker reads what a policy or a patch may have written to hold it up. The
longest gap between two of its turns is how long nothing else could run: no lease was renewed, and no other episode went on. It is compared
with a tenth of a second, which is what we allow.
"""

import asyncio
import base64
import contextlib
import re
import sys
import time
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

from benchmarks.report import Comparison, main
from pipeline.agent.upstream import BASH_BLOCK
from pipeline.task import ExitCode, Resources, SwebenchLog, Task, Verdict
from workers.agent.commands import observe, search
from workers.grading.defence.before import changed_settings, patch_headers
from workers.grading.swebench_rules import Marks
from workers.grading.verdicts import Remains, judged, readable
from workers.isolation import calls as isolation
from workers.isolation.calls import LimitExceeded
from workers.sandbox.protocol import CommandResult

ALLOWED_MS = 100.0
RIVAL = "100 ms"
TICK_S = 0.001
MB = 1024 * 1024
MARKED = b">>>>> Start Test Output\n%b\n>>>>> End Test Output\n>>>>> Test Exit Code: 0\n"

Reading = Callable[[int], Awaitable[object]]


@dataclass(slots=True)
class Ticker:
    """The longest time in which the event loop did not come round."""

    longest_s: float = 0.0
    _last: float = field(default_factory=time.monotonic)

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - self._last - TICK_S)
            self._last = now


@contextlib.asynccontextmanager
async def ticking() -> AsyncGenerator[Ticker]:
    ticker = Ticker()
    ticks = asyncio.create_task(ticker.tick())
    await asyncio.sleep(TICK_S)
    yield ticker
    await asyncio.sleep(2 * TICK_S)  # the ticker's turn after the last gap
    ticks.cancel()


def search_reply(num_bytes: int) -> Awaitable[object]:
    return search("```bash" + "\n" * num_bytes, re.compile(BASH_BLOCK, re.DOTALL))


def show_output(num_bytes: int) -> Awaitable[object]:
    result = CommandResult(exit_code=0, output=b"\xff" * num_bytes, dropped_bytes=0, wall_s=0.0)

    async def shown() -> object:
        return observe(result, limit_chars=10_000)

    return shown()


def read_headers(num_bytes: int) -> Awaitable[object]:
    return isolation.call(
        patch_headers, b"--- a/x/y.py\n" * (num_bytes // 13), "pytest\n", ("ci/run.sh",), ()
    )


def read_settings(num_bytes: int) -> Awaitable[object]:
    content = b"a = " + b"[" * num_bytes
    line = b" ".join(base64.b64encode(part) for part in (b"pyproject.toml", b"", content))
    return isolation.call(changed_settings, line, "pytest\n", "/repo")


def read_output(num_bytes: int) -> Awaitable[object]:
    return isolation.call(readable, b"\xff" * num_bytes, Marks())


def judge_backtracking_log(num_bytes: int) -> Awaitable[object]:
    verdict = SwebenchLog(eval_script="", log_parser="parse_log_sympy", fail_to_pass=("a",), pass_to_pass=())
    return _judged(verdict, log=MARKED % (b" " * num_bytes))


def judge_many_lines(num_bytes: int) -> Awaitable[object]:
    verdict = SwebenchLog(eval_script="", log_parser="parse_log_pytest", fail_to_pass=("a",), pass_to_pass=())
    return _judged(verdict, log=MARKED % (b"\n" * num_bytes))


def judge_flooded_side_channel(num_bytes: int) -> Awaitable[object]:
    packed = base64.b64encode(zlib.compress(b" " * (64 * num_bytes)))
    return _judged(ExitCode(eval_script="pytest\n"), notes=b"start a pytest\nend a " + packed + b"\n")


def judge_long_patch(num_bytes: int) -> Awaitable[object]:
    return _judged(ExitCode(eval_script="pytest\n"), patch=b"+a\n" * (num_bytes // 3))


async def _judged(verdict: Verdict, *, patch: bytes = b"", log: bytes = b"", notes: bytes = b"") -> object:
    task = Task(
        id="hold",
        repo="hold",
        base_commit="",
        image="none",
        workdir="/repo",
        problem="",
        verdict=verdict,
        resources=Resources(),
    )
    return await isolation.call(judged, task, Remains(patch, 0, log, notes, None))


# Each makes its input first and is awaited later. The size is what a sandbox keeps at most of such a thing.
READINGS: dict[str, tuple[Reading, int]] = {
    "a reply that makes the search for its command backtrack": (search_reply, MB),
    "a command's output that is not UTF-8": (show_output, MB // 2),
    "a patch of headers": (read_headers, 32 * MB),
    "a pyproject.toml that is nested deeply": (read_settings, 8 * MB),
    "a log that is not UTF-8": (read_output, 16 * MB),
    "a log that makes sympy's parser backtrack": (judge_backtracking_log, 16 * MB),
    "a log of empty lines": (judge_many_lines, 16 * MB),
    "a side channel that unpacks to much more": (judge_flooded_side_channel, 16 * MB),
    "a long patch": (judge_long_patch, 32 * MB),
}


async def hold(short: bool) -> list[Comparison]:
    found: list[Comparison] = []
    for what, (reading, num_bytes) in READINGS.items():
        made = reading(num_bytes // 1024 if short else num_bytes)
        async with ticking() as ticker:
            with contextlib.suppress(LimitExceeded):
                await made
        unit = f"ms that the event loop was held by {what}"
        found.append(Comparison("hold", ticker.longest_s * 1000, ALLOWED_MS, RIVAL, unit))
    return found


if __name__ == "__main__":
    sys.exit(main("hold", __doc__, hold))
