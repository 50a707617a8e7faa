"""Proposes contradictions of the expectations of a task's tests, for trials on the known fix.

The values in the expectations of tests are observed in a run of the known fix, and the writer of contradictions uses them. If a
data file contains expected values, like a golden file, a change of that file is proposed; if another module of the tests makes them, a
change of that module.
"""

import ast
import dataclasses
import posixpath
import random
import re
from codecs import BOM_UTF8
from collections import defaultdict
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from pipeline.request import Claim
from pipeline.task import Contradiction, TextChange
from workers.grading.controls.locating import FoundFunction
from workers.grading.controls.placing import read_tests
from workers.grading.controls.reaching import functions_of_tests
from workers.grading.controls.spans import Candidate, Cover, Edit, Span, changed_span, parse_expression, read
from workers.grading.controls.text_files import data_edits, data_files, doctest_candidates, in_other_examples
from workers.grading.controls.values import Observed
from workers.grading.controls.writing import Observable, candidates, observable
from workers.grading.defence import witness
from workers.grading.languages.language import language, language_of
from workers.isolation import calls as isolation
from workers.isolation.calls import LimitExceeded
from workers.verify.fixed import FoundTests, OpensSandboxes, fixed
from workers.verify.observing import ObservableFile, observe
from workers.verify.trials import RunsTests, Trial

WRITING_CPU_S = 120  # limit for finding the contradictions of one file
MOST_SUPPORT = 8  # modules that are followed for one test file
# Finds what the base version meets in test files, by path, given their text and the workdir.
FindsMet: TypeAlias = Callable[[Mapping[str, bytes], str], Awaitable[Mapping[str, Sequence[Span]]]]


@dataclass(frozen=True, slots=True)
class Proposed:
    """The possible contradictions, and the text of the files of the repository that contain the tests."""

    trials: list[Trial]
    texts: Mapping[str, bytes]
    met: Mapping[str, Sequence[Span]]  # what the base version meets, by path

    def telling(self, met: Mapping[str, Sequence[Span]], needing: Collection[str]) -> list[Trial]:
        """The trials that can expose a patch that cheats.

        An expectation that the base meets proves nothing: a patch that cheats only where the base is wrong fails its control, as an honest
        patch does. Its trial is left out if each of its tests needs the fix and has a trial of an expectation that the base does not meet.
        `met` contains the expectations that the base meets, by path, and `needing` the tests that need the fix.

        The class of an expected error comes last if the base does not meet the error's text, because code that knows the text seldom has
        to guess the class.
        """
        unmet = self._unmet(met)
        kept = {id(one) for one in unmet}
        places = {(one.checked_in, span) for one in unmet for span in one.checked}
        for trial in self.trials:
            trial.is_last |= any((trial.checked_in, span) in places for span in trial.texts)
        others = {name for one in unmet for name in one.names}
        return [
            one
            for one in self.trials
            if id(one) in kept or not others.issuperset(one.names) or not one.names <= {*needing}
        ]

    def met_tests(self, met: Mapping[str, Sequence[Span]]) -> set[str]:
        """Tests with contradictions, but with none of an expectation that the base does not meet."""
        unmet = {name for one in self._unmet(met) for name in one.names}
        return {name for one in self.trials for name in one.names} - unmet

    def _unmet(self, met: Mapping[str, Sequence[Span]]) -> list[Trial]:
        """The trials of expectations that the base does not meet."""
        covers = {path: Cover(spans) for path, spans in met.items()}

        def is_met(trial: Trial) -> bool:
            cover = covers.get(trial.contradiction.path, Cover())
            place = _place(trial.contradiction)
            return cover.has(place) or all(
                map(covers.get(trial.checked_in, Cover()).has, trial.checked or (place,))
            )

        return [one for one in self.trials if not is_met(one)]


@dataclass(frozen=True, slots=True)
class Proposer:
    """Proposes contradictions for one task, using the known fix."""

    sandboxes: OpensSandboxes
    grader: RunsTests
    chance: random.Random

    async def propose(self, claim: Claim, fix: bytes, found: FoundTests, find_met: FindsMet) -> Proposed:
        """Proposals for the tests that were found. Raises RolloutError."""
        texts = found.texts
        wanted = {path: await self._observable(text) for path, text in texts.items()}
        names_in: dict[str, list[str]] = defaultdict(list)
        for name, place in found.functions.items():
            names_in[place.path].append(name)
        files = {
            path: ObservableFile(text, [one.span for one in wanted[path]], names_in[path])
            for path, text in texts.items()
        }
        observed = await observe(self.grader, claim, fix, files, found.workdir)
        met = await find_met(texts, found.workdir)
        tests = _Tests.of(found.functions)
        trials = [
            trial
            for path, text in sorted(texts.items())
            for one in await self._candidates(path, text, observed.get(path, {}), met.get(path, ()))
            if (trial := tests.trial(path, one, text)) is not None
        ]
        expected = {path: [one.span for one in ones if one.is_expected] for path, ones in wanted.items()}
        of_data = await self._of_data_files(claim, fix, texts, observed, expected, tests)
        _mark_readers(trials, of_data)
        of_support = [
            trial
            for path in sorted(texts)
            for trial in await self._of_support(path, found, observed.get(path, {}), met.get(path, ()), tests)
        ]
        _mark_uses(trials, of_support)
        texts = {**texts} | {
            one.contradiction.path: found.support[one.contradiction.path] for one in of_support
        }
        return Proposed([*trials, *of_data, *of_support], texts, met)

    async def _of_support(
        self,
        path: str,
        found: FoundTests,
        observed: Mapping[Span, Observed],
        met: Sequence[Span],
        tests: "_Tests",
    ) -> list[Trial]:
        """Changes of the modules from which a test file takes expected values: fixtures of `conftest.py`, tables, constants."""
        text = found.texts[path]
        with suppress(LimitExceeded):
            near = await isolation.call(support_of, path, text, dict(found.support), cpu_s=WRITING_CPU_S)
            if not near:
                return []
            seed = self.chance.getrandbits(32)
            made = await isolation.call(
                candidates_in, near, path, text, seed, list(observed.items()), met, cpu_s=WRITING_CPU_S
            )
            trials: list[Trial] = []
            for place, words, candidate in made:
                trial = tests.trial(path, candidate, near[place], written_in=place)
                if trial is not None:
                    trial.others = frozenset(tests.beside(path, words, found.texts)) - trial.names
                    trials.append(trial)
            return trials
        return []

    async def _of_data_files(
        self,
        claim: Claim,
        fix: bytes,
        texts: Mapping[str, bytes],
        observed: Mapping[str, Mapping[Span, Observed]],
        expected: Mapping[str, Sequence[Span]],
        tests: "_Tests",
    ) -> list[Trial]:
        """Changes of data files that tests read only for expected values."""
        paths = [path for path in data_files(observed, expected) if path not in witness.touched_paths(fix)]
        if not paths:
            return []
        async with fixed(self.sandboxes, claim, fix) as sandbox:
            contents = await read_tests(sandbox, claim.request.task.verdict.eval_script, paths)
        trials: list[Trial] = []
        for data_path, content in contents.items():
            names: set[str] = set()
            for path, spans in expected.items():
                seen = observed.get(path, {})
                reading = [span for span in spans if span in seen and data_path in seen[span].files]
                reached = await isolation.call(tests_at, texts[path], reading, cpu_s=WRITING_CPU_S)
                names.update(name for test in reached for name in tests.names(path, test))
            edits = data_edits(content, b"\n".join(texts.values())) if names else []
            trials += (_as_trial(data_path, content, [edit], names) for edit in edits)
        return trials

    async def _observable(self, text: bytes) -> list[Observable]:
        with suppress(LimitExceeded):
            return await isolation.call(observable, text, cpu_s=WRITING_CPU_S)
        return []

    async def _candidates(
        self, path: str, text: bytes, observed: Mapping[Span, Observed], met: Sequence[Span]
    ) -> list[Candidate]:
        """The candidates; none for a file that takes too long to read."""
        seed = self.chance.getrandbits(32)
        with suppress(LimitExceeded):
            if (spoken := language_of(path)) is not None:
                return await isolation.call(candidates_in_language, spoken, text, seed, cpu_s=WRITING_CPU_S)
            if not path.endswith(".py"):
                name = path.rpartition("/")[2]
                return await isolation.call(candidates_of_examples, text, name, seed, cpu_s=WRITING_CPU_S)
            return await isolation.call(
                candidates_of, text, seed, list(observed.items()), met, cpu_s=WRITING_CPU_S
            )
        return []


async def met_by_log(proposed: Proposed, base_log: bytes) -> dict[str, list[Span]]:
    """The changed spans that the base may meet, by path: in examples of text files all but those of the first example that fails in
    `base_log`, in other languages than Python all that are checked in lines which the log does not name.
    """
    met: dict[str, list[Span]] = {}
    for path, text in proposed.texts.items():
        line = rf"(?:^|[\s(/]){re.escape(path.rpartition('/')[2])}:(\d+)(?![\w.])".encode()
        failed = sorted({int(found) for found in re.findall(line, base_log, re.MULTILINE)})
        if path.endswith(".py") or not failed:
            continue
        trials = [one for one in proposed.trials if one.contradiction.path == path]
        places = [_place(one.contradiction) for one in trials]
        if language_of(path) is not None:
            met[path] = [
                place
                for place, one in zip(places, trials, strict=True)
                if not any(_is_in_lines(text, span, failed) for span in one.checked)
            ]
            continue
        with suppress(LimitExceeded):
            starts = [start for start, _ in places]
            are_met = await isolation.call(in_other_examples, text, failed, starts, cpu_s=WRITING_CPU_S)
            met[path] = [place for place, is_met in zip(places, are_met, strict=True) if is_met]
    return met


def _is_in_lines(text: bytes, span: Span, lines: Sequence[int]) -> bool:
    """Whether the span includes a part of one of these lines, which are in order."""
    first = text.count(b"\n", 0, span[0]) + 1
    last = first + text.count(b"\n", *span)
    return any(first <= line <= last for line in lines)


def _place(contradiction: Contradiction) -> Span:
    first = contradiction.changes[0]
    return changed_span(first.offset_bytes, first.was, first.becomes)


def candidates_of(
    text: bytes, seed: int, observed: list[tuple[Span, Observed]], met: Sequence[Span]
) -> list[Candidate]:
    """The candidates of a test file, drawn by chance from `seed`. Call it in a separate process."""
    return candidates(text, random.Random(seed), dict(observed), met)


def candidates_of_examples(text: bytes, name: str, seed: int) -> list[Candidate]:
    """The same for the examples of a text file, which are the test `name`."""
    return doctest_candidates(text, name, random.Random(seed))


def candidates_in_language(spoken: str, text: bytes, seed: int) -> list[Candidate]:
    """The same for a test file in this language."""
    return language(spoken).candidates(text, random.Random(seed))


def support_of(path: str, text: bytes, support: dict[str, bytes]) -> dict[str, bytes]:
    """Those modules of `support` whose names the test file at `path` may use: each `conftest.py` above it, and what it or one of
    these imports names from. Call it in a separate process.
    """
    folders = {"", *("/".join(path.split("/")[:depth]) + "/" for depth in range(1, path.count("/") + 1))}
    found = {one: support[one] for folder in sorted(folders) if (one := f"{folder}conftest.py") in support}
    waiting = [(path, text), *found.items()]
    while waiting and len(found) < MOST_SUPPORT:
        for one, _ in _imported(*waiting.pop(), support):
            if one not in found and one != path:
                found[one] = support[one]
                waiting.append((one, support[one]))
    # The others cannot be joined with a test file.
    return {
        one: module
        for one, module in found.items()
        if b"\r" not in module and not module.startswith(BOM_UTF8) and read(module) is not None
    }


def _imported(path: str, text: bytes, support: Collection[str]) -> Iterator[tuple[str, str]]:
    """The modules of `support` that a file imports, or from which it imports names, with the name that it gives to the module, if any."""
    file = read(text)
    for node in ast.walk(file.tree) if file else ():
        match node:
            case ast.ImportFrom(module=module, names=names, level=level):
                folder = "/".join(path.split("/")[:-level]) if level else None
                base = (module or "").split(".") if module else []
                yield from ((one, "") for one in _at(base, folder, support))
                for alias in names:
                    for one in _at([*base, alias.name], folder, support):
                        yield one, alias.asname or alias.name
            case ast.Import(names=names):
                for alias in names:
                    for one in _at(alias.name.split("."), None, support):
                        yield one, alias.asname or alias.name
            case _:
                pass


def _at(names: Sequence[str], folder: str | None, support: Collection[str]) -> Iterator[str]:
    """The modules of `support` with this dotted name: in `folder`, or in any."""
    ends = {"/".join((*names, "__init__.py")), "/".join((*names[:-1], f"{names[-1]}.py")) if names else ""}
    for one in support:
        if folder is None and names:
            if f"/{one}".endswith(tuple(f"/{end}" for end in ends)):
                yield one
        elif folder is not None and one in {posixpath.join(folder, end) for end in ends}:
            yield one


def candidates_in(
    support: dict[str, bytes],
    own_path: str,
    text: bytes,
    seed: int,
    observed: list[tuple[Span, Observed]],
    met: Sequence[Span],
) -> list[tuple[str, list[str], Candidate]]:
    """The candidates for the tests in `text`, at `own_path`, that change other modules of the tests: the path of the module, the names that
    its changed statement binds, and the candidate. Call it in a separate process.

    The modules are read as if the test file began with them, so that a value is followed from one to the other by its name.
    """
    files = {own_path: text, **support}
    modules = {name for one in files for _, name in _imported(one, files[one], support) if name}
    merged, starts = b"", dict[str, int]()
    for path, module in support.items():
        starts[path] = len(merged)
        merged += module + b"\n\n"
    offset = len(merged)
    found = candidates(
        merged + text,
        random.Random(seed),
        {(start + offset, end + offset): seen for (start, end), seen in observed},
        [(start + offset, end + offset) for start, end in met],
        modules,
    )
    made: list[tuple[str, list[str], Candidate]] = []
    for one in found:
        # What a module of the tests checks itself is left out: nothing tells whether the base meets it.
        if one.edits[0].start >= offset or any(start < offset for start, _ in one.checked):
            continue
        path = max(
            (path for path, start in starts.items() if start <= one.edits[0].start), key=starts.__getitem__
        )
        start, end = starts[path], starts[path] + len(support[path])
        here = dataclasses.replace(
            one,
            edits=tuple(
                Edit(edit.start - start, edit.end - start, edit.becomes)
                for edit in one.edits
                if start <= edit.start < end
            ),
            # Names of functions are in the test file, which stays as it is.
            renamed={test: name for test, name in one.renamed.items() if "[" in name},
            checked=tuple((start - offset, end - offset) for start, end in one.checked),
            texts=tuple((start - offset, end - offset) for start, end in one.texts if start >= offset),
        )
        made.append((path, _bound_at(support[path], here.edits[0].start), here))
    return made


def _bound_at(text: bytes, place: int) -> list[str]:
    """The names that the top-level statement at this byte binds."""
    file = read(text)
    for statement in file.tree.body if file else ():
        last = statement.end_lineno or statement.lineno
        if file and place < file.line_starts[last]:
            names = [
                node.id
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            ]
            return [name] if (name := getattr(statement, "name", "")) else names
    return []


def tests_at(text: bytes, spans: list[Span]) -> list[str]:
    """The tests of a file that reach code at these spans, with pytest's names within the file. Call it in a separate process."""
    file = read(text)
    if file is None:
        return []
    found: set[str] = set()
    for definition, tests in functions_of_tests(file.tree):
        start = file.line_starts[definition.lineno - 1]
        end = file.line_starts[definition.end_lineno or definition.lineno]
        if any(start <= span[0] and span[1] <= end for span in spans):
            found.update(tests)
    return sorted(found)


@dataclass(frozen=True, slots=True)
class _Tests:
    """The runner's names of the tests of each function, by its file."""

    by_function: Mapping[tuple[str, str], Sequence[str]]

    @classmethod
    def of(cls, located: Mapping[str, FoundFunction]) -> "_Tests":
        by_function: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, place in located.items():
            by_function[place.path, place.function].append(name)
        return cls(by_function)

    def names(self, path: str, test: str) -> Iterator[str]:
        """The runner's names of `test`, a function of the file or one case of it."""
        if (path, test) in self.by_function:
            yield from self.by_function[path, test]
            return
        function, bracket, _ = test.partition("[")
        for name in self.by_function.get((path, function), ()):
            if not bracket or name.endswith(test[len(function) :]):
                yield name

    def beside(self, own_path: str, words: Iterable[str], texts: Mapping[str, bytes]) -> Iterator[str]:
        """The runner's names of all tests in other files that contain one of these words."""
        patterns = [re.compile(rb"\b%s\b" % re.escape(word).encode()) for word in words]
        for (path, _), names in self.by_function.items():
            if path != own_path and any(pattern.search(texts.get(path, b"")) for pattern in patterns):
                yield from names

    def trial(
        self, path: str, candidate: Candidate, text: bytes, written_in: str | None = None
    ) -> Trial | None:
        """The trial of a candidate, which changes `text`; None if none of its tests has a known name."""
        names: set[str] = set()
        renamed: dict[str, str] = {}
        for test in candidate.tests:
            for name in self.names(path, test):
                names.add(name)
                if test in candidate.renamed:
                    renamed[name] = _named_under_it(name, test, candidate.renamed[test])
        if not names:
            return None
        trial = _as_trial(written_in or path, text, candidate.edits, names)
        trial.checked, trial.texts, trial.checked_in = candidate.checked, candidate.texts, path
        # What negates a condition is also expected by an object that equals everything. In Python no condition that compares is negated.
        trial.is_last = candidate.kind != "value" and language_of(path) is not None
        trial.contradiction = replace(trial.contradiction, kind=candidate.kind, renamed=renamed)
        return trial


def _mark_readers(trials: Iterable[Trial], of_data: Sequence[Trial]) -> None:
    """Sets `is_in_a_file` for the trials that change no literal and whose tests all read expected values from a data file."""
    reading = {name for one in of_data for name in one.names}
    for trial in trials:
        was = parse_expression(trial.contradiction.changes[0].was)
        trial.is_in_a_file = trial.names <= reading and not isinstance(was, ast.Constant)


def _mark_uses(trials: Iterable[Trial], of_support: Sequence[Trial]) -> None:
    """Puts last the trials that change a value where it is compared, if it is written in another module of the tests, too."""
    places = {(one.checked_in, span) for one in of_support for span in one.checked}
    for trial in trials:
        if trial.checked and all((trial.checked_in, span) in places for span in trial.checked):
            trial.is_last = True


def _as_trial(path: str, text: bytes, edits: Iterable[Edit], names: set[str]) -> Trial:
    changes = tuple(
        TextChange(offset_bytes=edit.start, was=text[edit.start : edit.end].decode(), becomes=edit.becomes)
        for edit in sorted(edits, key=lambda edit: edit.start)
    )
    return Trial(Contradiction(path=path, changes=changes, fails=tuple(sorted(names))), frozenset(names))


def _named_under_it(name: str, test: str, renamed: str) -> str:
    """The new form of the runner's `name` of `test`, if that is called `renamed` within its file."""
    function, _, _ = test.partition("[")
    other, _, _ = renamed.partition("[")
    if function == other:
        return name.removesuffix(test[len(function) :]) + renamed[len(other) :]
    word = re.escape(function.rpartition("::")[2])
    return re.sub(rf"\b{word}\b", other.rpartition("::")[2], name)
