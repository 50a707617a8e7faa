"""The screen of a command: each output stream makes control characters visible that a terminal would obey, whatever the program writes.

Task ids, images, workers' names, replies and errors come from data sets, policies and other machines, and any of them may hold control
characters. Code that prints need not take care of this: each package calls `guard_screens()` in its `__init__.py`, which Python runs
before the first line of any command in it, and from then on `sys.stdout` and `sys.stderr` let only those control characters through
that `obeyed` marked. Its mark is a random number of this process, which no text from elsewhere can contain.

A reader may leave early, as `head` does. A command whose output nobody reads any more ends silently, after its clean-up, with the
status of a program that SIGPIPE ended; one that called `outlive_readers` continues.

`visible` makes characters visible that a terminal would obey, or show as nothing. A control character could move the cursor, set the title
or hide a line; a bidirectional override shows text in another order than it has; characters without width hide in names.

Colours (`Ink`), durations, counts and shortened texts look the same in every command.
"""

from __future__ import annotations

import atexit
import codecs
import functools
import io
import itertools
import os
import re
import secrets
import sys
import time
import unicodedata
from collections.abc import Sequence
from typing import Any, TextIO

_PICTURES = 0x2400  # pictures of the control characters 0 to 31, in their order
_PICTURE_OF_DELETE = "\u2421"
_EXTRAORDINARY = re.compile(r"[^\n\t -~]")
# Letters and marks without a glyph although their category does not say so: fillers and joiners.
_BLANKS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")
_SPACES = "Zs"


def visible(text: str) -> str:
    """The text, in which invisible characters are replaced by pictures or numbers. Line ends and tabs stay."""
    return _EXTRAORDINARY.sub(lambda found: _shown(found[0]), text)


def visible_line(text: str) -> str:
    """The same as one line: a name with a line end in it then cannot look like two rows."""
    return visible(text).replace("\n", _shown("\n")).replace("\t", _shown("\t"))


@functools.lru_cache(maxsize=4096)
def _shown(character: str) -> str:
    code = ord(character)
    if code < 32:
        return chr(_PICTURES + code)
    if code == 127:
        return _PICTURE_OF_DELETE
    is_space = unicodedata.category(character) == _SPACES
    if (character.isprintable() or is_space) and character not in _BLANKS:
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_OURS = f"\ufdd0{secrets.token_hex(8)}\ufdd0"
_STYLE = re.compile(f"({_OURS}\x1b\\[[0-9;]*m)")
_CONTROL = re.compile(r"[\x00-\x1f]")

READER_LEFT = 141
"""Exit status of a command whose reader has left: 128 and the number of SIGPIPE, as in shells."""

_NUMBERED = "swerve.numbered"
"""The error handler for characters that an encoding lacks. It writes them so that JSON stays valid, unlike `backslashreplace`."""


def guard_screens() -> None:
    """Makes this process print only characters that a terminal shows. Applies to `python -m ...` and `swerve` only, as
    `name_missing_packages` does: a program that imports us keeps its streams.
    """
    if sys.argv[0] != "-m":
        return
    if isinstance(sys.stdout, Screen):
        return  # another of our packages has replaced it already
    sys.stdout, sys.stderr = _guarded(sys.stdout), _guarded(sys.stderr)
    if isinstance(sys.stderr, Screen):
        sys.stderr.outlives_reader = True  # the command's results are not printed there
    atexit.register(_flush)


def outlive_readers() -> None:
    """Lets this process continue when nobody reads its output, because its work is not what it prints."""
    if isinstance(sys.stdout, Screen):
        sys.stdout.outlives_reader = True


class Screen(io.TextIOWrapper):
    """A text stream that passes on only control characters that `obeyed` marked; line ends and tabs stay. A character that the encoding
    lacks is written as its number.
    """

    outlives_reader = False

    def __init__(self, stream: io.TextIOWrapper[Any]) -> None:
        super().__init__(
            stream.buffer,
            encoding=stream.encoding,
            errors=_NUMBERED,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self._beneath = stream  # without this reference, the stream would be collected and close the buffer

    def write(self, text: str, /) -> int:
        try:
            super().write(as_shown(text))
        except BrokenPipeError:
            self._lose_reader()
        return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            self._lose_reader()

    def _lose_reader(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())  # otherwise flushing what is still buffered fails again
        os.close(nowhere)
        if not self.outlives_reader:
            raise SystemExit(READER_LEFT)


def as_shown(text: str) -> str:
    """The text for a terminal: with the control characters that are ours, and with pictures of all others."""
    first, *rest = text.split(_OURS)
    return "".join([visible(first), *(part[:1] + visible(part[1:]) for part in rest)])


def obeyed(sequence: str) -> str:
    """A control sequence of our own, marked so that a `Screen` passes it on. Never give it text that others wrote."""
    return _CONTROL.sub(lambda found: _OURS + found[0], sequence)


def one_line(text: str) -> str:
    """The text as exactly one line of a screen: a name with a line end in it cannot look like two rows. Our own marked sequences stay."""
    first, *rest = text.split(_OURS)
    return _OURS.join([visible_line(first), *(part[:1] + visible_line(part[1:]) for part in rest)])


def lines(rows: Sequence[str]) -> str:
    """Rows of a screen, each on a line of its own whatever it contains."""
    return "\n".join(map(one_line, rows))


def cut(row: str, columns: int) -> str:
    """A row that fits into `columns`; one that had to be cut ends with "…". Its colours end where they would have."""
    parts, room = _STYLE.split(one_line(row)), columns
    if sum(map(_width, parts[::2])) <= columns:
        return one_line(row)
    kept: list[str] = []
    for at, part in enumerate(parts):
        if at % 2:
            kept.append(part)  # a style takes no columns
            continue
        fitting = part if _width(part) < room else _fitting(part, room - 1) + "…" * (room > 0)
        room = room - _width(part) if fitting == part else 0
        kept.append(fitting)
    return "".join(kept)


def _fitting(text: str, columns: int) -> str:
    ends = itertools.accumulate(map(_width, text))
    return text[: sum(end <= columns for end in ends)]


def _width(text: str) -> int:
    """The number of columns on a terminal."""
    return sum(
        2 if unicodedata.east_asian_width(one) in "WF" else not unicodedata.combining(one) for one in text
    )


def has_colours(stream: TextIO) -> bool:
    """Whether output to the stream is coloured: it is a terminal, and NO_COLOR is not set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def _guarded(stream: Any) -> Any:
    """The guarded stream.

    None (a process without that stream), streams that are guarded already, and objects that are not a file are returned unchanged.
    """
    return Screen(stream) if type(stream) is io.TextIOWrapper else stream


def _flush() -> None:
    """Writes the buffered rest at the end of the process. Its work is done, so a reader that has left does not change its status."""
    outlive_readers()
    if isinstance(sys.stdout, Screen):  # the stream is None in a process that was started without it
        sys.stdout.flush()


def _numbers(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2)), error.end


codecs.register_error(_NUMBERED, _numbers)


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
