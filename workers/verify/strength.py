"""Measures the strength of a task's tests: the production grader grades partial fixes, and the share that passes is the task's weakness.
Few partial fixes prove little: `Strength.interval` says how little.

Partial fixes are patches made from the known fix that are probably wrong: with a part of it undone, or with its code changed. Patches with
the same meaning as the fix, as no fix, or as each other are left out: they differ only in comments, docstrings, messages, annotations,
documentation or tests, or in branches that are never taken. Python code that would not parse is left out, too, because no test is needed to
reject it.
"""

import asyncio
import base64
import binascii
import difflib
import io
import posixpath
import random
import re
import shlex
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal, Protocol

from msgspec.structs import replace

from pipeline.diff import Section, applied, sections
from pipeline.request import Claim, Limits
from pipeline.task import ExitCode, SwebenchLog, Task, unpack
from pipeline.taskfile import Gold, Strength
from workers.grading.controls.patches import rewritten
from workers.grading.controls.spans import read
from workers.grading.defence.witness import touched_paths
from workers.grading.grade import Graded
from workers.sandbox.protocol import CommandResult
from workers.unqueued import Broken, tried, unqueued_claim
from workers.verify.mutations import Mutated, meaning_of, mutations

Kind = Literal["file", "hunk"] | Mutated

SHOWN_CHARS = 60  # characters of a line of code, in a description
_DOCUMENTATION = (".md", ".rst", ".adoc", ".pyi")
_DOCUMENTS = ("changes", "changelog", "history", "news", "authors", "contributors", "readme")
_COMMENT_AFTER = re.compile(rb"\s#[^'\"]*$")
_COMMENTS = (b"#", b"//", b"/*", b"*", b"--", b";")

_Edits = tuple[tuple[int, int, bytes], ...]
_Meaning = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class PartialFix:
    """One such patch; `what` describes in a line where and how it differs from the fix."""

    kind: Kind
    patch: bytes
    what: str


@dataclass(frozen=True, slots=True)
class _Block:
    """Lines that a diff puts in place of others, from byte `start` and line `number` of the new text on."""

    number: int
    start: int
    removed: tuple[bytes, ...]
    added: tuple[bytes, ...]

    @property
    def taken_back(self) -> tuple[int, int, bytes]:
        return self.start, self.start + sum(map(len, self.added)), b"".join(self.removed)

    def origins(self) -> list[bytes | None]:
        """The removed line that each added line replaces; None if it is new."""
        if len(self.added) == len(self.removed):
            return list(self.removed)
        return [next(iter(difflib.get_close_matches(line, self.removed, n=1)), None) for line in self.added]


@dataclass(frozen=True, slots=True)
class _Change:
    """A change that weakens the fix: it edits the new text of one section, or removes the section if `edits` is None."""

    kind: Kind
    section: int
    edits: _Edits | None
    what: str


def touched_files(fix: bytes) -> list[str]:
    """Paths of the files to which the fix applies, if they are Unicode text."""
    paths = [section.old for section in sections(fix) if section.old is not None]
    return [path.decode() for path in paths if _is_text(path)]


def partial_fixes(
    fix: bytes, texts: Mapping[str, bytes], *, tests: Collection[str], most: int, chance: random.Random
) -> list[PartialFix]:
    """Makes at most `most` partial fixes. The kinds alternate, and within a kind the places alternate.

    `texts` are the contents of `touched_files` before the fix, and `tests` are the paths of the hidden tests.
    """
    known_fix = _KnownFix(sections(fix), texts, tests)
    by_kind: dict[Kind, list[_Change]] = defaultdict(list)
    for change in known_fix.changes():
        by_kind[change.kind].append(change)
    waiting: dict[Kind, deque[_Change]] = {
        kind: _in_turn(changes, chance) for kind, changes in by_kind.items()
    }
    seen = {known_fix.meaning(None), known_fix.meaning_of_base()}
    found: list[PartialFix] = []
    while len(found) < most and any(waiting.values()):
        for kind, changes in waiting.items():
            made = _next(known_fix, changes, seen) if len(found) < most else None
            if made is not None:
                found.append(PartialFix(kind, *made))
    return found


def _in_turn(changes: list[_Change], chance: random.Random) -> deque[_Change]:
    """Returns the changes in a random order in which every place comes once before any place comes a second time."""
    chance.shuffle(changes)
    times = Counter[tuple[int, int]]()
    turns: list[tuple[int, _Change]] = []
    for change in changes:
        place = (change.section, change.edits[0][0] if change.edits else 0)
        turns.append((times[place], change))
        times[place] += 1
    return deque(change for _, change in sorted(turns, key=itemgetter(0)))


def _next(
    known_fix: "_KnownFix", changes: deque[_Change], seen: set[_Meaning | None]
) -> tuple[bytes, str] | None:
    """The patch and description of the first of these changes with a new meaning. Removes it, and those before it."""
    while changes:
        change = changes.popleft()
        meaning, patch = known_fix.meaning(change), known_fix.patch(change)
        if meaning is not None and meaning not in seen and patch:
            seen.add(meaning)
            return patch, change.what
    return None


class _KnownFix:
    """The sections of a fix, and the known old and new texts of each."""

    def __init__(self, parts: Sequence[Section], texts: Mapping[str, bytes], tests: Collection[str]) -> None:
        self._sections = parts
        self._tests = tests
        self._old = [_old_text(section, texts) for section in parts]
        self._new = [
            applied(section, old) if old is not None and section.new is not None else None
            for section, old in zip(parts, self._old, strict=True)
        ]
        # Whether this interpreter can parse the Python code of the fix; code of another version is compared as text.
        self._parses = all(
            new is None or read(new) is not None
            for section, new in zip(parts, self._new, strict=True)
            if _path(section).endswith(".py")
        )

    def changes(self) -> Iterator[_Change]:
        """Every way in which a part may be undone, or changed."""
        for number, section in enumerate(self._sections):
            path = _path(section)
            yield _Change("file", number, None, f"{path}: taken back")
            old, new = self._old[number], self._new[number]
            if old is None or new is None:
                continue
            hunks = list(_blocks(section, old))
            for blocks in hunks:
                yield _Change(
                    "hunk", number, tuple(block.taken_back for block in blocks), _hunk_words(path, blocks)
                )
                for block in blocks:
                    yield from _lines_back(number, path, block)
            if path.endswith(".py"):
                for one in mutations(new, *_lines_of_fix(block for blocks in hunks for block in blocks)):
                    edit = (one.start, one.end, one.becomes)
                    yield _Change(one.kind, number, (edit,), f"{path}:{one.lines.start}: {_short(one.what)}")

    def patch(self, change: _Change) -> bytes | None:
        """The fix with this change, as a diff; None if it cannot be written."""
        parts = [
            section.raw if number != change.section else self._changed(number, change.edits)
            for number, section in enumerate(self._sections)
        ]
        return None if None in parts else b"".join(part or b"" for part in parts)

    def meaning(self, change: _Change | None) -> _Meaning | None:
        """The meaning of the repository with the fix, or with the changed fix: equal for patches that differ in nothing that matters. None
        if it contains code that does not parse.
        """
        files: list[object] = []
        for number in range(len(self._sections)):
            if change is None or number != change.section:
                files.append(self._meaning_after(number, ()))
            elif change.edits is None:
                files.append(self._meaning_before(number))
            else:
                files.append(self._meaning_after(number, change.edits))
        return None if None in files else tuple(files)

    def meaning_of_base(self) -> _Meaning:
        """The meaning of the repository without any fix."""
        return tuple(self._meaning_before(number) for number in range(len(self._sections)))

    def _changed(self, number: int, edits: _Edits | None) -> bytes | None:
        """A section with these edits; empty if it would change nothing, or is left out. None if it cannot be written."""
        section, old = self._sections[number], self._old[number]
        if edits is None or old is None:
            return b""
        if _edited(self._new[number] or b"", edits) == old and section.old in (None, section.new):
            return b""
        return rewritten(section, old, edits)

    def _meaning_before(self, number: int) -> object:
        section, old = self._sections[number], self._old[number]
        return "as before" if old is None else self._meaning(section, section.old, old)

    def _meaning_after(self, number: int, edits: _Edits) -> object:
        section, new = self._sections[number], self._new[number]
        return section.raw if new is None else self._meaning(section, section.new, _edited(new, edits))

    def _meaning(self, section: Section, path: bytes | None, text: bytes) -> object:
        """The meaning of a file at `path` with this text; None if it is code that does not parse."""
        name = _path(section)
        if _is_no_code(name) or name in self._tests:
            return ""
        dumped = meaning_of(text) if name.endswith(".py") else None
        if dumped is not None:
            return path, dumped
        if name.endswith(".py") and self._parses:
            return None
        lines = (line.strip() for line in text.split(b"\n"))
        return path, tuple(line for line in lines if line and not line.startswith(_COMMENTS))


def _edited(text: bytes, edits: _Edits) -> bytes:
    for start, end, becomes in sorted(edits, reverse=True):
        text = text[:start] + becomes + text[end:]
    return text


def _old_text(section: Section, texts: Mapping[str, bytes]) -> bytes | None:
    """The text to which a section applies; None if that is not known, or the section is not a plain change of text."""
    if not section.readable:
        return None
    if section.old is None:
        return b""
    return texts.get(section.old.decode()) if _is_text(section.old) else None


def _blocks(section: Section, old: bytes) -> Iterator[list[_Block]]:
    """The changed blocks of each hunk."""
    old_lines = io.BytesIO(old).readlines()  # git, too, ends lines with LF alone
    at = offset = 0  # position in lines of the old text, and offset in bytes of the new one
    number = 1
    for hunk in section.hunks:
        has_old = any(sign != b"+" for sign, _ in hunk.lines)
        start = hunk.old_start - 1 if has_old else hunk.old_start
        offset += sum(map(len, old_lines[at:start]))
        number += start - at
        at = start
        blocks: list[_Block] = []
        removed: list[bytes] = []
        added: list[bytes] = []
        for sign, line in (*hunk.lines, (b" ", b"")):
            if sign != b" ":
                (removed if sign == b"-" else added).append(line)
                at += sign == b"-"
                continue
            if removed or added:
                blocks.append(_Block(number, offset, tuple(removed), tuple(added)))
                offset, number = offset + sum(map(len, added)), number + len(added)
                removed, added = [], []
            if line:
                at, offset, number = at + 1, offset + len(line), number + 1
        yield blocks


def _lines_back(section: int, path: str, block: _Block) -> Iterator[_Change]:
    """Undoes one changed line: it is replaced by the line that it replaced, left out if it is new, or restored if it was removed."""
    offset = block.start
    for number, (line, origin) in enumerate(zip(block.added, block.origins(), strict=True), block.number):
        edits = ((offset, offset + len(line), origin or b""),)
        how = "left out" if origin is None else "taken back"
        yield _Change("line", section, edits, f"{path}:{number}: line {how}: {_shown(line)}")
        offset += len(line)
    for line in () if block.added else block.removed:
        edits = ((block.start, block.start, line),)
        yield _Change("line", section, edits, f"{path}:{block.number}: line kept: {_shown(line)}")


def _lines_of_fix(blocks: Iterable[_Block]) -> tuple[set[int], set[int]]:
    """Numbers of the lines whose code the fix changes, and of those among them that are new."""
    changed: set[int] = set()
    new: set[int] = set()
    for block in blocks:
        for number, (line, origin) in enumerate(zip(block.added, block.origins(), strict=True), block.number):
            if origin is None:
                new.add(number)
            if origin is None or _code(line) != _code(origin):
                changed.add(number)
    return changed, new


def _code(line: bytes) -> bytes:
    """A line of Python without its indentation and its comment."""
    return _COMMENT_AFTER.sub(b"", line).strip()


def _hunk_words(path: str, blocks: Sequence[_Block]) -> str:
    if not blocks:
        return path
    first, last = blocks[0].number, blocks[-1].number + max(len(blocks[-1].added) - 1, 0)
    return f"{path}:{first}: hunk taken back" if first == last else f"{path}:{first}-{last}: hunk taken back"


def _is_no_code(path: str) -> bool:
    """Whether no fix depends on the file: documentation, stubs, tests."""
    name, folders = posixpath.basename(path).lower(), posixpath.dirname(path).split("/")
    return (
        name.endswith(_DOCUMENTATION)
        or name.partition(".")[0] in _DOCUMENTS
        or name.startswith("test_")
        or name.endswith(("_test.py", "_tests.py"))
        or name == "conftest.py"
        or folders[0] in ("doc", "docs")
        or "tests" in folders
    )


def _path(section: Section) -> str:
    return (section.new or section.old or b"").decode("utf-8", "replace")


def _is_text(path: bytes) -> bool:
    try:
        path.decode()
    except UnicodeDecodeError:
        return False
    return True


def _shown(line: bytes) -> str:
    return _short(line.decode("utf-8", "replace").strip())


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"


DOES_NOT_APPLY = "patch does not apply"  # the grader's text for it
READ_S = 60.0
# Limits for the CPU time and the wall time of a partial fix, as multiples of those of the tests with the known fix, which count as at
# least these seconds. After the wall time, tests are stopped only if they no longer use the CPU.
MOST_CPU_FACTOR, LEAST_CPU_S = 20.0, 1.0
MOST_WALL_FACTOR, LEAST_WALL_S = 20.0, 15.0
KEEP_BYTES = 32 * 1024 * 1024  # bytes kept of each end of the files that a fix touches, in base64

# Prints one line for each argument: the file in base64, or "-" if it is not a file.
_READ = 'for path; do if [ -f "$path" ]; then base64 -w 0 -- "$path" && echo || exit 1; else echo -; fi; done'


class GradesPartialFixes(Protocol):
    """The production grader. Raises RolloutError; never returns a verdict for an infrastructure failure."""

    async def grade_with_log(self, claim: Claim, patch: bytes) -> Graded: ...


class Base(Protocol):
    """A container of the task, set up, without any patch. Raises SandboxError."""

    async def run(
        self, command: str, *, timeout_s: float, keep_bytes: int = 0, plain: bool = False
    ) -> CommandResult: ...


class OpensBases(Protocol):
    """Opens a container of the claim's task as the grader does."""

    def open(self, claim: Claim, *, role: Literal["grade"]) -> AbstractAsyncContextManager[Base]: ...


@dataclass(frozen=True, slots=True)
class Measured:
    """The strength of a task's tests; None if no partial fix could be graded. `warning` names what could not be graded."""

    strength: Strength | None
    warning: str = ""


@dataclass(frozen=True, slots=True)
class StrengthMeter:
    """Grades partial fixes of tasks, at most `most` of each task."""

    grader: GradesPartialFixes
    sandboxes: OpensBases
    limits: Limits
    most: int
    image_fix: str  # what to do about an image that is not on this host

    async def measure(self, task: Task, gold: Gold, *, on_fix: Callable[[int, int], None]) -> Measured:
        """The strength of the tests of a calibrated task; `on_fix` gets the number of the partial fix that begins, and of all."""
        fix = gold.patch.encode("utf-8", "surrogateescape")
        paths = touched_files(fix)
        texts = await tried(lambda: self._texts(task, paths), task, image_fix=self.image_fix)
        if isinstance(texts, Broken):
            return Measured(None, f"strength: the files of the fix could not be read: {texts.why}")
        chance = random.Random(fix)  # the seed makes tests of the same fix comparable
        made = await asyncio.to_thread(
            partial_fixes, fix, texts, tests=_test_paths(task, gold), most=self.most, chance=chance
        )
        limits = partial_fix_limits(self.limits, task)
        num_graded, broken = 0, list[str]()
        passing: list[PartialFix] = []
        for number, one in enumerate(made, 1):
            on_fix(number, len(made))
            graded = await self._graded(task, one.patch, limits)
            if isinstance(graded, Broken):
                broken.append(graded.why)
            elif graded.reward.decided_by != DOES_NOT_APPLY:
                num_graded += 1
                passing += [one] * graded.reward.resolved
        warning = (
            f"strength: {len(broken)} of {len(made)} partial fixes could not be graded: {broken[0]}"
            if broken
            else ""
        )
        if broken and not num_graded:
            return Measured(None, warning)
        return Measured(
            Strength(num_partial_fixes=num_graded, passing=tuple(one.what for one in passing)), warning
        )

    async def _graded(self, task: Task, patch: bytes, limits: Limits) -> Graded | Broken:
        claim = unqueued_claim(task, command="verify", limits=limits)
        return await tried(lambda: self.grader.grade_with_log(claim, patch), task, image_fix=self.image_fix)

    async def _texts(self, task: Task, paths: Sequence[str]) -> dict[str, bytes]:
        """The contents of these files in the workdir, without those that are missing or too large to keep."""
        claim = unqueued_claim(task, command="verify", limits=self.limits)
        async with self.sandboxes.open(claim, role="grade") as base:
            command = f"set -- {shlex.join(paths)}\n{_READ}"
            result = await base.run(command, timeout_s=READ_S, keep_bytes=KEEP_BYTES, plain=True)
        lines = result.output.splitlines()
        if result.exit_code != 0 or result.dropped_bytes or len(lines) != len(paths):
            return {}
        try:
            return {
                path: base64.b64decode(line, validate=True)
                for path, line in zip(paths, lines, strict=True)
                if line != b"-"
            }
        except binascii.Error:
            return {}


def partial_fix_limits(limits: Limits, task: Task) -> Limits:
    """The limits of the grading of a partial fix: some never end, and some wait forever."""
    calibration = unpack(task.calibration)
    if calibration is None or not calibration.control_cpu_s:
        return limits
    most_cpu_s = MOST_CPU_FACTOR * max(calibration.control_cpu_s, LEAST_CPU_S)
    most_wall_s = MOST_WALL_FACTOR * max(calibration.control_wall_s, LEAST_WALL_S)
    return replace(
        limits,
        grade_cpu_s=min(limits.grade_cpu_s, most_cpu_s),
        grade_wall_s=min(limits.grade_wall_s, most_wall_s),
    )


def _test_paths(task: Task, gold: Gold) -> frozenset[str]:
    """Paths of the hidden tests. A change of these is not part of a fix."""
    verdict = task.verdict
    files = () if isinstance(verdict, SwebenchLog) else verdict.files
    patch = gold.test_patch.encode("utf-8", "surrogateescape")
    patch += verdict.test_patch if isinstance(verdict, ExitCode) else b""
    return frozenset((*verdict.protected_paths, *(file.path for file in files), *touched_paths(patch)))
