"""Patches made of the known fix that are probably wrong: with a part of it taken back, or with its code changed.

Left out are those that mean the same as the fix, as no fix, or as each other: they differ in comments, docstrings, messages, annotations,
documentation or tests only. Python code that would not parse is left out too, because no test is needed to find that out.
"""

import ast
import difflib
import io
import posixpath
import random
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from workers.grading.controls.patches import Section, applied, rewritten, sections
from workers.grading.controls.spans import read
from workers.verify.mutations import bodies, mutations, tells_people

Kind = Literal["file", "hunk", "line", "literal", "comparison"]

SHOWN_CHARS = 60  # of a line of code, in a description
_DOCUMENTATION = (".md", ".rst", ".adoc", ".pyi")
_DOCUMENTS = ("changes", "changelog", "history", "news", "authors", "contributors", "readme")
_COMMENT_AFTER = re.compile(rb"\s#[^'\"]*$")
_COMMENTS = (b"#", b"//", b"/*", b"*", b"--", b";")

_Edits = tuple[tuple[int, int, bytes], ...]
_Meaning = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class PartialFix:
    """One such patch; `what` says in a line where and how it differs from the fix."""

    kind: Kind
    patch: bytes
    what: str


@dataclass(frozen=True, slots=True)
class _Block:
    """Lines that a diff puts in the place of others, from byte `start` and line `number` of the new text."""

    number: int
    start: int
    removed: tuple[bytes, ...]
    added: tuple[bytes, ...]

    @property
    def taken_back(self) -> tuple[int, int, bytes]:
        return self.start, self.start + sum(map(len, self.added)), b"".join(self.removed)

    def origins(self) -> list[bytes | None]:
        """For each added line the removed one that it replaces; None if it is new."""
        if len(self.added) == len(self.removed):
            return list(self.removed)
        return [next(iter(difflib.get_close_matches(line, self.removed, n=1)), None) for line in self.added]


@dataclass(frozen=True, slots=True)
class _Change:
    """The fix with `edits` of the new text of one of its sections; with None, without that section."""

    kind: Kind
    section: int
    edits: _Edits | None
    what: str


def touched_files(fix: bytes) -> list[str]:
    """Paths of the files that the fix is made on, as far as they are Unicode text."""
    paths = [section.old for section in sections(fix) if section.old is not None]
    return [path.decode() for path in paths if _is_text(path)]


def partial_fixes(
    fix: bytes, texts: Mapping[str, bytes], *, tests: Collection[str], most: int, chance: random.Random
) -> list[PartialFix]:
    """At most `most` partial fixes, drawn evenly over their kinds. `texts` are the contents of `touched_files` before the fix, and
    `tests` paths of the hidden tests.
    """
    known_fix = _KnownFix(sections(fix), texts, tests)
    waiting: dict[Kind, list[_Change]] = defaultdict(list)
    for change in known_fix.changes():
        waiting[change.kind].append(change)
    for changes in waiting.values():
        chance.shuffle(changes)
    seen = {known_fix.meaning(None), known_fix.meaning_of_base()}
    found: list[PartialFix] = []
    while len(found) < most and any(waiting.values()):
        for kind, changes in waiting.items():
            made = _next(known_fix, changes, seen) if len(found) < most else None
            if made is not None:
                found.append(PartialFix(kind, *made))
    return found


def _next(
    known_fix: "_KnownFix", changes: list[_Change], seen: set[_Meaning | None]
) -> tuple[bytes, str] | None:
    """Patch and description of the first of these changes that means something new. Takes it, and those before it, out."""
    while changes:
        change = changes.pop()
        meaning, patch = known_fix.meaning(change), known_fix.patch(change)
        if meaning is not None and meaning not in seen and patch:
            seen.add(meaning)
            return patch, change.what
    return None


class _KnownFix:
    """The sections of a fix, and the old and the new text of each as far as they are known."""

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
        """Every way in which a part may be taken back, or changed."""
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
        """The fix so changed, as a diff; None if it cannot be written."""
        parts = [
            section.raw if number != change.section else self._changed(number, change.edits)
            for number, section in enumerate(self._sections)
        ]
        return None if None in parts else b"".join(part or b"" for part in parts)

    def meaning(self, change: _Change | None) -> _Meaning | None:
        """What the repository is like with the fix, or with the fix so changed: equal for patches that differ in nothing that
        matters. None if it contains code that does not parse.
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
        """What it is like without any fix."""
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
        """Of a file at `path` with this text; None if it is code that does not parse."""
        name = _path(section)
        if _is_no_code(name) or name in self._tests:
            return ""
        dumped = _dumped(text) if name.endswith(".py") else None
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
    """The text that a section is made on; None if that is not known, or the section is no plain change of text."""
    if not section.readable:
        return None
    if section.old is None:
        return b""
    return texts.get(section.old.decode()) if _is_text(section.old) else None


def _blocks(section: Section, old: bytes) -> Iterator[list[_Block]]:
    """The changed blocks of each hunk."""
    old_lines = io.BytesIO(old).readlines()  # they end with LF alone, as for git
    at = offset = 0  # in lines of the old text, and in bytes of the new one
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
    """One changed line taken back: replaced by the line that it replaced, left out if it is new, restored if it was removed."""
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


def _dumped(text: bytes) -> str | None:
    """Python code without layout, docstrings, annotations of functions, log lines and messages of errors; None if it does not parse."""
    file = read(text)
    if file is None:
        return None
    for node in ast.walk(file.tree):
        for body in bodies(node):
            body[:] = [one for one in body if not tells_people(one)]
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str())), *rest]:
                    node.body = rest
                case _:
                    pass
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        match node:
            case ast.Raise(exc=ast.Call() as error):
                error.args = [one for one in error.args if not _is_message(one)]
            case _:
                pass
    try:
        return ast.dump(file.tree)
    except RecursionError:
        return text.decode("utf-8", "replace")


def _is_message(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


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
