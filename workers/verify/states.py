"""The four states of one task, each graded by the production grader as often as requested.

    empty       no patch at all
    useless     a patch that adds a small text file
    tests_only  the hidden tests submitted as if they were the solution; for a task without tests of its own, useless
    gold        the known solution

A failure of the infrastructure is "infrastructure", never a 0. Transient failures are retried first, as the queue would.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from pipeline.calibration import Calibration
from pipeline.request import Claim, Limits
from pipeline.task import ExitCode, Task
from pipeline.taskfile import EXPECTED, Found, Gold, State
from pipeline.trajectory import Reward
from workers.grading.grade import Graded
from workers.unqueued.attempts import Broken, tried
from workers.unqueued.claims import unqueued_claim
from workers.verify.base_commit import SOUND, BaseCommit, Repository, look_at_base
from workers.verify.calibrating import USELESS
from workers.verify.control_runs import calibrated

NO_SOLUTION = "its solution is not in the gold file; import the task again"

T = TypeVar("T")


class GradesWithLog(Protocol):
    """The production grader. Raises RolloutError; never returns a verdict for an infrastructure failure."""

    async def grade_with_log(self, claim: Claim, patch: bytes) -> Graded: ...


class OpensRepositories(Protocol):
    """Opens a container of the claim's task as the grader does."""

    def open(self, claim: Claim, *, role: Literal["grade"]) -> AbstractAsyncContextManager[Repository]: ...


class Calibrates(Protocol):
    """Measures the tests with the known fix. Raises RolloutError."""

    async def calibrate(self, claim: Claim, fix: bytes) -> Calibration: ...


class KeepsLogs(Protocol):
    """Where the whole log of each try goes."""

    def keep(self, task: Task, state: State, number: int, log: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Try:
    """One verdict on one state, or what kept the grader from one."""

    found: Found
    why: str  # how the verdict was reached, or what broke
    reward: Reward | None


Tries = dict[State, list[Try]]


@dataclass(frozen=True, slots=True)
class Probed:
    """All that was found out about one task."""

    tries: Tries
    base: BaseCommit = SOUND
    calibration: Calibration | None = None  # None: there is no solution, or it does not pass


@dataclass(frozen=True, slots=True)
class Prober:
    """Grades each state of a task with `grader`. `limits` are those of the run that the tasks are meant for."""

    grader: GradesWithLog
    calibrator: Calibrates
    sandboxes: OpensRepositories
    logs: KeepsLogs
    limits: Limits
    num_repeats: int
    image_fix: str  # what to do about an image that is not on this host
    outage: str = ""  # why nothing at all can be graded here

    async def probe(self, task: Task, gold: Gold | None, *, on_state: Callable[[State], None]) -> Probed:
        """Each state in `num_repeats` tries, and the base commit; `on_state` is called when a state begins."""
        if self.outage:
            return Probed({state: [Try("infrastructure", self.outage, None)] for state in EXPECTED})
        base = await self._retried(task, lambda: self._base(task))
        if isinstance(base, Broken):
            return Probed({state: [Try("infrastructure", base.why, None)] for state in EXPECTED})
        patches = _patches(task, gold)
        calibration: Calibration | None = None
        tries: Tries = {"empty": [], "useless": [], "tests_only": [], "gold": []}
        for number in range(1, self.num_repeats + 1):
            for state, patch in patches.items():
                on_state(state)
                # A task that is paid without its fix is wrong whatever its tests are made of.
                if state == "gold" and number == 1 and not _is_paid(tries):
                    calibration = await self._calibrated(task, patch)
                graded = calibrated(task, calibration) if calibration and state == "gold" else task
                tries[state].append(await self._graded(graded, state, number, patch))
        if gold is None:
            tries["gold"] = [Try("infrastructure", NO_SOLUTION, None)]
        if "tests_only" not in patches:
            tries["tests_only"] = tries["useless"]
        tries["empty"] = [
            _empty(empty, useless) for empty, useless in zip(tries["empty"], tries["useless"], strict=True)
        ]
        return Probed(tries, base, calibration)

    async def _base(self, task: Task) -> BaseCommit:
        if not task.base_commit:
            return SOUND
        async with self.sandboxes.open(self._claim(task), role="grade") as repository:
            return await look_at_base(repository, task)

    async def _graded(self, task: Task, state: State, number: int, patch: bytes) -> Try:
        graded = await self._retried(task, lambda: self.grader.grade_with_log(self._claim(task), patch))
        if isinstance(graded, Broken):
            return Try("infrastructure", graded.why, None)
        self.logs.keep(task, state, number, graded.log)
        return Try(1 if graded.reward.resolved else 0, graded.reward.decided_by, graded.reward)

    async def _calibrated(self, task: Task, fix: bytes) -> Calibration | None:
        """None if the fix does not pass, or cannot be graded: its own verdict says why."""
        made = await self._retried(task, lambda: self.calibrator.calibrate(self._claim(task), fix))
        return None if isinstance(made, Broken) or made == Calibration() else made

    async def _retried(self, task: Task, work: Callable[[], Awaitable[T]]) -> T | Broken:
        return await tried(work, task, image_fix=self.image_fix)

    def _claim(self, task: Task) -> Claim:
        return unqueued_claim(task, command="verify", limits=self.limits)


def _is_paid(tries: Tries) -> bool:
    return any(one.found == 1 for made in tries.values() for one in made)


def _patches(task: Task, gold: Gold | None) -> dict[State, bytes]:
    patches: dict[State, bytes] = {"empty": b"", "useless": USELESS}
    tests = gold.test_patch.encode("utf-8", "surrogateescape") if gold else b""
    if not tests.strip() and isinstance(task.verdict, ExitCode):
        tests = task.verdict.test_patch
    if tests.strip():
        patches["tests_only"] = tests
    if gold is not None:
        patches["gold"] = gold.patch.encode("utf-8", "surrogateescape")
    return patches


def _empty(empty: Try, useless: Try) -> Try:
    """The grader needs no container to call an empty patch 0; where none can be had, that 0 says nothing."""
    return useless if useless.found == "infrastructure" else empty
