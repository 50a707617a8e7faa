"""The four states of one task, each put before the production grader as often as asked.

empty       no patch at all
useless     a patch that adds a small text file
tests_only  the hidden tests handed in as if they were the solution; of a task without tests of its own, useless
gold        the known solution

What breaks is "infrastructure", never a 0: a transient failure is tried again first, as the queue would.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.errors import ImageMissing, RolloutError
from pipeline.request import Limits
from pipeline.task import ExitCode, Task
from pipeline.taskfile import EXPECTED, Found, Gold, State
from pipeline.trajectory import Reward
from workers.rollout import Grades
from workers.unqueued import unqueued_claim

USELESS = b"""diff --git a/swerve-note.txt b/swerve-note.txt
new file mode 100644
--- /dev/null
+++ b/swerve-note.txt
@@ -0,0 +1 @@
+This file changes nothing.
"""
RETRY_PAUSES_S = (1.0, 4.0)  # before the second and the third try
NO_SOLUTION = "its solution is not in the gold file; import the task again"


@dataclass(frozen=True, slots=True)
class Try:
    """One verdict on one state, or what kept the grader from one."""

    found: Found
    why: str  # how the verdict was reached, or what broke
    reward: Reward | None


Tries = dict[State, list[Try]]


@dataclass(frozen=True, slots=True)
class Prober:
    """Puts tasks before `grader`. `limits` are those of the run that the tasks are meant for."""

    grader: Grades
    limits: Limits
    num_repeats: int
    image_fix: str  # what to do about an image that is not on this host
    outage: str = ""  # why nothing at all can be graded here

    async def probe(self, task: Task, gold: Gold | None, *, on_state: Callable[[State], None]) -> Tries:
        """What came of each state, in `num_repeats` tries each; `on_state` is told when one begins."""
        if self.outage:
            return {state: [Try("infrastructure", self.outage, None)] for state in EXPECTED}
        patches = _patches(task, gold)
        tries: Tries = {"empty": [], "useless": [], "tests_only": [], "gold": []}
        for _ in range(self.num_repeats):
            for state, patch in patches.items():
                on_state(state)
                tries[state].append(await self._graded(task, patch))
        if gold is None:
            tries["gold"] = [Try("infrastructure", NO_SOLUTION, None)]
        if "tests_only" not in patches:
            tries["tests_only"] = tries["useless"]
        tries["empty"] = [
            _empty(empty, useless) for empty, useless in zip(tries["empty"], tries["useless"], strict=True)
        ]
        return tries

    async def _graded(self, task: Task, patch: bytes) -> Try:
        for pause_s in (*RETRY_PAUSES_S, None):
            try:
                reward = await self.grader.grade(
                    unqueued_claim(task, command="verify", limits=self.limits), patch
                )
            except ImageMissing:
                return Try("infrastructure", f"no image {task.image} on this host: {self.image_fix}", None)
            except RolloutError as error:
                if pause_s is None or not error.transient:
                    return Try("infrastructure", str(error), None)
                await asyncio.sleep(pause_s)
            else:
                return Try(1 if reward.resolved else 0, reward.decided_by, reward)
        raise AssertionError("the last try returns")


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
