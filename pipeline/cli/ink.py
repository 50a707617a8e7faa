"""Formatting of text for a terminal: colours, ages, counts and shortened output."""

import time

from pipeline.screen import obeyed

_PLAIN = obeyed("\x1b[0m")
_HEAD_LINES, _TAIL_LINES = 12, 6  # lines shown of a long output, unless shown in full


class Ink:
    """Adds colours if the output is a terminal."""

    def __init__(self, *, coloured: bool) -> None:
        self._coloured = coloured

    def bold(self, text: str) -> str:
        return self._paint("1", text)

    def faint(self, text: str) -> str:
        return self._paint("2", text)

    def good(self, text: str) -> str:
        return self._paint("32", text)

    def bad(self, text: str) -> str:
        return self._paint("31", text)

    def doubtful(self, text: str) -> str:
        return self._paint("33", text)

    def _paint(self, code: str, text: str) -> str:
        return obeyed(f"\x1b[{code}m") + text + _PLAIN if self._coloured and text else text


def age(seconds: float) -> str:
    """The duration in one unit: "42 s", "12 min", "3.5 h", "4 d"."""
    seconds = max(0.0, seconds)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} d"


def count(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def shortened(text: str, *, full: bool) -> str:
    lines = text.rstrip("\n").split("\n")
    if full or len(lines) <= _HEAD_LINES + _TAIL_LINES + 1:
        return "\n".join(lines)
    hidden = len(lines) - _HEAD_LINES - _TAIL_LINES
    return "\n".join([*lines[:_HEAD_LINES], f"... {hidden} lines more, with --full", *lines[-_TAIL_LINES:]])


def indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n")) if text else ""


def clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
