"""A container with the known fix and the hidden tests in place, and what is read of the tests there before anything runs."""

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pipeline.request import Claim
from pipeline.task import Calibration, Task
from workers.grading.container import GradingContainer
from workers.grading.controls.locating import FoundFunction, locate
from workers.grading.controls.placing import read_tests
from workers.grading.defence import witness
from workers.grading.defence.survey import Surveys
from workers.grading.swebench_rules import Marks
from workers.sandbox.protocol import Sandbox
from workers.verify.reads.record import OpensSandboxes


@dataclass(frozen=True, slots=True)
class FoundTests:
    """The function of each test, and the text of each file with tests. Files of the fix are left out of the texts.

    `support` has the text of the other modules of the tests, as far as they are known.
    """

    functions: Mapping[str, FoundFunction]
    texts: Mapping[str, bytes]
    workdir: str
    support: Mapping[str, bytes] = field(default_factory=dict[str, bytes])


@asynccontextmanager
async def fixed(sandboxes: OpensSandboxes, claim: Claim, fix: bytes) -> AsyncGenerator[Sandbox]:
    """A container with the known fix and the hidden tests in place."""
    calibration = Calibration(fix_paths=tuple(witness.touched_paths(fix)))
    async with sandboxes.open(claim, role="grade") as sandbox:
        limits = claim.request.limits
        await GradingContainer(claim, sandbox, fix, Marks(), limits, calibration, Surveys()).apply()
        yield sandbox


async def find_tests(
    sandbox: Sandbox, task: Task, names: Sequence[str], fix_paths: Collection[str]
) -> FoundTests:
    """Finds these tests in a container that `fixed` opened."""
    functions = await locate(sandbox, task, names)
    # A module with doctests is itself under test.
    paths = {place.path for place in functions.values() if not place.is_doctest} - {*fix_paths}
    texts = await read_tests(sandbox, task.verdict.eval_script, paths)
    return FoundTests(functions, texts, sandbox.workdir)
