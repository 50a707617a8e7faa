"""Which files a patch is about."""

import ast
import re

_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_SAME = re.compile(r"diff --git a/(.+) b/\1")
_NAMED = re.compile(r"(?:--- |\+\+\+ |rename (?:from|to) |copy to )(.+)")


def paths_of(patch: str) -> tuple[str, ...]:
    """Every path that a git or unified diff touches, old names and new, in order of appearance."""
    paths: dict[str, None] = {}
    left = 0  # lines of the hunk under way, counted once for each side they stand on
    for line in patch.splitlines():
        if left > 0:
            left -= {"+": 1, "-": 1, "\\": 0}.get(line[:1], 2)
        elif hunk := _HUNK.match(line):
            left = sum(1 if count is None else int(count) for count in hunk.groups())
        elif same := _SAME.fullmatch(line):  # all there is of an empty or binary file, or of a changed mode
            paths[same[1]] = None
        elif named := _NAMED.fullmatch(line):
            path = _path(named[1], prefixed=line[0] in "-+")
            if path:
                paths[path] = None
    return tuple(paths)


def _path(name: str, *, prefixed: bool) -> str:
    name = name.split("\t", 1)[0]
    if name.startswith('"'):
        name = ast.literal_eval(f"b{name}").decode("utf-8", "surrogateescape")
    if name == "/dev/null":
        return ""
    return name.split("/", 1)[-1] if prefixed else name
