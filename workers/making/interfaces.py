"""What hidden tests use of the code that exists only with the fix: a problem that does not say it could not be solved from its text.

A declaration is expected if only the fix brings it in this form, and a line that the hidden tests add uses its name. It is shown without
its body, without the values of defaults, and without what it is equal to, so that it tells how the code is called and not what it does.
"""

import re
from collections.abc import Iterable

from pipeline import diff
from workers.making.ecosystems.ecosystem import Declaration

_HEADING = "Expected interface:"


def expected(
    old: Iterable[Declaration], new: Iterable[tuple[str, Declaration]], tests: str
) -> tuple[str, ...]:
    """The declarations that the tests use and that are not among the old ones, each as a line of a list. `new` has the path of each;
    `tests` is the difference of the hidden tests.
    """
    known = frozenset(old)
    added = "\n".join(
        line.decode("utf-8", "replace")
        for section in diff.sections(tests.encode())
        for hunk in section.hunks
        for sign, line in hunk.lines
        if sign == b"+"
    )
    words = frozenset(re.findall(r"\w+", added))
    lines = (
        f"- {one.text}{f' of `{one.owner}`' if one.owner else ''} in `{path}`"
        for path, one in new
        if one.name in words and one not in known and _is_used(one, added)
    )
    return tuple(dict.fromkeys(lines))


def with_interface(text: str, interface: Iterable[str]) -> str:
    """The text of a problem, followed by what is expected."""
    lines = "\n".join(interface)
    return f"{text}\n\n{_HEADING}\n\n{lines}" if lines else text


def _is_used(one: Declaration, added: str) -> bool:
    """Whether the added lines have the name, that of a member after a dot or as a keyword."""
    name = re.escape(one.name)
    pattern = rf"\.{name}\b" if one.owner else rf"\b{name}\b"
    if one.is_keyword:
        pattern += rf"|\b{name}\s*[:=]"
    return re.search(pattern, added) is not None
