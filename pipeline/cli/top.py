"""`top`: the status of the fleet, redrawn until q or Ctrl-C; into a pipe, printed once."""

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

from pipeline.cli import listing, runs, status, status_text
from pipeline.cli.ink import Ink
from pipeline.kinds import KINDS

ARRIVALS = 8  # newest trajectories and judgements shown

# The terminal's other screen, without cursor and wrapping; and back.
_BEGIN, _END = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"


async def frame(redis: Redis, only: str | None, ink: Ink, *, lines: int | None = None) -> str:
    """One screen: the status and the newest results, cut to so many lines."""
    run_ids = await runs.chosen(redis, only)
    fleet = await status.fleet_census(redis, run_ids)
    arrived = [
        line
        for run_id in run_ids
        for kind in KINDS
        for line in await listing.lines(redis, run_id, "answered", ARRIVALS, kind=kind)
    ]
    newest = sorted(arrived, key=lambda line: -line.at)[:ARRIVALS]
    rows = [
        f"{ink.bold('swerve')}  {time.strftime('%H:%M:%S')}  {ink.faint('q quits')}",
        "",
        *status_text.status(fleet, status.complaints(fleet), ink).split("\n"),
        "",
        ink.bold("newest results") if newest else ink.faint("no results yet"),
        *(listing.row(line, ink) for line in newest),
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
    """Switch to the terminal's other screen with unbuffered keys; switch back afterwards."""
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    sys.stdout.write(_BEGIN)
    try:
        yield
    finally:
        sys.stdout.write(_END)
        sys.stdout.flush()
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
