"""The signature of a task's answer, by which it is recognised in any place and format, and the search of a file for it.

A file contains the answer if it contains windows of it: three consecutive lines in a patch's result that did not exist before. A single
line is weaker evidence, because others may write the same line; it counts if it is long, or in a directory where authors of images leave
files. A file is also searched as a diff, escaped as in JSON, and as an editor's swap file.
"""

import hashlib
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from pipeline import diff
from pipeline.task import ExitCode, R2eExpected, Task, TestsJson
from pipeline.taskfile import Gold

MIN_LINE_CHARS = 16  # shorter lines occur everywhere
LONG_LINE_CHARS, LONG_LINE_WORDS = 40, 4  # a line that hardly anybody else writes
WINDOW_LINES = 3
WINDOW_CHARS = 40  # shorter windows occur everywhere
NEAR_CHARS = 20  # length of windows in a file with the name of a file that the patch changes
ENOUGH = 3  # number of windows or lines, or half of all of them if that is less

_UNTELLING = re.compile(r"(?:import |from |#|//|/?\*|<!--|@pytest|return (?:True|False|None)\b)")
_WORD = re.compile(r"\w{2,}")

Window = tuple[bytes, ...]


class AnswerPart(msgspec.Struct, frozen=True, kw_only=True):
    """The identifying text of the known solution, or of the hidden tests. Lines are stripped; lines of windows have single spaces."""

    name: str
    windows: tuple[Window, ...]
    near: tuple[Window, ...]  # short windows
    lines: tuple[bytes, ...]

    @property
    def long_lines(self) -> tuple[bytes, ...]:
        return tuple(line for line in self.lines if _is_long(line.decode("utf-8", "replace")))


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """The identifying text of the answer to one task."""

    parts: tuple[AnswerPart, ...] = ()
    paths: tuple[str, ...] = ()  # files that the known solution changes
    files: tuple[tuple[int, str], ...] = ()  # length and SHA-256 of files that only the grader may have


def signature_of(task: Task, gold: Gold | None) -> Signature:
    """The signature of the task. `gold` is None if the known solution is not available."""
    if gold is None:
        return Signature(files=_files(task))
    return Signature(
        parts=tuple(_part(kind, patch) for kind, patch in _patches(gold).items()),
        paths=tuple(dict.fromkeys(path for path, _, _ in _hunks(gold.patch))),
        files=_files(task),
    )


def telling_lines(gold: Gold | None) -> dict[str, list[str]]:
    """Lines of the patches that hardly occur anywhere by chance, by the patch's name."""
    patches = {} if gold is None else _patches(gold)
    return {kind: list(dict.fromkeys(_added(patch))) for kind, patch in patches.items()}


def normal(line: bytes) -> bytes:
    """The line in the normal form of windows."""
    return b" ".join(line.split())


def windows_of(lines: list[bytes]) -> Iterator[Window]:
    """Each window of these normal lines; all lines as one window if there are fewer."""
    lines = [line for line in lines if line]
    for at in range(max(1, len(lines) - WINDOW_LINES + 1)):
        yield tuple(lines[at : at + WINDOW_LINES])


def _patches(gold: Gold) -> dict[str, str]:
    return {"solution": gold.patch, "hidden tests": gold.test_patch}


def _part(name: str, patch: str) -> AnswerPart:
    found: dict[Window, None] = {}
    for _, before, after in _hunks(patch):
        old = set(windows_of([normal(line) for line in before]))
        new = windows_of([normal(line) for line in after])
        found |= dict.fromkeys(window for window in new if window not in old)
    telling = [
        window
        for window in found
        if not all(_UNTELLING.match(line.decode("utf-8", "replace")) for line in window)
    ]
    sizes = {window: sum(map(len, window)) for window in telling}
    return AnswerPart(
        name=name,
        windows=tuple(window for window in telling if sizes[window] >= WINDOW_CHARS),
        near=tuple(window for window in telling if NEAR_CHARS <= sizes[window] < WINDOW_CHARS),
        lines=tuple(_bytes(line) for line in dict.fromkeys(_added(patch))),
    )


def _hunks(patch: str) -> Iterator[tuple[str, list[bytes], list[bytes]]]:
    """The path, the lines before and the lines after, of each hunk."""
    for section in diff.sections(_bytes(patch)):
        path = (section.old if section.new is None else section.new) or b""
        for hunk in section.hunks:
            before = [line for sign, line in hunk.lines if sign != b"+"]
            after = [line for sign, line in hunk.lines if sign != b"-"]
            yield path.decode("utf-8", "surrogateescape"), before, after


def _added(patch: str) -> Iterator[str]:
    for line in patch.splitlines():
        text = line[1:].strip()
        if not line.startswith("+") or line.startswith("+++ ") or len(text) < MIN_LINE_CHARS:
            continue
        if not _UNTELLING.match(text) and len(_WORD.findall(text)) > 1:
            yield text


def _is_long(line: str) -> bool:
    return len(line) >= LONG_LINE_CHARS and len(set(_WORD.findall(line))) >= LONG_LINE_WORDS


def _files(task: Task) -> tuple[tuple[int, str], ...]:
    verdict = task.verdict
    contents = [_bytes(verdict.eval_script)]
    if isinstance(verdict, ExitCode | R2eExpected | TestsJson):
        contents += [file.content for file in verdict.files]
    if isinstance(verdict, TestsJson):
        contents.append(_bytes(verdict.parser))
    return tuple((len(one), hashlib.sha256(one).hexdigest()) for one in contents if one.strip())


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def is_near(path: str, changed: tuple[str, ...]) -> bool:
    """Whether the file has the name of one that the known solution changes."""
    return posixpath.basename(path) in {posixpath.basename(one) for one in changed}


MAX_ANCHORS = 32
COMMON_IN = 5  # a line that this many files of the image contain is not evidence by itself

_SWAP = b"b0VIM"  # Vim keeps the lines of a file from the last to the first
ELF = b"\x7fELF"
_LINE_END = re.compile(rb"[\r\n\0]+")
_REMOVED, _ADDED = (b"-", b"<"), (b"+", b">")

Evidence = frozenset[Window]
"""Windows, and single lines as windows of one line."""


@dataclass(slots=True)
class Matcher:
    """Searches for one signature. A content is split into lines only if it contains an anchor, the longest line of some window."""

    signature: Signature
    _anchors: list[bytes] = field(default_factory=list[bytes])
    _windows: set[Window] = field(default_factory=set[Window])
    _lines: set[bytes] = field(default_factory=set[bytes])
    _lengths: set[int] = field(default_factory=set[int])

    def __post_init__(self) -> None:
        for part in self.signature.parts:
            self._windows.update(part.windows, part.near)
            self._lines.update(part.lines)
        self._lengths = {len(window) for window in self._windows}
        anchors = sorted({max(window, key=len) for part in self.signature.parts for window in part.windows})
        anchors = sorted({*anchors[:: len(anchors) // MAX_ANCHORS + 1], *self._few_lines()})
        self._anchors = [form for one in anchors for form in {one, one.replace(b'"', b'\\"')}]

    def _few_lines(self) -> Iterator[bytes]:
        for part in self.signature.parts:
            yield from part.lines[:: len(part.lines) // MAX_ANCHORS + 1]

    def evidence(self, content: bytes, *, near: bool) -> Evidence:
        """The evidence in the content; with `near`, the content is split in any case."""
        if content.startswith(ELF) or not (near or any(anchor in content for anchor in self._anchors)):
            return frozenset()
        found = set[Window]()
        for text in _texts(content):
            found.update((line,) for line in self._lines if line in text)
            for lines in _forms(text):
                for length in self._lengths:
                    found.update(
                        self._windows.intersection(zip(*(lines[at:] for at in range(length)), strict=False))
                    )
        return frozenset(found)


def is_answer(
    part: AnswerPart, found: set[Window] | Evidence, *, near: bool, loose: bool, common: set[Window]
) -> bool:
    """Whether this evidence is that of the part. `loose`: shorter lines count, in directories where authors of images leave files."""
    windows = {*part.windows, *(part.near if near else ())}
    lines = {(line,) for line in (part.lines if loose else part.long_lines)} - common
    return _enough(windows, found) or _enough(lines, found)


def _enough(wanted: set[Window], found: set[Window] | Evidence) -> bool:
    return len(wanted & found) >= min(ENOUGH, (len(wanted) + 1) // 2) > 0


def _texts(content: bytes) -> Iterator[bytes]:
    yield content
    if b"\\n" in content:
        yield (
            content.replace(b"\\\\", b"\0\0")
            .replace(b"\\n", b"\n")
            .replace(b"\\t", b"\t")
            .replace(b'\\"', b'"')
            .replace(b"\0\0", b"\\")
        )


def _forms(text: bytes) -> Iterator[list[bytes]]:
    """The normal lines of the text: in their order, in the order of a swap file, and, if the text is a diff, as its result."""
    lines = [line for line in map(normal, _LINE_END.split(text)) if line]
    yield lines
    if text.startswith(_SWAP):
        yield lines[::-1]
    for dropped, kept in ((_REMOVED, _ADDED), (_ADDED, _REMOVED)):  # the diff, and the diff that undoes it
        left = (line for line in _LINE_END.split(text) if not line.startswith((*dropped, b"@@")))
        stripped = (normal(line[1:] if line.startswith((*kept, b"!")) else line) for line in left)
        yield [line for line in stripped if line]
