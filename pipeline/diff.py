"""Unified and git diffs: their sections, one for each file, with paths and hunks, and the exact application of a section to a text.

Lines end with LF alone, as in git. Quoted names are decoded as git encodes them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)\n?")
_SAME = re.compile(rb"diff --git ([^/\s\"]+/)(.+) ([^/\s\"]+/)\2")
_QUOTED = rb'"((?:[^"\\]|\\.)*)"'
_BOTH_QUOTED = re.compile(rb"diff --git %s %s" % (_QUOTED, _QUOTED))
_NAMED = re.compile(rb"(?:---|\+\+\+|rename from|rename to|copy to) ([^\t\r\n]+)")
_C_STRING = re.compile(rb'"(?:[^"\\]|\\[abtnvfr"\\]|\\[0-3][0-7]{2})*"')
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
_LETTERS = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines with their signs, from line `old_start` of the old text. A line without a newline is the last of its text."""

    old_start: int
    heading: bytes  # the text after the second @@
    lines: tuple[tuple[bytes, bytes], ...]  # b" ", b"-" or b"+", and the line


@dataclass(frozen=True, slots=True)
class Section:
    """The part of a diff about one file. `old` and `new` are paths without their prefix; None: the file is absent on that side."""

    raw: bytes  # the whole section
    header: bytes  # the lines before its hunks
    old: bytes | None
    new: bytes | None
    hunks: tuple[Hunk, ...]  # for a corrupt section, the hunks that can be read
    readable: bool  # False: the section is binary or corrupt


def sections(diff: bytes, *, strip: int = 1) -> list[Section]:
    """The parts of `diff`; their `raw` joined is `diff`. `strip` leading directories are removed from each path."""
    return [_section(piece, strip) for piece in _pieces(diff)]


def paths_of(diff: bytes) -> tuple[str, ...]:
    """Every path that a diff touches, old names and new, in order of appearance.

    Raises ValueError for a name in quotes that git could not have written, or that is not UTF-8.
    """
    paths: dict[str, None] = {}
    for section in sections(diff):
        for name in _NAMED.findall(section.header):
            if name.startswith(b'"') and not _C_STRING.fullmatch(name):
                raise ValueError(f"not a name as git quotes it: {name[:80].decode(errors='replace')!r}")
        copied = re.search(rb"^copy from ", section.header, re.MULTILINE)
        for path in (None if copied else section.old, section.new):
            if path is not None:
                try:
                    paths[path.decode()] = None
                except UnicodeError as error:
                    raise ValueError(f"a name that is not UTF-8: {path[:80]!r}") from error
    return tuple(paths)


def applied(section: Section, old: bytes) -> bytes | None:
    """The result of `section` applied to the text `old`; None if it does not apply exactly where it says."""
    found = operations(section, lines_of(old))
    return None if found is None else new_text(found)


def operations(section: Section, old: list[bytes]) -> list[tuple[bytes, bytes]] | None:
    """Every line of the old and the new text, with its sign; None if the section does not apply exactly where it says."""
    if not section.readable:
        return None
    found: list[tuple[bytes, bytes]] = []
    at = 0
    for hunk in section.hunks:
        removed = [line for sign, line in hunk.lines if sign != b"+"]
        start = hunk.old_start - 1 if removed else hunk.old_start
        if start < at or old[start : start + len(removed)] != removed:
            return None
        found += [(b" ", line) for line in old[at:start]]
        found += hunk.lines
        at = start + len(removed)
    return found + [(b" ", line) for line in old[at:]]


def new_text(operations: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Returns the new text: all lines but those that are removed (sign b"-")."""
    return b"".join(line for sign, line in operations if sign != b"-")


def lines_of(text: bytes) -> list[bytes]:
    """The lines of a text, each with its end."""
    return _LINE.findall(text)


def _pieces(diff: bytes) -> list[bytes]:
    pieces: list[list[bytes]] = []
    left_old = left_new = 0
    named = True  # whether the current piece has its "---" line; another such line then begins the next piece
    for line in _LINE.findall(diff):
        inside = left_old > 0 or left_new > 0
        if inside:
            left_old -= line[:1] in (b" ", b"-", b"\n")
            left_new -= line[:1] in (b" ", b"+", b"\n")
        elif hunk := _HUNK.match(line):
            left_old, left_new = (1 if hunk[i] is None else int(hunk[i]) for i in (2, 4))
        begins = not inside and (line.startswith(b"diff --git ") or (named and line.startswith(b"--- ")))
        if begins or not pieces:
            pieces.append([])
        if not inside and line.startswith((b"diff --git ", b"--- ")):
            named = line.startswith(b"--- ")
        pieces[-1].append(line)
    return [b"".join(piece) for piece in pieces]


def _section(raw: bytes, strip: int) -> Section:
    lines = _LINE.findall(raw)
    first = next((number for number, line in enumerate(lines) if _HUNK.match(line)), len(lines))
    header = b"".join(lines[:first])
    old, new = _paths(lines[:first], strip)
    hunks, is_whole = _hunks(lines[first:])
    is_binary = re.search(rb"^(?:GIT binary patch|Binary files )", header, re.MULTILINE)
    return Section(raw, header, old, new, tuple(hunks), is_whole and not is_binary)


def _paths(header: Sequence[bytes], strip: int) -> tuple[bytes | None, bytes | None]:
    old = new = None
    created = deleted = False
    for line in (line.rstrip(b"\r\n") for line in header):
        if same := _SAME.fullmatch(line):
            old, new = (_stripped(same[side] + same[2], strip) for side in (1, 3))
        elif both := _BOTH_QUOTED.fullmatch(line):
            old, new = (_stripped(_unescaped(name), strip) for name in both.groups())
        elif line.startswith((b"rename from ", b"copy from ")):
            old = _unquoted(line.partition(b" from ")[2])
        elif line.startswith((b"rename to ", b"copy to ")):
            new = _unquoted(line.partition(b" to ")[2])
        elif line.startswith(b"--- "):
            old = _stripped(_unquoted(line[4:].partition(b"\t")[0]), strip)
        elif line.startswith(b"+++ "):
            new = _stripped(_unquoted(line[4:].partition(b"\t")[0]), strip)
        created |= line.startswith(b"new file mode ")
        deleted |= line.startswith(b"deleted file mode ")
    return None if created else old, None if deleted else new


def _hunks(lines: Sequence[bytes]) -> tuple[list[Hunk], bool]:
    """The hunks, and whether their lines have valid signs and the numbers that their headers declare."""
    hunks: list[Hunk] = []
    at, is_whole = 0, True
    while at < len(lines):
        start = _HUNK.match(lines[at])
        if start is None:
            break  # a mail's signature, or blank lines
        at += 1
        left_old, left_new = (1 if start[i] is None else int(start[i]) for i in (2, 4))
        content: list[tuple[bytes, bytes]] = []
        while (left_old > 0 or left_new > 0) and at < len(lines):
            sign, line = (b" ", lines[at]) if lines[at] == b"\n" else (lines[at][:1], lines[at][1:])
            if sign not in (b" ", b"-", b"+"):
                return [*hunks, Hunk(int(start[1]), start[5], tuple(content))], False
            left_old -= sign != b"+"
            left_new -= sign != b"-"
            at += 1
            if at < len(lines) and lines[at].startswith(b"\\"):
                line = line.removesuffix(b"\n")
                at += 1
            content.append((sign, line))
        is_whole &= left_old == 0 == left_new
        hunks.append(Hunk(int(start[1]), start[5], tuple(content)))
    return hunks, is_whole


def _stripped(path: bytes, strip: int) -> bytes | None:
    """The path without `strip` leading directories; None for the absent side. The name itself is always kept."""
    return None if path == b"/dev/null" else path.split(b"/", strip)[-1]


def _unquoted(name: bytes) -> bytes:
    return _unescaped(name[1:-1]) if name.startswith(b'"') and name.endswith(b'"') else name


def _unescaped(name: bytes) -> bytes:
    def byte(escape: re.Match[bytes]) -> bytes:
        code = escape[1]
        return bytes([int(code, 8) & 255]) if len(code) == 3 else _LETTERS.get(code, code)

    return _ESCAPE.sub(byte, name)
