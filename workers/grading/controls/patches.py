"""Rewrites a git diff so that it leads to another text.

The sections of other files are not changed. Lines end with LF alone, as in git.
"""

import bisect
import hashlib
import re
from collections.abc import Iterable, Sequence

from pipeline import diff

CONTEXT_LINES = 3

Edit = tuple[int, int, bytes]
"""An edit that replaces the bytes from start to end of a text."""

_INDEX = re.compile(rb"^(index [0-9a-f]+\.\.)([0-9a-f]+)", re.MULTILINE)
_NO_NEWLINE = b"\\ No newline at end of file\n"
_UNQUOTED = re.compile(rb"[!#-\[\]-~]+")  # git quotes names with anything else in them, or a space ends them
_FUNCTION = re.compile(rb"[A-Za-z_$]")
_HEADING_BYTES = 80


def edited(text: bytes, edits: Sequence[Edit]) -> bytes:
    """`text` with `edits`, which are in order and do not overlap."""
    pieces: list[bytes] = []
    at = 0
    for start, end, becomes in edits:
        pieces += [text[at:start], becomes]
        at = end
    return b"".join([*pieces, text[at:]])


def rewritten(section: diff.Section, old: bytes, edits: Iterable[Edit]) -> bytes | None:
    """`section` as a diff that leads from `old` to its own text with `edits`; None if it does not apply."""
    operations = diff.operations(section, diff.lines_of(old))
    if operations is None:
        return None
    was = diff.new_text(operations)
    changing = [(start, end, becomes) for start, end, becomes in edits if was[start:end] != becomes]
    if not changing:
        return section.raw
    changed = _edited(operations, sorted(_before_end(edit, was) for edit in changing))
    text = diff.new_text(changed)
    header = section.header
    if not section.hunks:
        if section.old is None or section.new is None or not _UNQUOTED.fullmatch(section.old + section.new):
            return None
        header += b"--- a/%s\n+++ b/%s\n" % (section.old, section.new)
    return _reindexed(header, was, text) + _rendered(changed, section)


def _edited(operations: list[tuple[bytes, bytes]], edits: Sequence[Edit]) -> list[tuple[bytes, bytes]]:
    """`operations` after `edits` of the new text. In each run of edited lines, the old lines are removed, and the new ones added."""
    changed: list[tuple[bytes, bytes]] = []
    run: list[tuple[bytes, bytes]] = []
    start = offset = 0  # positions of the run and of the next line in the new text
    ends = [end for _, end, _ in edits]
    for sign, line in operations:
        end = offset + (0 if sign == b"-" else len(line))
        # An edit that ends where the line begins may have removed the line end before it.
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
    """`edit`; if it adds to the end of `text`, as an edit of the last line."""
    start, end, becomes = edit
    return (start - 1, end, text[-1:] + becomes) if start == len(text) > 0 else edit


def _replaced(run: list[tuple[bytes, bytes]], start: int, edits: Sequence[Edit]) -> list[tuple[bytes, bytes]]:
    """The lines `run`, whose new side begins at byte `start` of the new text, after those of `edits` that are inside it."""
    if not run:
        return []
    text = diff.new_text(run)
    end = start + len(text)
    inside = edits[bisect.bisect_left(edits, (start, 0, b"")) : bisect.bisect_left(edits, (end, 0, b""))]
    text = edited(text, [(first - start, last - start, becomes) for first, last, becomes in inside])
    return [(b"-", line) for sign, line in run if sign != b"+"] + [
        (b"+", line) for line in diff.lines_of(text)
    ]


def _rendered(operations: list[tuple[bytes, bytes]], section: diff.Section) -> bytes:
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
    """`operations` in git's order: between two kept lines, removed lines come before added ones."""
    grouped: list[tuple[bytes, bytes]] = []
    added: list[tuple[bytes, bytes]] = []
    for sign, line in operations:
        if sign == b" ":
            grouped += added
            added = []
        (added if sign == b"+" else grouped).append((sign, line))
    return grouped + added


def _context_of(section: diff.Section) -> int:
    """The number of context lines of the hunks of `section`; a hunk has fewer only at an end of the file."""
    found = [
        next((number for number, (sign, _) in enumerate(lines) if sign != b" "), 0)
        for hunk in section.hunks
        for lines in (hunk.lines, hunk.lines[::-1])
    ]
    return max(found) if any(found) else CONTEXT_LINES


def _heading(before: list[tuple[bytes, bytes]], named: bool) -> bytes:
    """Git's text after the second @@, if it writes any: the last line above that begins like a function."""
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
    """`header` with the new text's id in its index line, if it contains the former text's id there."""

    def renamed(found: re.Match[bytes]) -> bytes:
        known = _blob_id(was).startswith(found[2])
        return found[1] + (_blob_id(text)[: len(found[2])] if known else found[2])

    return _INDEX.sub(renamed, header)


def _blob_id(text: bytes) -> bytes:
    return hashlib.sha1(b"blob %d\0" % len(text) + text).hexdigest().encode()
