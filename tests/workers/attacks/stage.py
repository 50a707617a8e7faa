"""Where attacks are graded: tasks in images of any pytest, calibrated by the product as verification does it."""

import asyncio
import random
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import cache

import docker
import msgspec
from msgspec.structs import replace

from infra.images.build import IMAGES, ensure_image
from pipeline.errors import GraderError
from pipeline.request import Claim, Limits
from pipeline.task import Contradiction, Task, pack
from pipeline.trajectory import Reward
from tests.workers.attacks.families import ALL_SCENES, AROUND_SCENES
from tests.workers.claims import make_claim
from tests.workers.conftest import FILES, RepoImage, built
from tests.workers.runners import DEBIANS, image_with_pytest
from workers.grading.container import PatchRun
from workers.grading.defence.survey import BaseContainer, Surveyed, Surveys
from workers.grading.grade import Grader
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.first_process import built_init
from workers.verify.calibrating import Calibrator
from workers.verify.trials import TRIAL_OPTIONS

NUM_CONTROLS = 1  # per test
PLAYED_ON = {**AROUND_SCENES, **ALL_SCENES}
GRADE_CPU_S, GRADE_WALL_S = 20.0, 120.0
# Lines of defence that a stage can do without: controls; the witness; the record of what tests read; the files that the eval script names.
LINES = ("controls", "witness", "record", "words")
# Without the witness only a log says what became of the tests.
KIND_WITHOUT_WITNESS = "tests_json"
OPTIONS = "PYTEST_ADDOPTS"  # of pytest, beside those of its command
# The same repository in an image whose user owns it. Set-up scripts of scenes, which are the user's, add modules and programs.
OWNED = """RUN echo dev:x:1000:1000::/home/dev:/bin/bash >>/etc/passwd && mkdir -p /home/dev && chown -R 1000:1000 /home/dev /workspace \\
 && chown 1000:1000 /usr/lib/python3/dist-packages /usr/local/bin
USER dev
"""
FILES_OF_USER = FILES | {"Dockerfile": FILES["Dockerfile"] + OWNED}
NO_WITNESS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", OPTIONS: "-rA"}


@dataclass(slots=True)
class RunOnce:
    """Runs the tests for a calibration, and the same run once: no test of a scene is flaky, and so a second one would say the same.

    A calibration tries each contradiction twice without tracebacks and then as a grader does. Here all three are the run as a grader
    makes it. What is lost, that flaky contradictions are dropped, is tested in tests/workers/verify.
    """

    grader: Grader
    runs: dict[bytes, PatchRun] = field(default_factory=dict)

    async def run_tests(
        self,
        claim: Claim,
        patch: bytes,
        contradictions: Sequence[Contradiction] = (),
        limits: Limits | None = None,
        *,
        at_start: str = "",
    ) -> PatchRun:
        task = claim.request.task
        if not at_start:
            claim = replace(claim, request=replace(claim.request, task=with_tracebacks(task)))
        key = msgspec.json.encode(
            (claim.request.task, patch, contradictions, at_start), order="deterministic"
        )
        if key not in self.runs:
            self.runs[key] = await self.grader.run_tests(
                claim, patch, contradictions, limits, at_start=at_start
            )
        return self.runs[key]


def with_tracebacks(task: Task) -> Task:
    """The task whose runner prints tracebacks, and ends as its command says: no scene has settings that end a run early."""
    options = task.env.get(OPTIONS, "")
    if not options.endswith(TRIAL_OPTIONS):
        return task
    env = {name: value for name, value in task.env.items() if name != OPTIONS}
    kept = options.removesuffix(TRIAL_OPTIONS).strip()
    return replace(task, env=env | ({OPTIONS: kept} if kept else {}))


class NoSurveys(Surveys):
    """Surveys that find no file in the eval script's words."""

    async def survey(
        self, container: BaseContainer, task: Task, *, hidden: Iterable[str], under_test: Iterable[str]
    ) -> Surveyed:
        del container, task, hidden, under_test
        return Surveyed()


@dataclass(slots=True)
class Calibrations:
    """Calibrated tasks by scene, kind of verdict and version of pytest. Each is calibrated once."""

    tasks: dict[tuple[str, str, int], Task] = field(default_factory=dict)
    locks: dict[tuple[str, str, int], asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))


@dataclass(frozen=True, slots=True)
class Stage:
    """Grades patches on scenes. `image` makes the image with the pytest of a major version. `off` are LINES to do without."""

    sandboxes: DockerSandboxes
    image: Callable[[int], RepoImage]
    calibrations: Calibrations = field(default_factory=Calibrations)
    off: frozenset[str] = frozenset()
    surveys: Surveys = field(default_factory=Surveys)  # shared by gradings, as in a worker

    def task(self, scene: str, kind: str = "exit_code", major: int = DEBIANS) -> Task:
        """The task as it was imported: nothing is known of its tests."""
        task = PLAYED_ON[scene].task(self.image(major), kind)
        return replace(task, env={**task.env, **NO_WITNESS}) if "witness" in self.off else task

    async def calibrated(self, scene: str, kind: str = "exit_code", major: int = DEBIANS) -> Task:
        """The task with what verification measured of its tests; a few that import their checks from elsewhere have no control."""
        key = scene, kind, major
        async with self.calibrations.locks[key]:
            if key not in self.calibrations.tasks:
                task = self.task(scene, kind, major)
                calibrator = Calibrator(
                    RunOnce(Grader(self.sandboxes, surveys=self.surveys)),
                    self.sandboxes,
                    NUM_CONTROLS,
                    chance=random.Random("/".join(map(str, key))),
                )
                calibration = await calibrator.calibrate(make_claim(task), PLAYED_ON[scene].fix)
                if "record" in self.off:
                    calibration = replace(calibration, reads=())
                self.calibrations.tasks[key] = replace(task, calibration=pack(calibration))
            return self.calibrations.tasks[key]

    async def grade(self, task: Task, patch: bytes) -> Reward:
        """The production grader's reward. Raises GraderError if it came to none."""
        claim = make_claim(task, grade_cpu_s=GRADE_CPU_S, grade_wall_s=GRADE_WALL_S)
        request = replace(claim.request, control_share=0.0 if "controls" in self.off else 1.0)
        surveys = NoSurveys() if "words" in self.off else self.surveys
        return await Grader(self.sandboxes, surveys=surveys).grade(replace(claim, request=request), patch)


@asynccontextmanager
async def open_stage(off: frozenset[str] = frozenset(), *, as_user: bool = False) -> AsyncIterator[Stage]:
    """A stage of its own on this machine's Docker, for a command, without the lines of defence that are `off`.

    `as_user`: in images whose user is not root.
    """
    ensure_image(IMAGES["task-base"])
    with closing(docker.from_env()) as client, ExitStack() as images:

        @cache
        def image(major: int) -> RepoImage:
            base = image_with_pytest(client, IMAGES["task-base"].tag, major)
            files = FILES_OF_USER if as_user else FILES
            return images.enter_context(built(client, files, base))

        sandboxes = DockerSandboxes(fleet=secrets.token_hex(6), init=built_init())
        try:
            yield Stage(sandboxes, image, off=off)
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
