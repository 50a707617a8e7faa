"""Takes patches apart: which files a patch touches, and one patch per file."""

import re
from collections.abc import Callable, Iterator

from trainer.tasksets.fields import Fields

_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_SAME = re.compile(r"diff --git a/(.+) b/\1")
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_BOTH_QUOTED = re.compile(rf"diff --git ({_QUOTED}) ({_QUOTED})")
_NAMED = re.compile(r"(?:--- |\+\+\+ |rename (?:from|to) |copy to )(.+)")
_C_STRING = re.compile(r'"((?:[^"\\]|\\[abtnvfr"\\]|\\[0-3][0-7]{2})*)"')
_ESCAPE = re.compile(rb"\\([0-3][0-7]{2}|.)")
_ESCAPED = dict(zip(b'abtnvfr"\\', b'\a\b\t\n\v\f\r"\\', strict=True))


def paths_of(patch: str) -> tuple[str, ...]:
    """Every path that a git or unified diff touches, old names and new, in order of appearance.

    Raises ValueError for a name in quotes that git could not have written, or that is not UTF-8.
    """
    paths: dict[str, None] = {}
    for line, in_hunk in _lines(patch):
        if in_hunk:
            continue
        line = line.rstrip("\r\n")
        if same := _SAME.fullmatch(line):  # all there is of an empty or binary file, or of a changed mode
            paths[same[1]] = None
        elif quoted := _BOTH_QUOTED.fullmatch(line):
            paths |= dict.fromkeys(_path(name, prefixed=True) for name in quoted.groups())
        elif named := _NAMED.fullmatch(line):
            path = _path(named[1], prefixed=line[0] in "-+")
            if path:
                paths[path] = None
    return tuple(paths)


def sections(patch: str) -> list[str]:
    """`patch` in pieces, one per file; joined they are the patch."""
    pieces: list[list[str]] = []
    named = True  # the piece under way has its "---" line: another one begins the next piece
    for line, in_hunk in _lines(patch):
        begins = not in_hunk and (line.startswith("diff --git ") or (named and line.startswith("--- ")))
        if begins or not pieces:
            pieces.append([])
        if not in_hunk and line.startswith(("diff --git ", "--- ")):
            named = line.startswith("--- ")
        pieces[-1].append(line)
    return ["".join(piece) for piece in pieces]


def divided(patch: str, belongs: Callable[[str], bool]) -> tuple[str, str]:
    """`patch` in two: the files with a path that `belongs`, and the others."""
    chosen: list[str] = []
    others: list[str] = []
    for section in sections(ended(patch)):
        (chosen if any(belongs(path) for path in paths_of(section)) else others).append(section)
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
    """`patch` with a newline at its end, without which git calls it corrupt; "" stays ""."""
    return patch if not patch or patch.endswith("\n") else patch + "\n"


def _lines(patch: str) -> Iterator[tuple[str, bool]]:
    """Lines with their ends, and whether each is content of a hunk."""
    left = 0  # lines of the hunk under way, counted once for each side they stand on
    for line in re.findall(r"[^\n]*\n|[^\n]+", patch):
        yield line, left > 0
        if left > 0:
            left -= {"+": 1, "-": 1, "\\": 0}.get(line[:1], 2)
        elif hunk := _HUNK.match(line):
            left = sum(1 if count is None else int(count) for count in hunk.groups())


def _path(name: str, *, prefixed: bool) -> str:
    name = _unquoted(name.split("\t", 1)[0])
    if name == "/dev/null":
        return ""
    return name.split("/", 1)[-1] if prefixed else name


def _unquoted(name: str) -> str:
    """`name` itself, or what git means by it: in quotes, bytes may be C's escapes or stand as they are."""
    if not name.startswith('"'):
        return name
    quoted = _C_STRING.fullmatch(name)
    if not quoted:
        raise ValueError(f"not a name as git quotes it: {name[:80]!r}")
    try:
        return _ESCAPE.sub(_byte, quoted[1].encode()).decode()
    except UnicodeError as error:
        raise ValueError(f"a name that is not UTF-8: {name[:80]!r}") from error


def _byte(escape: re.Match[bytes]) -> bytes:
    code = escape[1]
    return bytes([int(code, 8) if code.isdigit() else _ESCAPED[code[0]]])
