"""`top`: the fleet as it is now, drawn again and again until q or Ctrl-C; into a pipe, once."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Generator

from redis.asyncio import Redis

from pipeline.cli import finding, text
from pipeline.cli.text import Ink

ARRIVALS = 8  # newest finished trajectories shown

_BEGIN, _END = (
    "\x1b[?1049h\x1b[?25l\x1b[?7l",
    "\x1b[?7h\x1b[?25h\x1b[?1049l",
)  # other screen, no cursor, no wrapping
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"


async def frame(redis: Redis, only: str | None, ink: Ink, *, lines: int | None = None) -> str:
    """One picture of the fleet, at most so many lines high."""
    run_ids = await finding.runs(redis, only)
    fleet = await finding.fleet(redis, run_ids)
    arrived = [
        line for run_id in run_ids for line in await finding.lines(redis, run_id, "answered", ARRIVALS)
    ]
    newest = sorted(arrived, key=lambda line: -line.at)[:ARRIVALS]
    rows = [
        f"{ink.bold('swerve')}  {time.strftime('%H:%M:%S')}  {ink.faint('q quits')}",
        "",
        *text.status(fleet, finding.complaints(fleet), ink).split("\n"),
        "",
        ink.bold("newest answers") if newest else ink.faint("no answers yet"),
        *(text.row(line, ink) for line in newest),
    ]
    return "\n".join(rows if lines is None else rows[:lines])


async def live(redis: Redis, only: str | None, *, every_s: float) -> None:
    """Draw until q or Ctrl-C. Needs a terminal on both sides."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    keyboard = sys.stdin.fileno()

    def pressed() -> None:
        if os.read(keyboard, 64)[:1] in (b"q", b"Q", b"\x03", b""):
            stop.set()

    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_reader(keyboard, pressed)
    try:
        with _screen(keyboard):
            while not stop.is_set():
                drawn = await frame(redis, only, Ink(coloured=True), lines=shutil.get_terminal_size().lines)
                sys.stdout.write(_HOME + drawn.replace("\n", f"{_CLEAR_LINE}\n") + _CLEAR_LINE + _CLEAR_REST)
                sys.stdout.flush()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(every_s):
                        await stop.wait()
    finally:
        loop.remove_reader(keyboard)
        loop.remove_signal_handler(signal.SIGINT)


@contextlib.contextmanager
def _screen(keyboard: int) -> Generator[None]:
    """The terminal's other screen, keys unbuffered; both as they were afterwards."""
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    sys.stdout.write(_BEGIN)
    try:
        yield
    finally:
        sys.stdout.write(_END)
        sys.stdout.flush()
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
