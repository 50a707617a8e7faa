"""Plants bugs: tries them on the tests that reach them, and makes candidates for tasks of those that some tests notice."""

import asyncio
import contextlib
import hashlib
import itertools
import posixpath
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pipeline.errors import RolloutError, SandboxRuined
from pipeline.request import Claim
from pipeline.screen import visible_line
from pipeline.task import ExitCode, Task
from pipeline.taskfile import Gold
from workers.grading.controls.spans import read
from workers.harness.building import PackageError
from workers.images.api import ImageError
from workers.leaks.answers import answers_in_problem
from workers.leaks.signature import Matcher, is_answer, is_near, signature_of
from workers.leaks.unpacking import Piece, Unpacker
from workers.making.author import NO_REPLY, Author, NoReply, Unusable, author_of
from workers.making.bugs import (
    Function,
    PlantedBug,
    functions_and_bugs,
    in_turn,
    is_product,
    tidied,
    with_bugs,
)
from workers.making.candidates import TaskCandidate
from workers.making.ecosystems.python import ECOSYSTEM as PYTHON
from workers.making.environments import WORKDIR, Environments
from workers.making.fixes import Fix, split_of
from workers.making.history import (
    Commit,
    Fallen,
    GitError,
    History,
    TooLarge,
    resolved,
)
from workers.making.problems import added_lines
from workers.making.reaching import CodePlace, RanTest, TestBench, TestsRun, read_report
from workers.making.reports import told_by
from workers.making.stages import Stages, replace_file
from workers.making.symptoms import Example, chosen, example_of, names_tests, problem_with
from workers.making.written_bugs import to_write, written, written_by
from workers.sandbox.protocol import Sandboxes
from workers.tasksets.fleet import is_placed_as_test
from workers.tasksets.patches import reversed_patch
from workers.unqueued import side_by_side, unqueued_claim

REACHED = "reached.jsonl"
SOURCE = "planted bug"  # of a problem that a template shows
NUM_AT_ONCE = 32  # bugs that are tried before their number is compared with what is wanted
MOST_TESTS = 40  # tests that run for one bug: those that reach the fewest functions
_UNDEFINED = ("NameError", "UnboundLocalError")  # any linter finds what raises these
_COMPILED = (".pyc", ".pyo")


@dataclass(frozen=True, slots=True)
class BugPlan:
    """The bugs of one candidate. `sha` is a hash of them and of the commit."""

    sha: str
    bugs: tuple[PlantedBug, ...]

    @property
    def functions(self) -> tuple[str, ...]:
        return tuple(sorted(f"{bug.function.path}::{bug.function.name}" for bug in self.bugs))


@dataclass(frozen=True, slots=True)
class FailingTests:
    """The tests that fail with the bugs of a plan: of those that were chosen for it, and of all."""

    chosen: tuple[RanTest, ...]
    all: tuple[RanTest, ...]


Noticed = FailingTests | Fallen | RolloutError
"""The tests that fail with the bugs of a plan; or why it is of no use; or a failure of the infrastructure."""


@dataclass(slots=True)
class Planter:
    """Plants bugs in one commit of a repository."""

    stages: Stages
    commit: Commit = field(init=False)
    author: Author | None = field(init=False)
    _files: dict[str, str] = field(init=False)  # of the commit
    _seen: set[tuple[tuple[str, ...], tuple[str, ...]]] = field(init=False)  # functions and failing tests
    _run: TestsRun = field(default_factory=TestsRun)  # of all tests, without any bug
    # Tests that pass and can be hidden, by the functions that they reach.
    _tests: dict[CodePlace, list[RanTest]] = field(default_factory=lambda: defaultdict(list[RanTest]))
    _functions: dict[CodePlace, Function] = field(default_factory=dict[CodePlace, Function])
    _sources: dict[str, bytes] = field(default_factory=dict[str, bytes])
    _archived: list[tuple[str, str, bytes]] | None = None  # what archives in the commit have
    _probed: set[str] = field(default_factory=set[str])  # candidates of which this process has run the tests
    _taken: set[str] = field(default_factory=set[str])  # candidates that it has taken further

    def __post_init__(self) -> None:
        options, history = self.stages.options, self.stages.history
        self.author = author_of(options)
        self.commit = next(history.commits(resolved(options.repository, options.branch, "--branch"), "-1"))
        self._files = history.files(self.commit.sha)
        known = self.stages.book.candidates.values()
        self._seen = {(one.functions, one.failing) for one in known if one.base}

    def plant(self) -> bool:
        """Tries bugs until there are as many tasks as wanted, or no more bugs. Returns whether a task is missing because the infrastructure
        failed. Raises ValueError.
        """
        asyncio.run(self.learn())
        plans = list(self.plans())
        while (need := self.stages.options.most - len(self.stages.book.kept)) > 0:
            asyncio.run(self._probe(plans, need))
            todo = {one.sha: one for one in self._waiting()[:need]}
            if not todo:
                break
            self._taken |= todo.keys()
            todo = asyncio.run(self.told(todo))
            if not todo:
                break
            for plan in plans:
                if (one := todo.get(plan.sha)) and one.task:  # another process may have made its base
                    self._base(self.tidied(plan) or [], one.task.verdict.protected_paths)
            self.stages.build([one for one in todo.values() if one.stage == "problem"])
            self.stages.gate([one for one in self.stages.to_do("built") if one.sha in todo])
        return need > 0 and self.stages.book.has_failures

    async def learn(self) -> None:
        """Learns which tests reach which functions, from a run of all tests that an earlier process may have made. Raises ValueError."""
        path, log = self.stages.out / REACHED, ""
        if not path.exists():
            print("running all tests", file=sys.stderr, flush=True)
            async with self.stages.environments() as (environments, sandboxes):
                claim = await self._claim(environments)
                try:
                    async with sandboxes.open(claim, role="grade") as sandbox:
                        bench = TestBench(sandbox)
                        await bench.install()
                        report, log = await bench.report_of_all(timeout_s=self.stages.limits.grade_wall_s)
                except RolloutError as error:
                    raise ValueError(
                        f"REPO: its tests cannot be run in {claim.request.task.image}: {error}"
                    ) from error
            if not read_report(report).is_whole:
                said = "some test files cannot be collected, or the tests did not come to their end"
                print(visible_line(f"{said}; those that ran are used: {log}"), file=sys.stderr, flush=True)
            replace_file(path, lambda partial: partial.write_bytes(report))
        self._run = read_report(path.read_bytes())
        for test in sorted(self._run.tests.values(), key=lambda test: (len(test.reached), test.name)):
            if test.outcome == "passed" and _can_be_hidden(test.path) and test.path in self._files:
                for place in test.reached:
                    self._tests[place].append(test)
        if not self._tests:
            path.unlink()
            raise ValueError(f"REPO: no test of a test_*.py or *_test.py passes in the image: {log}")

    def plans(self) -> Iterator[BugPlan]:
        """What may be tried, in order."""
        options, found = self.stages.options, list[PlantedBug]()
        for path in sorted({path for path, _ in self._tests if path in self._files}):
            source = b""
            with contextlib.suppress(TooLarge):
                source = self.stages.history.blob(self._files[path])
            if is_product(path, source):
                functions, bugs = functions_and_bugs(path, source)
                self._sources[path] = source
                self._functions |= {(path, one.line): one for one in functions}
                bugs += to_write(source, functions) if "model" in options.kinds else ()
                found += [bug for bug in bugs if bug.kind in options.kinds and self._tests_of(bug)]
        ordered = in_turn(found, options.seed)
        for at in range(0, len(ordered) - options.bugs + 1, options.bugs):
            bugs = tuple(ordered[at : at + options.bugs])
            if not any(one.touches(other) for one, other in itertools.combinations(bugs, 2)):
                edits = [(bug.function.path, bug.start, bug.end, bug.becomes) for bug in bugs]
                digest = hashlib.sha256(repr((self.commit.sha, edits)).encode()).hexdigest()
                yield BugPlan(digest[: len(self.commit.sha)], bugs)

    async def _probe(self, plans: Sequence[BugPlan], need: int) -> None:
        """Tries bugs until `need` candidates wait, and enters what became of each, in order."""
        began_at, had = time.monotonic(), len(self._waiting())
        if had >= need:
            return
        async with self.stages.environments() as (environments, sandboxes):
            claim = await self._claim(environments)
            for at in range(0, len(plans), NUM_AT_ONCE):
                new = [plan for plan in plans[at : at + NUM_AT_ONCE] if self._is_new(plan)]
                if not new:
                    continue
                self._probed |= {plan.sha for plan in new}
                lost = await self.write_bugs(new)
                results = await self._results(
                    sandboxes, claim, [plan for plan in new if plan.sha not in lost]
                )
                results |= lost
                for plan in new:
                    self.stages.book.enter(self.candidate(plan, results[plan.sha]))
                found = len(self._waiting())
                left_s = (time.monotonic() - began_at) / max(1, found - had) * max(0, need - found)
                said = f"{min(at + NUM_AT_ONCE, len(plans))} of {len(plans)} bugs tried, {found} of {need} wanted may be tasks"
                print(f"{said}; about {left_s / 60:.0f} min left", file=sys.stderr, flush=True)
                if found >= need or all(isinstance(result, RolloutError) for result in results.values()):
                    return

    def _is_new(self, plan: BugPlan) -> bool:
        known = self.stages.book.candidates.get(plan.sha)
        return plan.sha not in self._probed and (
            known is None or (known.stage == "seen" and known.outcome in ("failed", "open"))
        )

    async def write_bugs(self, plans: Iterable[BugPlan]) -> dict[str, Noticed]:
        """Lets the author write the bugs of these plans that it has not written yet. Returns why it did not, by the plans' hashes."""
        lost: dict[str, Noticed] = {}
        if not (author := self.author):
            return lost

        async def write(plan: BugPlan) -> None:
            try:
                texts, prompts = await written_by(author, plan.bugs, self._sources)
            except NoReply as error:
                lost[plan.sha] = error
            except Unusable as error:
                lost[plan.sha] = Fallen("the author wrote no usable bug", str(error))
            else:
                one = replace(self._entry(plan), outcome="open", written=texts, author_saw=prompts)
                self.stages.book.enter(one)

        wanted = [
            plan
            for plan in plans
            if any(bug.kind == "model" for bug in plan.bugs)
            and not self._entry(plan).written
            and not self.is_spent(plan)
        ]
        async with author.opened():
            await side_by_side(wanted, write, num_jobs=self.stages.options.jobs)
        return lost

    async def told(self, todo: Mapping[str, TaskCandidate]) -> dict[str, TaskCandidate]:
        """The candidates with the problems that the author writes, or with the template's where none of its texts can be used. Those for
        which it gives no reply are left out, and try again with the next command.
        """
        found = dict(todo)
        if not (author := self.author):
            return found

        async def tell(one: TaskCandidate) -> None:
            tests = [test for test in self._run.tests.values() if test.path in one.modules]
            found[one.sha] = await told_by(author, one, tests, template=SOURCE)
            self.stages.book.enter(found[one.sha])

        waiting = [one for one in todo.values() if one.stage == "problem" and one.problem_source == SOURCE]
        async with author.opened():
            await side_by_side(waiting, tell, num_jobs=self.stages.options.jobs)
        return {sha: one for sha, one in found.items() if one.reason != NO_REPLY}

    def _waiting(self) -> list[TaskCandidate]:
        """The candidates that may become tasks and that this process has not taken further."""
        return [one for one in self.stages.to_do("problem") if one.sha not in self._taken]

    async def _claim(self, environments: Environments) -> Claim:
        """A claim of the image of the commit. Raises ValueError if that cannot be built."""
        try:
            image, base, *_ = await environments.image(self.commit.sha, self.commit.authored)
        except (Fallen, ImageError, PackageError) as error:
            raise ValueError(f"REPO: the image of {self.commit.sha} cannot be built: {error}") from error
        task = self._task("base", ExitCode(eval_script="true"))
        task = replace(task, image=image, base_commit=base, workdir=WORKDIR)
        return unqueued_claim(task, command="making", limits=self.stages.limits)

    def _task(self, name: str, verdict: ExitCode) -> Task:
        history = self.stages.history
        repository = history.repository.resolve().name
        return Task(
            id=f"plant:{repository}-{name}",
            repo=history.origin or repository,
            base_commit="",
            image="",
            workdir="",
            problem="",
            verdict=verdict,
        )

    async def _results(
        self, sandboxes: Sandboxes, claim: Claim, plans: Sequence[BugPlan]
    ) -> dict[str, Noticed]:
        """What the tests say of each plan; each job takes one after another into the same container."""
        waiting, found = iter(plans), dict[str, Noticed]()

        async def work(_: int) -> None:
            for plan in waiting:
                current: BugPlan | None = plan
                try:
                    async with sandboxes.open(claim, role="grade") as sandbox:
                        bench = TestBench(sandbox)
                        await bench.install()
                        while current:
                            try:
                                found[current.sha] = await self._noticed(bench, current)
                            except Fallen as fallen:
                                found[current.sha] = fallen
                            current = next(waiting, None)
                except RolloutError as error:
                    if current:
                        is_ruined = isinstance(error, SandboxRuined)
                        found[current.sha] = Fallen("ends the container", str(error)) if is_ruined else error

        num_jobs = self.stages.options.jobs
        await side_by_side(range(num_jobs), work, num_jobs=num_jobs)
        return found

    async def _noticed(self, bench: TestBench, plan: BugPlan) -> FailingTests | Fallen:
        """The tests that fail with the bugs of a plan, each of which some test notices alone. Raises SandboxError, GraderError."""
        if self.is_spent(plan):
            return Fallen("has no other test than another bug in its function")
        tests = list({test.name: test for bug in plan.bugs for test in self._tests_of(bug)}.values())
        bugs = await asyncio.to_thread(self.tidied, plan)
        if bugs is None:
            return Fallen("means the same or does not parse")
        noticing: list[RanTest] = []
        for some in [*([bug] for bug in bugs if len(bugs) > 1), bugs]:
            noticing = await self._failing(bench, some, tests)
            if not noticing:
                return Fallen("no test notices it")
            if any(test.failure and test.failure.exception in _UNDEFINED for test in noticing):
                return Fallen("leaves a name without a value")
        if (plan.functions, _names(noticing)) in self._seen:
            return FailingTests(tuple(noticing), tuple(noticing))
        # A fixture that tests share reaches a function in the first of them alone, so all tests are run before some are hidden.
        passing = [test for test in self._run.tests.values() if test.outcome == "passed"]
        failing = await self._failing(bench, bugs, passing)
        if len(failing) == len(passing):
            return Fallen("no test passes with it")
        if not {*_names(noticing)} <= {*_names(failing)}:
            return Fallen("its tests fail in one run and pass in another")
        return FailingTests(tuple(noticing), tuple(failing))

    async def _failing(
        self, bench: TestBench, bugs: Sequence[PlantedBug], tests: Sequence[RanTest]
    ) -> list[RanTest]:
        """Those of these tests that fail with these bugs. Raises Fallen, SandboxError, GraderError."""
        run = await bench.run(self.texts(bugs), tests, most_s=self.stages.limits.grade_wall_s)
        if not run.is_whole:
            raise Fallen("not all of its tests run and end")
        return [test for test in run.tests.values() if test.outcome == "failed"]

    def is_spent(self, plan: BugPlan) -> bool:
        """Whether only one test reaches the plan's functions, and another plan has failed it."""
        names = {test.name for bug in plan.bugs for test in self._tests_of(bug)}
        return len(names) == 1 and (plan.functions, tuple(names)) in self._seen

    def _tests_of(self, bug: PlantedBug) -> list[RanTest]:
        return self._tests.get((bug.function.path, bug.function.line), [])[:MOST_TESTS]

    def tidied(self, plan: BugPlan) -> list[PlantedBug] | None:
        texts = self._entry(plan).written or [""] * len(plan.bugs)
        bugs = [written(bug, text) if text else bug for bug, text in zip(plan.bugs, texts, strict=True)]
        bugs = [tidied(self._sources[bug.function.path], bug) for bug in bugs]
        return [bug for bug in bugs if bug] if all(bugs) else None

    def texts(self, bugs: Sequence[PlantedBug]) -> dict[str, bytes]:
        """The files with these bugs."""
        paths = {bug.function.path for bug in bugs}
        return {
            path: with_bugs(self._sources[path], [bug for bug in bugs if bug.function.path == path])
            for path in sorted(paths)
        }

    def _base(self, bugs: Sequence[PlantedBug], hidden: Iterable[str]) -> str:
        """The commit with these bugs and without the hidden tests."""
        return self.stages.history.changed(self.commit.sha, {**self.texts(bugs), **dict.fromkeys(hidden)})

    def candidate(self, plan: BugPlan, noticed: Noticed) -> TaskCandidate:
        """The candidate with its problem, or with the reason why it becomes no task."""
        one = self._entry(plan)
        try:
            if isinstance(noticed, Exception):
                raise noticed
            one = replace(one, stage="candidate", failing=_names(noticed.chosen))
            if (one.functions, one.failing) in self._seen:
                raise Fallen("fails the same tests as another bug in its function")
            made = self._with_problem(one, plan, noticed)
            self._seen.add((one.functions, one.failing))
            return made
        except Fallen as fallen:
            return replace(one, reason=fallen.reason, detail=fallen.detail)
        except GitError as error:
            return replace(one, reason="cannot be read", detail=str(error))
        except NoReply as error:
            return replace(one, outcome="failed", reason=NO_REPLY, detail=str(error)[-300:])
        except RolloutError as error:
            return replace(one, outcome="failed", reason="could not be tried", detail=str(error))

    def _entry(self, plan: BugPlan) -> TaskCandidate:
        """The candidate before anything is known of it but what the author wrote."""
        known = self.stages.book.candidates.get(plan.sha)
        return TaskCandidate(
            sha=plan.sha,
            stage="seen",
            outcome="fallen",
            authored=self.commit.authored,
            commit=self.commit.sha,
            bugs=tuple(bug.kind for bug in plan.bugs),
            functions=plan.functions,
            written=known.written if known else (),
            author_saw=known.author_saw[: sum(map(bool, known.written))] if known else (),
        )

    def _with_problem(self, one: TaskCandidate, plan: BugPlan, noticed: FailingTests) -> TaskCandidate:
        """Raises Fallen, GitError."""
        stages, hidden = self.stages, sorted({test.path for test in noticed.all})
        if strange := [path for path in hidden if not _can_be_hidden(path)]:
            raise Fallen("fails a test that cannot be hidden", strange[0])
        base = self._base(self.tidied(plan) or [], hidden)
        split = split_of(
            stages.history, Fix(base, self.commit, ()), PYTHON, max_files=stages.options.max_files
        )
        script, tests = PYTHON.eval_script(split.modules), split.tests.encode()
        verdict = ExitCode(eval_script=script, test_patch=tests, protected_paths=split.test_paths)
        task = self._task(one.sha[:12], verdict)
        gold = Gold(id=task.id, patch=split.fix, test_patch=split.tests)
        if self._archived is None:
            self._archived = _packed(stages.history, self.commit.sha)
        _must_be_alone(stages.history, base, task, gold, self._archived)
        return replace(
            one,
            stage="problem",
            outcome="open",
            base=base,
            problem_source=SOURCE,
            modules=split.modules,
            licence=stages.licence(self.commit.sha),
            task=replace(task, problem=self._problem(task, gold, plan.bugs, noticed)),
            gold=gold,
        )

    def _problem(self, task: Task, gold: Gold, bugs: Sequence[PlantedBug], noticed: FailingTests) -> str:
        """Raises Fallen if none can be written that shows a call for each bug and does not give the answer away."""
        found = [(test, self._example(test)) for test in noticed.chosen]
        reached = [{test.name for test in self._tests_of(bug)} for bug in bugs]
        examples = chosen([[one for test, one in found if one and test.name in names] for names in reached])
        changed = added_lines(gold.patch) | added_lines(reversed_patch(gold.patch))
        is_gone = any(bug.kind == "body" for bug in bugs)
        for number in range(len(examples), len(bugs) - 1, -1):
            told = replace(task, problem=problem_with(examples[:number], is_gone=is_gone))
            gives_away = any(line in told.problem for line in changed) or answers_in_problem(told, gold)
            if not gives_away and not names_tests(told.problem, noticed.all):
                return told.problem
        raise Fallen("no failing call can be shown", "without giving the answer away" if examples else "")

    def _example(self, test: RanTest) -> Example | None:
        file = read(self.stages.history.blob(self._files[test.path]))
        reached = self._run.tests[test.name].reached
        callables = {self._functions[place].called for place in reached if place in self._functions}
        return (
            example_of(test.failure, test.name, test.path, file, callables) if test.failure and file else None
        )


def _can_be_hidden(path: str) -> bool:
    """Whether the file is a test module by its name, which an eval script can run."""
    return is_placed_as_test(path) and PYTHON.is_module(path)


def _names(tests: Iterable[RanTest]) -> tuple[str, ...]:
    return tuple(sorted(test.name for test in tests))


def _packed(history: History, commit: str) -> list[tuple[str, str, bytes]]:
    """What archives in a commit have: the path of each, and name and content of what is in it, as far as it can be unpacked."""
    unpacker, files, found = Unpacker(), history.files(commit), list[tuple[str, str, bytes]]()
    for path in history.binary_paths(commit):
        with contextlib.suppress(TooLarge):
            for piece in unpacker.pieces(Piece((path,), history.blob(files[path]))):
                if len(piece.trail) > 1 and b"\0" not in piece.content:
                    found.append((path, piece.trail[-1], piece.content))
    return found


def _must_be_alone(
    history: History, base: str, task: Task, gold: Gold, packed: Iterable[tuple[str, str, bytes]]
) -> None:
    """Raises Fallen if another file of the base, or one in an archive, has the code without the bug, or what Python compiled of it."""
    signature, files = signature_of(task, gold), history.files(base)
    fix, matcher = signature.parts[0], Matcher(signature)

    def has_answer(name: str, content: bytes) -> bool:
        evidence = matcher.evidence(content, near=True)
        return is_answer(fix, evidence, near=is_near(name, signature.paths), loose=False, common=set())

    stems = {posixpath.basename(path).partition(".")[0] for path in signature.paths}
    lines = {max(window, key=len).decode() for window in (*fix.windows, *fix.near)}
    copies = [
        path
        for path in files
        if path.endswith(_COMPILED) and posixpath.basename(path).partition(".")[0] in stems
    ]
    for path in history.paths_with(base, lines):
        if path in files and path not in signature.paths and has_answer(path, history.blob(files[path])):
            copies.append(path)
    copies += [path for path, name, content in packed if path in files and has_answer(name, content)]
    if copies:
        raise Fallen("another file has the code without the bug", copies[0])
