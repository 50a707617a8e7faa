"""Reads a git diff, applies it strictly, and writes it anew so that it leads to another text.

The sections of other files stay byte for byte. Lines end with LF alone, as for git.
"""

import bisect
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CONTEXT_LINES = 3

Edit = tuple[int, int, bytes]
"""Bytes start to end of a text become something else."""

_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)\n?")
_SAME = re.compile(rb"diff --git ([^/\s\"]+/)(.+) ([^/\s\"]+/)\2")
_BOTH_QUOTED = re.compile(rb'diff --git "((?:[^"\\]|\\.)*)" "((?:[^"\\]|\\.)*)"')
_INDEX = re.compile(rb"^(index [0-9a-f]+\.\.)([0-9a-f]+)", re.MULTILINE)
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
_LETTERS = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_NO_NEWLINE = b"\\ No newline at end of file\n"
_UNQUOTED = re.compile(rb"[!#-\[\]-~]+")  # git quotes names with anything else in them, or a space ends them
_FUNCTION = re.compile(rb"[A-Za-z_$]")
_HEADING_BYTES = 80


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines with their signs, from line `old_start` of the old text. A line without a newline is the last of its text."""

    old_start: int
    heading: bytes  # what follows the second @@
    lines: tuple[tuple[bytes, bytes], ...]  # b" ", b"-" or b"+", and the line


@dataclass(frozen=True, slots=True)
class Section:
    """What a diff says of one file. `old` and `new` are paths without their prefix; None: the file is absent on that side."""

    raw: bytes  # the whole section
    header: bytes  # all that precedes its hunks
    old: bytes | None
    new: bytes | None
    hunks: tuple[Hunk, ...]
    readable: bool  # False: binary, or corrupt


def sections(diff: bytes, *, strip: int = 1) -> list[Section]:
    """`diff` in pieces; their `raw` joined is `diff`. `strip` leading directories are taken off each path."""
    return [_section(piece, strip) for piece in _pieces(diff)]


def applied(section: Section, old: bytes) -> bytes | None:
    """What `section` makes of the text `old`; None if it does not apply exactly where it says."""
    operations = _operations(section, _lines(old))
    return None if operations is None else _text(operations)


def edited(text: bytes, edits: Sequence[Edit]) -> bytes:
    """`text` with `edits`, which are in order and do not overlap."""
    pieces: list[bytes] = []
    at = 0
    for start, end, becomes in edits:
        pieces += [text[at:start], becomes]
        at = end
    return b"".join([*pieces, text[at:]])


def rewritten(section: Section, old: bytes, edits: Iterable[Edit]) -> bytes | None:
    """`section` as a diff that leads from `old` to its own text with `edits`; None if it does not apply."""
    operations = _operations(section, _lines(old))
    if operations is None:
        return None
    was = _text(operations)
    changing = [(start, end, becomes) for start, end, becomes in edits if was[start:end] != becomes]
    if not changing:
        return section.raw
    changed = _edited(operations, sorted(_before_end(edit, was) for edit in changing))
    text = _text(changed)
    header = section.header
    if not section.hunks:
        if section.old is None or section.new is None or not _UNQUOTED.fullmatch(section.old + section.new):
            return None
        header += b"--- a/%s\n+++ b/%s\n" % (section.old, section.new)
    return _reindexed(header, was, text) + _rendered(changed, section)


def _pieces(diff: bytes) -> list[bytes]:
    pieces: list[list[bytes]] = []
    left_old = left_new = 0
    named = True  # the piece under way has its "---" line: another one begins the next piece
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
    hunks = _hunks(lines[first:])
    readable = hunks is not None and not re.search(
        rb"^(?:GIT binary patch|Binary files )", header, re.MULTILINE
    )
    return Section(raw, header, old, new, tuple(hunks or ()), readable)


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


def _hunks(lines: Sequence[bytes]) -> list[Hunk] | None:
    hunks: list[Hunk] = []
    at = 0
    while at < len(lines):
        start = _HUNK.match(lines[at])
        if start is None:
            break  # a mail's signature, or blank lines
        at += 1
        left_old, left_new = (1 if start[i] is None else int(start[i]) for i in (2, 4))
        content: list[tuple[bytes, bytes]] = []
        while (left_old or left_new) and at < len(lines):
            sign, line = (b" ", lines[at]) if lines[at] == b"\n" else (lines[at][:1], lines[at][1:])
            if sign not in (b" ", b"-", b"+"):
                return None
            left_old -= sign != b"+"
            left_new -= sign != b"-"
            at += 1
            if at < len(lines) and lines[at].startswith(b"\\"):
                line = line.removesuffix(b"\n")
                at += 1
            content.append((sign, line))
        if left_old or left_new:
            return None
        hunks.append(Hunk(int(start[1]), start[5], tuple(content)))
    return hunks


def _operations(section: Section, old: list[bytes]) -> list[tuple[bytes, bytes]] | None:
    """Every line of the old and the new text, with its sign."""
    if not section.readable:
        return None
    operations: list[tuple[bytes, bytes]] = []
    at = 0
    for hunk in section.hunks:
        removed = [line for sign, line in hunk.lines if sign != b"+"]
        start = hunk.old_start - 1 if removed else hunk.old_start
        if start < at or old[start : start + len(removed)] != removed:
            return None
        operations += [(b" ", line) for line in old[at:start]]
        operations += hunk.lines
        at = start + len(removed)
    return operations + [(b" ", line) for line in old[at:]]


def _edited(operations: list[tuple[bytes, bytes]], edits: Sequence[Edit]) -> list[tuple[bytes, bytes]]:
    """`operations` with `edits` of the new text. In each run of edited lines, what was there is removed, and the rest added."""
    changed: list[tuple[bytes, bytes]] = []
    run: list[tuple[bytes, bytes]] = []
    start = offset = 0  # of the run, and of the next line, in the new text
    ends = [end for _, end, _ in edits]
    for sign, line in operations:
        end = offset + (0 if sign == b"-" else len(line))
        # An edit that ends where the line begins may have taken away the end of the line before it.
        number = bisect.bisect_left(ends, offset)
        touched = offset < end and number < len(edits) and edits[number][0] < end
        if not touched and not (run and sign == b"-"):
            changed += [*_replaced(run, start, edits), (sign, line)]
            run, start = [], end
        else:
            run.append((sign, line))
        offset = end
    return changed + _replaced(run, start, edits)


def _before_end(edit: Edit, text: bytes) -> Edit:
    """`edit`; if it adds to the end of `text`, as one that changes the last line."""
    start, end, becomes = edit
    return (start - 1, end, text[-1:] + becomes) if start == len(text) > 0 else edit


def _replaced(run: list[tuple[bytes, bytes]], start: int, edits: Sequence[Edit]) -> list[tuple[bytes, bytes]]:
    """The lines `run`, whose new side begins at byte `start` of the new text, with those of `edits` that lie in it."""
    if not run:
        return []
    text = _text(run)
    end = start + len(text)
    inside = edits[bisect.bisect_left(edits, (start, 0, b"")) : bisect.bisect_left(edits, (end, 0, b""))]
    text = edited(text, [(first - start, last - start, becomes) for first, last, becomes in inside])
    return [(b"-", line) for sign, line in run if sign != b"+"] + [(b"+", line) for line in _lines(text)]


def _rendered(operations: list[tuple[bytes, bytes]], section: Section) -> bytes:
    context = _context_of(section)
    operations = _grouped(operations)
    changes = [number for number, (sign, _) in enumerate(operations) if sign != b" "]
    headings = {hunk.old_start: hunk.heading for hunk in section.hunks}
    named = any(headings.values())
    spans: list[tuple[int, int]] = []
    for number in changes:
        start, end = max(0, number - context), min(len(operations), number + context + 1)
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    rendered: list[bytes] = []
    old_before = new_before = at = 0
    for start, end in spans:
        old_before += sum(sign != b"+" for sign, _ in operations[at:start])
        new_before += sum(sign != b"-" for sign, _ in operations[at:start])
        lines = operations[start:end]
        num_old = sum(sign != b"+" for sign, _ in lines)
        num_new = sum(sign != b"-" for sign, _ in lines)
        old_start = old_before + (num_old > 0)
        heading = headings.get(old_start) if old_start in headings else _heading(operations[:start], named)
        rendered.append(
            b"@@ -%s +%s @@%s\n"
            % (_range(old_start, num_old), _range(new_before + (num_new > 0), num_new), heading)
        )
        rendered += [_signed(sign, line) for sign, line in lines]
        old_before, new_before, at = old_before + num_old, new_before + num_new, end
    return b"".join(rendered)


def _grouped(operations: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """`operations` in git's order: between two kept lines, what is removed comes before what is added."""
    grouped: list[tuple[bytes, bytes]] = []
    added: list[tuple[bytes, bytes]] = []
    for sign, line in operations:
        if sign == b" ":
            grouped += added
            added = []
        (added if sign == b"+" else grouped).append((sign, line))
    return grouped + added


def _context_of(section: Section) -> int:
    """Lines of context that the hunks of `section` have; a hunk has fewer only at an end of the file."""
    found = [
        next((number for number, (sign, _) in enumerate(lines) if sign != b" "), 0)
        for hunk in section.hunks
        for lines in (hunk.lines, hunk.lines[::-1])
    ]
    return max(found) if any(found) else CONTEXT_LINES


def _heading(before: list[tuple[bytes, bytes]], named: bool) -> bytes:
    """What git writes behind the second @@, if it writes any: the last line above that begins like a function."""
    if not named:
        return b""
    for sign, line in reversed(before):
        if sign != b"+" and _FUNCTION.match(line):
            return b" " + line[:_HEADING_BYTES].rstrip()
    return b""


def _range(start: int, count: int) -> bytes:
    return b"%d" % start if count == 1 else b"%d,%d" % (start, count)


def _signed(sign: bytes, line: bytes) -> bytes:
    return sign + line if line.endswith(b"\n") else sign + line + b"\n" + _NO_NEWLINE


def _reindexed(header: bytes, was: bytes, text: bytes) -> bytes:
    """`header` with the new text's id in its index line, if it has the former text's id there."""

    def renamed(found: re.Match[bytes]) -> bytes:
        known = _blob_id(was).startswith(found[2])
        return found[1] + (_blob_id(text)[: len(found[2])] if known else found[2])

    return _INDEX.sub(renamed, header)


def _blob_id(text: bytes) -> bytes:
    return hashlib.sha1(b"blob %d\0" % len(text) + text).hexdigest().encode()


def _text(operations: list[tuple[bytes, bytes]]) -> bytes:
    """The new text."""
    return b"".join(line for sign, line in operations if sign != b"-")


def _lines(text: bytes) -> list[bytes]:
    return _LINE.findall(text)


def _stripped(path: bytes, strip: int) -> bytes | None:
    return None if path == b"/dev/null" else b"/".join(path.split(b"/")[strip:])


def _unquoted(name: bytes) -> bytes:
    return _unescaped(name[1:-1]) if name.startswith(b'"') and name.endswith(b'"') else name


def _unescaped(name: bytes) -> bytes:
    def byte(escape: re.Match[bytes]) -> bytes:
        code = escape[1]
        return bytes([int(code, 8) & 255]) if len(code) == 3 else _LETTERS.get(code, code)

    return _ESCAPE.sub(byte, name)
