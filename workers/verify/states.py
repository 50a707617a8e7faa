"""The five states of one task, each graded by the production grader as often as requested, the last one once.

    empty       no patch at all
    useless     a patch that adds a small text file
    tests_only  the hidden tests submitted as if they were the solution; for a task without tests of its own, useless
    gold        the known solution
    agent       the same, made and submitted in an agent's container (submitting.py)

A failure of the infrastructure is "infrastructure", never a 0. Transient failures are retried first, as the queue would.

The repository in the task's image must be at the task's base commit. Hidden tests are restored from the base commit, and the history that
an agent sees ends there. If the image has another commit checked out, or does not have this one, the task is wrong. In images of SWE-bench
and similar data sets the builder commits on top of the base; `Task.builder_commits` says so.
"""

import functools
import itertools
import shlex
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from msgspec.structs import replace

from pipeline.errors import GraderError
from pipeline.request import Claim, Limits
from pipeline.task import Calibration, ExitCode, Task
from pipeline.taskfile import EXPECTED, Found, Gold, State
from pipeline.trajectory import Reward
from workers.grading.grade import Graded
from workers.sandbox.git import GIT, no_repository
from workers.sandbox.protocol import CommandResult
from workers.unqueued import Broken, tried, unqueued_claim
from workers.verify.calibrating import USELESS
from workers.verify.trials import calibrated

LOOK_S = 60.0
_FIX = "check out base_commit in the image, or set base_commit to what the image has"
SHOWN_CHARS = 12  # characters shown of a commit's hash

# $1 base commit, $2 "1" if a setup may have put a commit of ours on top. Prints HEAD, the base commit ("-": there is none),
# whether their files are the same, and how many commits HEAD is ahead ("-": the base is not in its history).
_LOOK = f"""{GIT}
head=$(git rev-parse --verify HEAD) || exit 1
if [ "$2" ] && [ "$(git log -1 --format=%ae HEAD)" = swerve@localhost ]; then head=$(git rev-parse HEAD^) || exit 1; fi
base=$(git rev-parse -q --verify "$1^{{commit}}") || {{ echo "$head - - -"; exit 0; }}
same=no
git diff-tree --quiet "$base" "$head" && same=yes
ahead=-
git merge-base --is-ancestor "$base" "$head" && ahead=$(git rev-list --count "$base..$head")
echo "$head $base $same $ahead"
"""


class Repository(Protocol):
    """A container of the task, set up. Raises SandboxError."""

    @property
    def workdir(self) -> str: ...

    async def run(self, command: str, *, timeout_s: float, as_root: bool) -> CommandResult: ...


@dataclass(frozen=True, slots=True)
class BaseCommit:
    """The faults of a task's base commit, and facts that are only worth knowing; "" if there are none."""

    fault: str = ""
    warning: str = ""


SOUND = BaseCommit()

_FIND = (
    r"find / -maxdepth 4 \( -path /proc -o -path /sys \) -prune -o -name .git -print 2>/dev/null | head -n 3"
)


async def _places(repository: Repository) -> list[str]:
    """Directories near the root of the image that are git repositories."""
    found = await repository.run(_FIND, timeout_s=LOOK_S, as_root=True)
    return [line.removesuffix("/.git") for line in found.output.decode("utf-8", "replace").splitlines()]


async def look_at_base(repository: Repository, task: Task) -> BaseCommit:
    """Compares the base commit with HEAD. A task without one uses HEAD in any case.

    Raises SandboxError, and GraderError if there is no HEAD.
    """
    if not task.base_commit:
        return SOUND
    has_setup = "1" if task.setup_script.strip() or task.setup_patch.strip() else ""
    command = f"set -- {shlex.join([task.base_commit, has_setup])}\n{_LOOK}"
    result = await repository.run(command, timeout_s=LOOK_S, as_root=True)
    words = result.output.decode("utf-8", "replace").split()
    place = f"{repository.workdir} of {task.image}"
    if result.exit_code != 0 or len(words) != 4:
        raise GraderError(no_repository(repository.workdir, task.image, await _places(repository)))
    head, base, same, ahead = words
    at = f"the repository at {place} has {head[:SHOWN_CHARS]} checked out"
    if base == "-":
        return BaseCommit(fault=f"base_commit: {task.base_commit} is not a commit there; {at}: {_FIX}")
    if base == head:
        return SOUND
    if task.builder_commits and ahead != "-":
        commits = f"{ahead} commit{'s' if ahead != '1' else ''}"
        return BaseCommit(warning=f"base_commit: HEAD of the image is {commits} of its builder later")
    if same == "yes":
        return BaseCommit(warning=f"base_commit: {at}, which has the same files")
    where = "which is not in its history" if ahead == "-" else f"{ahead} commits before it"
    return BaseCommit(fault=f"base_commit: {at}, not {task.base_commit[:SHOWN_CHARS]}, {where}: {_FIX}")


NO_SOLUTION = "its solution is not in the gold file; import the task again"

T = TypeVar("T")


class GradesWithLog(Protocol):
    """The production grader. Raises RolloutError; never returns a verdict for an infrastructure failure."""

    async def grade_with_log(self, claim: Claim, patch: bytes) -> Graded: ...


class Submits(Protocol):
    """Grades a known fix as an agent makes and submits it. Raises RolloutError."""

    async def grade(self, claim: Claim, fix: bytes) -> Graded: ...


class OpensRepositories(Protocol):
    """Opens a container of the claim's task as the grader does."""

    def open(self, claim: Claim, *, role: Literal["grade"]) -> AbstractAsyncContextManager[Repository]: ...


class Calibrates(Protocol):
    """Measures the tests with the known fix. Raises RolloutError."""

    async def calibrate(self, claim: Claim, fix: bytes) -> Calibration: ...


class KeepsLogs(Protocol):
    """Stores the whole log of each try."""

    def keep(self, task: Task, state: State, number: int, log: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Try:
    """One verdict on one state, or the failure that prevented one."""

    found: Found
    why: str  # how the verdict was reached, or what broke
    reward: Reward | None


Tries = dict[State, list[Try]]


@dataclass(frozen=True, slots=True)
class Probed:
    """All results about one task."""

    tries: Tries
    base: BaseCommit = SOUND
    calibration: Calibration | None = None  # None: there is no solution, or it does not pass
    agent_s: float = 0.0  # seconds that the state `agent` took


@dataclass(frozen=True, slots=True)
class Prober:
    """Grades each state of a task with `grader`. `limits` are those of the run for which the tasks are meant."""

    grader: GradesWithLog
    submitter: Submits
    calibrator: Calibrates
    sandboxes: OpensRepositories
    logs: KeepsLogs
    limits: Limits
    num_repeats: int
    agent_config: str  # the text of the agent file whose submission is tried
    image_fix: str  # what to do about an image that is not on this host
    # A state that has a wrong verdict in one try is not tried again, nor are the others.
    ends_at_fault: bool = False
    outage: str = ""  # why nothing at all can be graded here

    async def probe(
        self, task: Task, gold: Gold | None, *, on_step: Callable[[str, int, int], None]
    ) -> Probed:
        """Each state in `num_repeats` tries, or in fewer with `ends_at_fault`, and the base commit. `on_step` is called when a step begins,
        with its name, the number of finished steps, and the number of all steps.
        """
        patches = _patches(task, gold)
        num_steps = 1 + len(patches) * self.num_repeats + 2 * ("gold" in patches)
        steps = itertools.count()
        on_step("base commit", next(steps), num_steps)
        if self.outage:
            return Probed({state: [Try("infrastructure", self.outage, None)] for state in EXPECTED})
        base = await self._retried(task, lambda: self._base(task))
        if isinstance(base, Broken):
            return Probed({state: [Try("infrastructure", base.why, None)] for state in EXPECTED})
        calibration: Calibration | None = None
        broken: Broken | None = None  # the failure that prevented a calibration
        tries: Tries = {state: [] for state in EXPECTED}
        for number in range(1, self.num_repeats + 1):
            for state, patch in patches.items():
                # A task whose tests pass without its fix is wrong in any case, so it is not calibrated.
                if state == "gold" and number == 1 and not _is_paid(tries):
                    on_step("controls", next(steps), num_steps)
                    made = await self._calibrated(task, patch)
                    calibration = made if isinstance(made, Calibration) else None
                    broken = made if isinstance(made, Broken) else None
                on_step(state, next(steps), num_steps)
                if state == "gold" and broken:
                    tries[state].append(Try("infrastructure", broken.why, None))
                    continue
                graded = calibrated(task, calibration) if calibration and state == "gold" else task
                work = functools.partial(self.grader.grade_with_log, self._claim(graded), patch)
                tries[state].append(await self._graded(graded, state, number, work))
            if self.ends_at_fault and _has_fault(tries):
                break
        if gold is None:
            tries["gold"] = [Try("infrastructure", NO_SOLUTION, None)]
        tries["agent"], began_at = tries["gold"][:1], time.monotonic()
        if tries["gold"][0].found == 1:
            on_step("agent", next(steps), num_steps)
            tries["agent"] = [await self._submitted(task, calibration or Calibration(), patches["gold"])]
        if "tests_only" not in patches:
            tries["tests_only"] = tries["useless"]
        tries["empty"] = [
            _empty(empty, useless) for empty, useless in zip(tries["empty"], tries["useless"], strict=True)
        ]
        return Probed(tries, base, calibration, time.monotonic() - began_at)

    async def _base(self, task: Task) -> BaseCommit:
        if not task.base_commit:
            return SOUND
        async with self.sandboxes.open(self._claim(task), role="grade") as repository:
            return await look_at_base(repository, task)

    async def _graded(
        self, task: Task, state: State, number: int, work: Callable[[], Awaitable[Graded]]
    ) -> Try:
        graded = await self._retried(task, work)
        if isinstance(graded, Broken):
            return Try("infrastructure", graded.why, None)
        self.logs.keep(task, state, number, graded.log)
        return Try(1 if graded.reward.resolved else 0, graded.reward.decided_by, graded.reward)

    async def _submitted(self, task: Task, calibration: Calibration, fix: bytes) -> Try:
        """The state `agent`, without control runs: whether the fix arrives does not depend on them."""
        task = calibrated(task, replace(calibration, contradictions=()))
        work = functools.partial(self.submitter.grade, self._claim(task), fix)
        return await self._graded(task, "agent", 1, work)

    async def _calibrated(self, task: Task, fix: bytes) -> Calibration | Broken | None:
        """The calibration; None if the fix does not pass, in which case its own verdict says why."""
        made = await self._retried(task, lambda: self.calibrator.calibrate(self._claim(task), fix))
        return None if made == Calibration() else made

    async def _retried(self, task: Task, work: Callable[[], Awaitable[T]]) -> T | Broken:
        return await tried(work, task, image_fix=self.image_fix)

    def _claim(self, task: Task) -> Claim:
        return unqueued_claim(task, command="verify", limits=self.limits, agent_config=self.agent_config)


def _is_paid(tries: Tries) -> bool:
    return any(one.found == 1 for made in tries.values() for one in made)


def _has_fault(tries: Tries) -> bool:
    return any(
        one.found not in (EXPECTED[state], "infrastructure") for state, made in tries.items() for one in made
    )


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
    """The try of the empty patch. The grader gives it 0 without a container; if no container can be opened, that 0 proves nothing."""
    return useless if useless.found == "infrastructure" else empty
