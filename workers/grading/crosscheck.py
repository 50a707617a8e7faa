"""Compares the tests that a log reports as passed with what the witness saw.

Tests of which the witness saw nothing are left to the log: another runner or another process may have run them, and a right
fix must not lose its reward for it.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from workers.grading import witness
from workers.grading.witness import BAD, WitnessedRun

_OF_UNITTEST = re.compile(r"([\w.]+) \(([\w.]+)\)")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Seen:
    """Names of tests that the witness saw, both as the verdict's parser writes them and as they are."""

    passing: frozenset[str]
    skipped: frozenset[str]
    bad: frozenset[str]
    files: frozenset[str]
    unloaded: tuple[str, ...]  # prefixes of the dotted names of tests that could not run
    broken_off: bool  # a pytest run ended before any test, or had none

    def missed(self, name: str) -> bool:
        """Whether a test that was not seen to pass was seen not to run."""
        if "::" not in name and not _OF_UNITTEST.fullmatch(name):
            return False
        return self.broken_off or f"{_dotted(name)}.".startswith(self.unloaded)


def seen(runs: tuple[WitnessedRun, ...], read: Callable[[str], Mapping[str, str]] = lambda lines: {}) -> Seen:
    """`read` returns status by name as the verdict's parser reads lines of pytest's short summary."""
    groups: dict[str, list[str]] = {"passing": [], "skipped": [], "bad": []}
    for name, outcome in witness.outcomes(runs).items():
        groups["bad" if outcome in BAD else "skipped" if outcome == "SKIPPED" else "passing"].append(name)

    def names(group: str) -> frozenset[str]:
        return frozenset(read("".join(f"PASSED {name}\n" for name in groups[group]))).union(groups[group])

    return Seen(
        passing=names("passing"),
        skipped=names("skipped"),
        bad=names("bad"),
        files=frozenset(name.partition("::")[0] for group in groups.values() for name in group),
        unloaded=tuple(f"{_dotted(name)}." for name in (*groups["bad"], *groups["skipped"])),
        broken_off=any(end.status not in (0, 1) for end in witness.sessions(runs, "pytest")),
    )


def disagreement(claimed: Mapping[str, str], seen: Seen) -> str | None:
    """Why the witness contradicts `claimed`, outcomes by the names that the verdict's parser gives tests. None if it does not."""
    for name, status in claimed.items():
        if status not in ("PASSED", "XFAIL") or _stands_for(name, seen.passing):
            continue
        if _stands_for(name, seen.bad):
            return f"{name} failed"
        if _stands_for(name, seen.skipped):
            return f"{name} was skipped"
        if seen.missed(name) or ("::" in name and name.partition("::")[0] in seen.files):
            return f"{name} never ran"
    return None


def unconfirmed(names: Iterable[str], runs: tuple[WitnessedRun, ...]) -> str | None:
    """Why not all tests of these `names` passed, whatever form a parser gave the names. None if they may have.

    A name means each test whose dotted name ends with it. Where a parser changed the parameters beyond recognition, no more
    tests of a function can have passed than the witness saw pass.
    """
    outcomes = witness.outcomes(runs)
    known = seen(runs)
    by_function: dict[str, list[tuple[str, str]]] = defaultdict(list)
    passed: Counter[tuple[str, str]] = Counter()
    for test, outcome in outcomes.items():
        dotted = _dotted(test)
        by_function[_function(dotted)].append((dotted, outcome))
        passed[test.partition("::")[0], _function(dotted)] += outcome not in (*BAD, "SKIPPED")
    claimed: Counter[tuple[str, str]] = Counter()
    for name in dict.fromkeys(names):
        dotted = _dotted(name)
        of_file = name.partition("::")[0], _function(dotted)
        meant = [outcomes[name]] if name in outcomes else _alike(dotted, by_function[_function(dotted)])
        if meant and all(outcome in (*BAD, "SKIPPED") for outcome in meant):
            return f"{name} {'failed' if set(meant) & set(BAD) else 'was skipped'}"
        claimed[of_file] += "::" in name and of_file[0] in known.files
        if claimed[of_file] > passed[of_file] or (not meant and known.missed(name)):
            return f"{name} never ran"
    return None


def _alike(dotted: str, tests: Iterable[tuple[str, str]]) -> list[str]:
    """Outcomes of the tests that the name may mean. A name that was cut within its parameters means all tests that begin so."""
    cut = dotted.count("[") > dotted.count("]")
    return [
        outcome
        for test, outcome in tests
        if (f".{dotted}" in f".{test}" if cut else f".{test}".endswith(f".{dotted}"))
    ]


def _dotted(name: str) -> str:
    """`folder/test_x.py::Test::test_y[1]` as `folder.test_x.Test.test_y[1]`; unittest's names in the same form."""
    of_unittest = _OF_UNITTEST.fullmatch(name)
    if of_unittest:
        test, place = of_unittest.groups()
        in_place = place.startswith("unittest.loader.")  # a module that could not be loaded
        return test if in_place else f"{place.removesuffix(f'.{test}')}.{test}"
    path, bracket, parameters = name.partition("[")
    path = path.replace(".py::", ".").replace("::", ".").replace("/", ".").removesuffix(".py")
    return f"{path.removesuffix('.__init__')}{bracket}{parameters}"


def _function(dotted: str) -> str:
    word = _WORD.match(dotted.partition("[")[0].rpartition(".")[2])
    return word[0] if word else ""


def _stands_for(name: str, tests: frozenset[str]) -> bool:
    if name in tests or name.count("[") <= name.count("]"):
        return name in tests
    return any(test.startswith(name) for test in tests)
