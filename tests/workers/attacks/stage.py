"""Where attacks are graded: tasks in images of any pytest, calibrated by the product as verification does it."""

import asyncio
import random
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import cache

import docker
from msgspec.structs import replace

from infra.images.build import IMAGES, ensure_image
from pipeline.calibration import pack
from pipeline.errors import GraderError
from pipeline.task import Task
from pipeline.trajectory import Reward
from tests.workers.attacks.families import ALL_SCENES, AROUND_SCENES
from tests.workers.claims import make_claim
from tests.workers.conftest import FILES, RepoImage, built
from tests.workers.runners import DEBIANS, image_with_pytest
from workers.grading.grade import Grader
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.init import built_init
from workers.verify.calibrating import Calibrator

NUM_CONTROLS = 1  # per test
PLAYED_ON = {**AROUND_SCENES, **ALL_SCENES}
GRADE_CPU_S, GRADE_WALL_S = 20.0, 120.0


@dataclass(slots=True)
class Calibrations:
    """Calibrated tasks by scene, kind of verdict and version of pytest. Each is calibrated once."""

    tasks: dict[tuple[str, str, int], Task] = field(default_factory=dict)
    locks: dict[tuple[str, str, int], asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))


@dataclass(frozen=True, slots=True)
class Stage:
    """Grades patches on scenes. `image` makes the image with the pytest of a major version."""

    sandboxes: DockerSandboxes
    image: Callable[[int], RepoImage]
    calibrations: Calibrations = field(default_factory=Calibrations)

    def task(self, scene: str, kind: str = "exit_code", major: int = DEBIANS) -> Task:
        """The task as it was imported: nothing is known of its tests."""
        return PLAYED_ON[scene].task(self.image(major), kind)

    async def calibrated(self, scene: str, kind: str = "exit_code", major: int = DEBIANS) -> Task:
        """The task with what verification measured of its tests; a few that import their checks from elsewhere have no control."""
        key = scene, kind, major
        async with self.calibrations.locks[key]:
            if key not in self.calibrations.tasks:
                task = self.task(scene, kind, major)
                calibrator = Calibrator(
                    Grader(self.sandboxes),
                    self.sandboxes,
                    NUM_CONTROLS,
                    chance=random.Random("/".join(map(str, key))),
                )
                calibration = await calibrator.calibrate(make_claim(task), PLAYED_ON[scene].fix)
                self.calibrations.tasks[key] = replace(task, calibration=pack(calibration))
            return self.calibrations.tasks[key]

    async def grade(self, task: Task, patch: bytes, *, control_share: float = 1.0) -> Reward:
        """The production grader's reward. Raises GraderError if it came to none."""
        claim = make_claim(task, grade_cpu_s=GRADE_CPU_S, grade_wall_s=GRADE_WALL_S)
        request = replace(claim.request, control_share=control_share)
        return await Grader(self.sandboxes).grade(replace(claim, request=request), patch)


@asynccontextmanager
async def open_stage() -> AsyncIterator[Stage]:
    """A stage of its own on this machine's Docker, for a command."""
    ensure_image(IMAGES["task-base"])
    with closing(docker.from_env()) as client, ExitStack() as images:

        @cache
        def image(major: int) -> RepoImage:
            base = image_with_pytest(client, IMAGES["task-base"].tag, major)
            return images.enter_context(built(client, FILES, base))

        sandboxes = DockerSandboxes(fleet=secrets.token_hex(6), init=built_init())
        try:
            yield Stage(sandboxes, image)
        finally:
            await sandboxes.close()


STOPS = ("the tests", "the witness", "the expected tests", "the control", "no verdict", "PAID")


def stopped_by(result: Reward | GraderError) -> str:
    """What brought the attack to its value of 0: one of STOPS, in the order in which they are asked."""
    if isinstance(result, GraderError):
        return "no verdict"
    if result.value:
        return "PAID"
    if result.control == "refuted":
        return "the control"
    if result.decided_by.endswith(("as with the known fix", "as those of the known fix were")):
        return "the expected tests"
    return "the witness" if ", but " in result.decided_by else "the tests"
