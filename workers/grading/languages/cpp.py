"""C and C++: tests of GoogleTest, Catch2, doctest, cmocka, Unity and Boost.Test, and programs with `assert` that ctest or automake run.

How sources are parsed is in `cpp_source`, what checks expect in `cpp_checks`, what makes a value in `cpp_values`, and logs are read in
`cpp_logs`. A program that checks without a framework is one test, `main`.
"""

import random
import re
from collections.abc import Iterator
from functools import partial

from pipeline.task import ContradictionKind
from workers.grading.controls.spans import Candidate, Span
from workers.grading.languages import cpp_logs
from workers.grading.languages.cpp_checks import span_of
from workers.grading.languages.cpp_source import LITERALS, PROGRAM, CppFile
from workers.grading.languages.cpp_values import CppValues, other_literal
from workers.grading.languages.language import DeclaredTest, ExpectedPlace, Form, candidates_at, text_of

_TEST_PATH = re.compile(r"test|spec|check|unit", re.IGNORECASE)
_NO_TEST_PATH = re.compile(
    r"(?:^|/)(?:third[_-]?party|externals?|vendor|_deps|googletest|catch2?)/", re.IGNORECASE
)


class Cpp:
    """The languages C and C++; see `LanguageModule`."""

    endings = (".c", ".cc", ".cpp", ".cxx")

    def may_hold_tests(self, path: str) -> bool:
        return _TEST_PATH.search(path) is not None and not _NO_TEST_PATH.search(path)

    def tests(self, source: bytes) -> list[DeclaredTest]:
        return [DeclaredTest(name, (name,)) for name in CppFile(source).tests]

    def forms(self, name: str) -> list[Form]:
        """A name may be that of a program, which is then looked for in the file of this name, or in the only file with tests."""
        head, _, case = name.partition(".")
        suites = [part for part in head.split("/") if not part.isdigit()] if case else []
        found = [Form(f"{suite}.{case.partition('/')[0]}") for suite in reversed(suites)]
        found += [Form(name), Form(name.partition("/")[0])]
        if re.fullmatch(r"[\w./+-]+", name) and not name.endswith(".py"):
            bare = re.sub(r"^(?:unit)?tests?[_-]|[_-](?:unit)?tests?$", "", name)
            places = (
                name,
                bare,
                f"test_{bare}",
                f"{bare}_test",
                f"test-{bare}",
                f"{bare}-test",
                f"{bare}_tests",
                "",
            )
            found += [Form(PROGRAM, place, is_exact=True, is_last=True) for place in dict.fromkeys(places)]
        return found

    def outcomes(self, log: str) -> dict[str, str]:
        return cpp_logs.outcomes(log)

    def candidates(self, source: bytes, chance: random.Random) -> list[Candidate]:
        file = CppFile(source)
        return candidates_at({test: list(_places(file, test, chance)) for test in file.tests}, chance)


LANGUAGE = Cpp()


def _places(file: CppFile, test: str, chance: random.Random) -> Iterator[ExpectedPlace]:
    """The places where something can be changed that a test expects."""
    reached = file.reached(test)
    values = CppValues(file, reached)
    literals = {text_of(node) for name in reached for node in file.nodes_of(name, *LITERALS)}
    for check in file.checks(reached):
        checked = span_of(check.root)
        for leaf in (leaf for one in check.expected for leaf in values.leaves(one, check.owner)):
            yield ExpectedPlace(
                span_of(leaf),
                "value",
                checked,
                partial(other_literal, leaf, literals, check.is_close, chance),
            )
        others: tuple[tuple[ContradictionKind, tuple[Span, str] | None], ...] = (
            ("opposite", check.opposite),
            ("nothing", check.nothing),
        )
        for kind, change in others:
            if change is not None and b"#" not in file.source[slice(*change[0])]:
                yield ExpectedPlace(change[0], kind, checked, partial(str, change[1]))
