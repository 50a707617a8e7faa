"""The defence after the tests: what the witness saw may refute what log and exit status claim.

Tests of which the witness saw nothing are left to the log: another runner or another process may have run them, and a right
fix must not lose its reward for it.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pipeline.runners import PYTEST, UNITTEST, closing_fault, run_by
from pipeline.task import ExitCode, SwebenchLog, Verdict
from workers.grading.defence import witness
from workers.grading.defence.witness import BAD, WitnessedRun

_WORD = re.compile(r"\w+")
_ENDS_AT_FAILURE = re.compile(r"^\s*set\s+-\w*e", re.MULTILINE)
_TOLERATES_FAILURE = re.compile(
    r"[|&!`]|\$\(|\(\)|<<|\b(?:if|while|until|case|trap|eval|function)\b|\bset\s+\+\w*e"
)

# Returns status by name, as the parser of a verdict reads the lines of pytest's short summary.
Reads = Callable[[str], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence that a finished test run left."""

    patch: bytes
    exit_code: int
    log: str  # the log with the original markers
    runs: tuple[WitnessedRun, ...]  # what the witness reported
    # Output of the parser of a tests_json verdict, or the reward file of a reward_file verdict as `reward_files.reported` returns it; None
    # if there is none.
    parsed: bytes | None = None
    # Outcomes that the log of an eval script reports, by name; empty where the witness saw a run, or a parser reads the log.
    reported: Mapping[str, str] = field(default_factory=dict[str, str])
    # Files that are as in the image, whatever the patch says: see `GoverningFiles.restored`.
    restored: tuple[str, ...] = ()


def tampering(
    evidence: Evidence, verdict: Verdict, matters: Callable[[str], bool] = lambda test: True
) -> str | None:
    """The way in which code of the patch interfered with the tests; None if there is no evidence of it. `matters` decides it for a skipped
    test, or a skipped file of tests.
    """
    files = () if isinstance(verdict, SwebenchLog) else verdict.files
    applied = verdict.test_patch if isinstance(verdict, ExitCode) else b""
    hidden = (*verdict.protected_paths, *(file.path for file in files), *witness.touched_paths(applied))
    return witness.tampering(evidence.runs, evidence.patch, matters, hidden, evidence.restored)


def refuted_status(evidence: Evidence, verdict: Verdict) -> str | None:
    """The reason why an exit status of 0 does not mean success; None if it does."""
    script, sessions = verdict.eval_script, witness.sessions(evidence.runs)
    return (
        tampering(evidence, verdict)
        or witness.failure(evidence.runs, every=each_must_pass(script, len(sessions)))
        or (None if sessions else closing_fault(script, evidence.log))
    )


def refuted_outcomes(
    evidence: Evidence,
    verdict: Verdict,
    claimed: Mapping[str, str],
    read: Reads,
    matters: Callable[[str], bool],
    *,
    all_seen: bool = False,
) -> str | None:
    """The reason why the outcomes `claimed` by a log are not those of its tests, which `read` names; None if they are. `all_seen`: a pytest
    run that the witness saw has all of them.
    """
    known = seen(evidence.runs, read)
    refuted_by = tampering(evidence, verdict, matters) or disagreement(claimed, known)
    if refuted_by is None and all_seen and witness.sessions(evidence.runs, PYTEST.name):
        absent = (
            name for name, status in claimed.items() if status == "PASSED" and name not in known.passing
        )
        return next((f"{name} never ran" for name in absent), None)
    return refuted_by


def refuted_passes(evidence: Evidence, verdict: Verdict, names: Iterable[str]) -> str | None:
    """The reason why not all tests of these names passed, whatever form a parser gave the names."""
    return tampering(evidence, verdict) or unconfirmed(names, evidence.runs)


def each_must_pass(script: str, num_runs: int) -> bool:
    """Whether `script`, in which `num_runs` test runs were seen, would have failed if any of them had. False if in doubt."""
    lines = [line for line in script.splitlines() if not line.lstrip().startswith("#")]
    runs = [line for line in lines if any(runner.closing for runner in run_by(line))]
    plain = not any(_TOLERATES_FAILURE.search(line) for line in lines)
    return plain and len(runs) == num_runs and any(_ENDS_AT_FAILURE.search(line) for line in lines)


@dataclass(frozen=True, slots=True)
class Seen:
    """Names of tests that the witness saw, both in the form of the verdict's parser and in their own."""

    passing: frozenset[str]
    skipped: frozenset[str]
    bad: frozenset[str]
    files: frozenset[str]
    unloaded: tuple[str, ...]  # prefixes of the dotted names of tests that could not run
    broken_off: bool  # whether a pytest run ended before any test, or had none

    def missed(self, name: str) -> bool:
        """Whether the witness did not see the test pass, and saw that it did not run."""
        if "::" not in name and not UNITTEST.test_name.fullmatch(name):
            return False
        return self.broken_off or f"{_dotted(name)}.".startswith(self.unloaded)


def seen(runs: tuple[WitnessedRun, ...], read: Reads = lambda lines: {}) -> Seen:
    """The witness's observations, also by the names that `read` gives tests."""
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
        broken_off=any(end.status not in (0, 1) for end in witness.sessions(runs, PYTEST.name)),
    )


def disagreement(claimed: Mapping[str, str], seen: Seen) -> str | None:
    """The reason why the witness contradicts the outcomes `claimed`, by the names that the verdict's parser gives tests; None if it does
    not."""
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
    """The reason why not all tests of these `names` passed, whatever form a parser gave the names; None if they may have.

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
    """Outcomes of the tests that the name may mean. A name that was cut within its parameters means all tests that begin with it."""
    cut = dotted.count("[") > dotted.count("]")
    return [
        outcome
        for test, outcome in tests
        if (f".{dotted}" in f".{test}" if cut else f".{test}".endswith(f".{dotted}"))
    ]


def _dotted(name: str) -> str:
    """`folder/test_x.py::Test::test_y[1]` as `folder.test_x.Test.test_y[1]`; unittest's names in the same form."""
    of_unittest = UNITTEST.test_name.fullmatch(name)
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
