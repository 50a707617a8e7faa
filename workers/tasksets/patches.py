"""Patches: the files that one touches, its division by file, and the reverse patch.

Nothing is guessed. A change that git itself could not undo from the diff alone (a copy, binary files without their content) is refused.
"""

import re
from collections.abc import Callable, Iterator

from pipeline import diff
from workers.tasksets.rows import Fields


def paths_of(patch: str) -> tuple[str, ...]:
    """Every path that a git or unified diff touches. Raises ValueError for a name that cannot be read."""
    return diff.paths_of(_bytes(patch))


def divided(patch: str, belongs: Callable[[str], bool]) -> tuple[str, str]:
    """Two parts of `patch`: the files with a path for which `belongs` is true, and the others."""
    chosen: list[str] = []
    others: list[str] = []
    for section in diff.sections(_bytes(ended(patch))):
        text = section.raw.decode("utf-8", "surrogatepass")
        (chosen if any(belongs(path) for path in diff.paths_of(section.raw)) else others).append(text)
    return "".join(chosen), "".join(others)


def diff_in(fields: Fields, name: str) -> str:
    """The diff in the field `name`, with a newline at its end. Raises ValueError if it names no file that can be read."""
    patch = ended(fields.text(name))
    try:
        paths = paths_of(patch)
    except ValueError as error:
        raise fields.refusal(name, str(error)) from error
    if not paths:
        raise fields.refusal(name, "not a diff: it names no file")
    return patch


def optional_diff_in(fields: Fields, name: str) -> str:
    """The same, or "" if the field is absent or blank. Raises ValueError."""
    return diff_in(fields, name) if fields.optional_text(name).strip() else ""


def ended(patch: str) -> str:
    """`patch` with a newline at its end, without which git considers it corrupt; "" stays ""."""
    return patch if not patch or patch.endswith("\n") else patch + "\n"


def _bytes(patch: str) -> bytes:
    return patch.encode("utf-8", "surrogatepass")


_WHOLE_HUNK_LINE = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)")
_SAME_NAMES = re.compile(r"(a/(.+)) (b/\2)")
_QUOTED_NAMES = re.compile(r'("(?:[^"\\]|\\.)*"|[^ ]+) ("(?:[^"\\]|\\.)*"|[^ ]+)')
_PAIRS = (
    ("old mode ", "new mode "),
    ("new file mode ", "deleted file mode "),
    ("rename from ", "rename to "),
)
_SWAPPED = dict(_PAIRS) | {new: old for old, new in _PAIRS}
_ORDER = ("old mode ", "rename from ")  # the first line of each pair
_KEPT = ("similarity index ", "dissimilarity index ")
_BINARY_PARTS = 2  # the change and its reverse


class Irreversible(ValueError):
    """The diff lacks what is needed to undo it."""


def reversed_patch(patch: str) -> str:
    """The diff that undoes `patch`. Raises Irreversible, naming the line's number, from 1."""
    lines = _Lines(patch)
    reversed_lines: list[str] = []
    while lines.left:
        reversed_lines += _file(lines)
    if not reversed_lines:
        raise Irreversible("no file's diff in it")
    return "".join(line + "\n" for line in reversed_lines)


class _Lines:
    """Lines of a patch, taken one by one; only a line feed ends one."""

    def __init__(self, patch: str) -> None:
        self._lines = patch.removesuffix("\n").split("\n")
        self._at = 0
        self._skip_preamble()

    @property
    def left(self) -> bool:
        return self._at < len(self._lines)

    def peek(self) -> str:
        return self._lines[self._at] if self.left else ""

    def take(self) -> str:
        self._at += 1
        return self._lines[self._at - 1]

    def starts_file(self) -> bool:
        line = self.peek()
        following = self._lines[self._at + 1] if self._at + 1 < len(self._lines) else ""
        return line.startswith("diff --git ") or (line.startswith("--- ") and following.startswith("+++ "))

    def refusal(self, why: str) -> Irreversible:
        return Irreversible(f"line {self._at}: {why}")

    def _skip_preamble(self) -> None:
        """Skips a mail's header or a commit's message, which are not part of the change."""
        while self.left and not self.starts_file():
            self.take()


def _file(lines: _Lines) -> list[str]:
    """One file's part, with its header."""
    header: list[str] = []
    if lines.peek().startswith("diff --git "):
        line = lines.take()
        extended = list(_extended(lines))
        header = [f"diff --git {_names(lines, line.removeprefix('diff --git '))}", *_in_order(extended)]
    if lines.peek() == "GIT binary patch":
        return header + _binary(lines)
    if lines.peek().startswith("--- "):
        old = lines.take().removeprefix("--- ")
        if not lines.peek().startswith("+++ "):
            raise lines.refusal("no line +++ after it")
        new = lines.take().removeprefix("+++ ")
        header += [f"--- {_renamed(new, 'b/', 'a/')}", f"+++ {_renamed(old, 'a/', 'b/')}"]
    return header + _hunks(lines)


def _extended(lines: _Lines) -> Iterator[str]:
    """The header lines between `diff --git` and the content, reversed."""
    while lines.left and not lines.starts_file():
        line = lines.peek()
        if line.startswith(("@@ ", "--- ")) or line == "GIT binary patch":
            return
        lines.take()
        if not line.strip():
            continue
        yield _turned(lines, line)


def _turned(lines: _Lines, line: str) -> str:
    if line.startswith(("copy from ", "copy to ")):
        raise lines.refusal("a copy: what the reverse would remove is not in the diff")
    if line.startswith("Binary files "):
        raise lines.refusal("a binary file without its content")
    if line.startswith("index "):
        hashes, *mode = line.removeprefix("index ").split(" ")
        old, _, new = hashes.partition("..")
        return " ".join([f"index {new}..{old}", *mode])
    for start, swapped in _SWAPPED.items():
        if line.startswith(start):
            return swapped + line.removeprefix(start)
    if line.startswith(_KEPT):
        return line
    raise lines.refusal(f"not a line of a git diff's header: {line[:80]!r}")


def _in_order(extended: list[str]) -> list[str]:
    """The header lines in the order in which git writes and reads them: old before new, and from before to."""
    for start in _ORDER:
        found = next((place for place, line in enumerate(extended) if line.startswith(start)), 0)
        if found and extended[found - 1].startswith(_SWAPPED[start]):
            extended[found - 1 : found + 1] = [extended[found], extended[found - 1]]
    return extended


def _names(lines: _Lines, names: str) -> str:
    """`a/old b/new` as `a/new b/old`; names with spaces are recognised because both are the same."""
    found = _SAME_NAMES.fullmatch(names)
    if found:
        return names
    found = _QUOTED_NAMES.fullmatch(names)
    if not found:
        middle = names.rfind(" b/")
        if middle < 0 or names.find(" b/") != middle:
            raise lines.refusal(f"cannot tell the two names apart: {names[:120]!r}")
        return f"{_renamed(names[middle + 1 :], 'b/', 'a/')} {_renamed(names[:middle], 'a/', 'b/')}"
    return f"{_renamed(found[2], 'b/', 'a/')} {_renamed(found[1], 'a/', 'b/')}"


def _renamed(name: str, old_prefix: str, new_prefix: str) -> str:
    quote = '"' if name.startswith('"') else ""
    bare = name.removeprefix('"')
    return quote + new_prefix + bare.removeprefix(old_prefix) if bare.startswith(old_prefix) else name


def _hunks(lines: _Lines) -> list[str]:
    """Hunks up to the next file; blank lines after the last are dropped."""
    hunks: list[str] = []
    while lines.left and not lines.starts_file():
        line = lines.take()
        if not line.strip() or line == "-- ":  # the signature of a mailed patch
            _rest(lines)
            break
        found = _WHOLE_HUNK_LINE.fullmatch(line)
        if not found:
            raise lines.refusal(f"not the header of a hunk: {line[:80]!r}")
        old = found[1] + (f",{found[2]}" if found[2] else "")
        new = found[3] + (f",{found[4]}" if found[4] else "")
        hunks += [f"@@ -{new} +{old} @@{found[5]}"]
        hunks += _hunk(lines, int(found[2] or 1), int(found[4] or 1))
    return hunks


def _rest(lines: _Lines) -> None:
    while lines.left and not lines.starts_file():
        lines.take()


def _hunk(lines: _Lines, num_old: int, num_new: int) -> list[str]:
    """A hunk's lines; within one change, deleted lines still come before added ones."""
    body: list[str] = []
    removed: list[str] = []
    added: list[str] = []
    last = body
    while num_old > 0 or num_new > 0 or lines.peek().startswith("\\"):
        if not lines.left:
            raise lines.refusal("the hunk ends early")
        line = lines.take()
        match line[:1]:
            case "+":
                removed.append("-" + line[1:])
                num_new, last = num_new - 1, removed
            case "-":
                added.append("+" + line[1:])
                num_old, last = num_old - 1, added
            case "\\":
                last.append(line)
            case " " | "" | "\r":
                body += [*removed, *added, line]
                removed, added = [], []
                num_old, num_new, last = num_old - 1, num_new - 1, body
            case _:
                raise lines.refusal(f"not a line of a hunk: {line[:80]!r}")
    if num_old or num_new:
        raise lines.refusal("the hunk is longer than its header says")
    return [*body, *removed, *added]


def _binary(lines: _Lines) -> list[str]:
    """Both parts of a binary change, the reverse first."""
    first = lines.take()
    parts: list[list[str]] = []
    while lines.left and lines.peek().startswith(("literal ", "delta ")):
        part = [lines.take()]
        while lines.left and lines.peek():
            part.append(lines.take())
        if lines.left:
            lines.take()
        parts.append(part)
    if len(parts) != _BINARY_PARTS:
        raise lines.refusal("a binary change without its reverse")
    return [first, *parts[1], "", *parts[0], ""]
