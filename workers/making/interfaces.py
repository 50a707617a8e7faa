"""What hidden tests use of the code that exists only with the fix: a problem that does not say it could not be solved from its text.

A declaration is expected if only the fix brings it in this form, and a line that the hidden tests add uses its name. It is shown without
its body, without the values of defaults, and without what it is equal to, so that it tells how the code is called and not what it does.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath

from pipeline import diff
from workers.making.ecosystems.ecosystem import Declaration

_HEADING = "Expected interface:"


def expected(
    old: Iterable[tuple[str, Declaration]],
    new: Iterable[tuple[str, Declaration]],
    tests: str,
    namespace: Callable[[str], str] = str,
) -> tuple[str, ...]:
    """The declarations that the tests use and that are not among the old ones, each as a line of a list. Both are given with the path of
    their file; `namespace` says what tests name to get at what is in it. `tests` is the difference of the hidden tests.

    One that was elsewhere, or that a file imports, is expected only if the tests take it from there.
    """
    known = frozenset((namespace(path), one) for path, one in old)
    elsewhere = frozenset(one for _, one in known)
    lines = [
        line for section in diff.sections(tests.encode()) for hunk in section.hunks for line in hunk.lines
    ]
    added, left = (
        "\n".join(line.decode("utf-8", "replace") for sign, line in lines if sign in signs)
        for signs in ((b"+",), (b"+", b" "))
    )
    words = frozenset(re.findall(r"\w+", added))

    def is_expected(path: str, one: Declaration) -> bool:
        if one.name not in words or (namespace(path), one) in known or not _is_used(one, added):
            return False
        if one.imported_from and not _is_own(one.imported_from, path):
            return False
        return not (one.imported_from or one in elsewhere) or _is_taken_from(namespace(path), one, left)

    found = (
        f"- {one.text}{f' of `{one.owner}`' if one.owner else ''} in `{path}`"
        for path, one in new
        if is_expected(path, one)
    )
    return tuple(dict.fromkeys(found))


def with_interface(text: str, interface: Iterable[str]) -> str:
    """The text of a problem, followed by what is expected."""
    lines = "\n".join(interface)
    return f"{text}\n\n{_HEADING}\n\n{lines}" if lines else text


def _is_used(one: Declaration, added: str) -> bool:
    """Whether the added lines have the name, that of a member after a dot, as a keyword or as a method that they declare."""
    name = re.escape(one.name)
    pattern = rf"\.{name}\b|\) {name}\(" if one.owner else rf"\b{name}\b"
    if one.is_keyword:
        pattern += rf"|\b{name}\s*[:=]"
    return re.search(pattern, added) is not None


def _is_own(module: str, path: str) -> bool:
    """Whether a module that the file at `path` imports from is one of the same package, by its name."""
    return module.startswith(".") or module.partition(".")[0] in PurePosixPath(path).parts[:-1]


def _is_taken_from(namespace: str, one: Declaration, left: str) -> bool:
    """Whether tests with these lines take the name from this file or folder: by an import, or after its name or one given to it."""
    path = PurePosixPath(namespace)
    stem, name = re.escape(path.parent.name if path.stem == "__init__" else path.stem), re.escape(one.name)
    if not stem:
        return False
    others = re.findall(rf"\b{stem}\s+as\s+(\w+)", left)
    before = "|".join([stem, *map(re.escape, others)])
    brought = rf"\b{stem}\s+import\s*(?:\*|\([^)]*\b{name}\b|[^\n(]*\b{name}\b)"
    alone = rf"^[ \t]+{name}(?:\s+as\s+\w+)?,?$"  # in a list of names whose beginning is not shown
    return re.search(rf"\b(?:{before})\.{name}\b|{brought}|{alone}", left, re.MULTILINE) is not None
