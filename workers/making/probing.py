"""Tries a candidate in its image before it is verified: that tests of the base pass there, and which tests have to be left out."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pipeline.request import Limits
from pipeline.task import ExitCode, Task
from workers.grading.container import PatchRun
from workers.grading.grade import Grader
from workers.harness.building import PackageError
from workers.images.api import ImageError
from workers.making.candidates import IMAGE_FIX, TaskCandidate
from workers.making.environments import WORKDIR, Environments
from workers.making.history import Fallen, GitError
from workers.sandbox.protocol import Sandboxes
from workers.unqueued import Broken, tried, unqueued_claim
from workers.verify.calibrating import USELESS

MOST_FAILURE_BYTES = 12_000
# Limits for a run without the known fix, as multiples of those of the slower of two runs with it, which count as at least these seconds.
TIMES_LONGER, LEAST_WALL_S, LEAST_CPU_S = 20.0, 15.0, 1.0
_FAILURES = re.compile(rb"^=+ (?:FAILURES|ERRORS) =+\r?$", re.MULTILINE)


class _Failed(Exception):
    """The infrastructure prevented a run."""


@dataclass(slots=True)
class CandidateProber:
    """Builds the image of a candidate and runs its tests there, twice with the known fix and without it."""

    environments: Environments
    sandboxes: Sandboxes
    limits: Limits
    keeps_failures: bool = False  # keep what the hidden tests print without the known fix
    _grader: Grader = field(init=False)

    def __post_init__(self) -> None:
        self._grader = Grader(self.sandboxes)

    async def built(self, one: TaskCandidate) -> TaskCandidate:
        """The candidate with its image and the tests that are left out, or with the reason why it becomes no task."""
        task, gold = one.task, one.gold
        assert task is not None
        assert gold is not None
        one = replace(one, outcome="open", reason="", detail="")
        try:
            image, commit, needs, versions = await self.environments.image(one.base, one.authored)
            one = replace(one, versions_before=versions, left_out_requirements=needs.left_out)
            task = replace(task, image=image, base_commit=commit, workdir=WORKDIR)
            deselected, rest, fixed = await self._deselected(one, task, gold.patch.encode())
            assert isinstance(task.verdict, ExitCode)
            script = self.environments.ecosystem.eval_script(one.modules, deselected, rest)
            task = replace(task, verdict=replace(task.verdict, eval_script=script))
            unfixed = await self._without_fix(task, fixed)
            if self.keeps_failures:
                failing, failures = _failures(unfixed, rest)
                one = replace(one, failing=failing, failures=failures)
        except Fallen as fallen:
            return replace(one, outcome="fallen", reason=fallen.reason, detail=fallen.detail)
        except (ImageError, PackageError, GitError, _Failed) as error:
            return replace(
                one, outcome="failed", reason="could not be built or run", detail=str(error)[-300:]
            )
        return replace(one, stage="built", outcome="open", task=task, deselected=deselected)

    async def _without_fix(self, task: Task, fixed: PatchRun) -> PatchRun:
        """A run without the known fix, whose run was `fixed`. Raises Fallen if it does not end, so that each wrong attempt of a policy
        would keep a slot until the limit of the grading, and _Failed.
        """
        limits = replace(
            self.limits,
            grade_wall_s=min(self.limits.grade_wall_s, TIMES_LONGER * max(fixed.wall_s, LEAST_WALL_S)),
            grade_cpu_s=min(
                self.limits.grade_cpu_s, TIMES_LONGER * max(fixed.reward.grade_cpu_s, LEAST_CPU_S)
            ),
        )
        run = await self._run(task, USELESS, limits)
        if not run.recorded:
            raise Fallen("tests do not end without the fix", run.reward.decided_by)
        return run

    async def _deselected(
        self, one: TaskCandidate, task: Task, fix: bytes
    ) -> tuple[tuple[str, ...], tuple[str, ...], PatchRun]:
        """The tests that cannot decide, all others, and a run of the known fix. Raises Fallen if no test passes, _Failed for an
        infrastructure failure.
        """
        ecosystem = self.environments.ecosystem
        there = self.environments.history.files(one.base)
        modules = [path for path in one.modules if path in there]
        flaky: set[str] = set()
        if modules:
            base = replace(task, verdict=ExitCode(eval_script=ecosystem.eval_script(modules)))
            runs = await self._twice(base, USELESS, "no test of the base passes in the image")
            first, second = (run.outcomes for run in runs)
            names = first.by_name.keys() | second.by_name.keys()
            flaky = {name for name in names if first.passed(name) != second.passed(name)}
        runs = await self._twice(task, fix, "the known fix passes no test in the image")
        first, second = (run.outcomes for run in runs)
        names = first.by_name.keys() | second.by_name.keys()
        failing = {name for name in names if first.failed(name) or second.failed(name)}
        left_out = {name for name in failing | (flaky & names) if ecosystem.may_leave_out(name)}
        if not any(first.passed(name) and second.passed(name) for name in names - left_out):
            raise Fallen(
                "all its tests fail with the fix or flake", _end_of(", ".join(sorted(left_out)).encode())
            )
        return tuple(sorted(left_out)), tuple(sorted(names - left_out)), max(runs, key=lambda run: run.wall_s)

    async def _twice(self, task: Task, patch: bytes, reason: str) -> tuple[PatchRun, PatchRun]:
        """Two runs. Raises Fallen with `reason` if no test passes in the first."""
        runs: list[PatchRun] = []
        for _ in range(2):
            run = await self._run(task, patch)
            if not any(run.outcomes.passed(name) for name in run.outcomes.by_name):
                raise Fallen(reason, _end_of(run.log))
            runs.append(run)
        return runs[0], runs[1]

    async def _run(self, task: Task, patch: bytes, limits: Limits | None = None) -> PatchRun:
        claim = unqueued_claim(task, command="making", limits=limits or self.limits)
        found = await tried(lambda: self._grader.run_tests(claim, patch), task, image_fix=IMAGE_FIX)
        if isinstance(found, Broken):
            raise _Failed(found.why)
        return found


def _failures(unfixed: PatchRun, tests: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Those of these tests that fail or do not run without the known fix, and the output. Raises Fallen if all pass."""
    if unfixed.reward.value == 1:
        raise Fallen("tests pass without the fix", unfixed.reward.decided_by)
    found = unfixed.outcomes
    names = (name for name in tests if name not in found.by_name or found.failed(name))
    return tuple(names), shown_failures(unfixed.log)


def shown_failures(log: bytes) -> str:
    """What a log says of failures: from the first of them on where pytest says so, without the middle if it is long."""
    found = _FAILURES.search(log)
    shown = (log[found.start() :] if found else log).strip()
    if len(shown) > MOST_FAILURE_BYTES:
        half = MOST_FAILURE_BYTES // 2
        shown = shown[:half] + b"\n[...]\n" + shown[-half:]
    return shown.decode("utf-8", "replace").replace("\0", "")


def _end_of(log: bytes) -> str:
    """The last lines of a log that say something, in one line."""
    lines = [line.strip(" =") for line in log.decode("utf-8", "replace").split("\n") if line.strip(" =")]
    return " | ".join(lines[-3:])[-300:]
