"""Where tasks in other languages than Python are verified and graded: an image with their compilers, and a scene for each language."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import docker
from msgspec.structs import replace

from infra.images.build import IMAGES, BaseImage, ensure_image
from pipeline.task import Calibration, Task, pack
from pipeline.trajectory import Reward
from tests.workers.claims import make_claim
from tests.workers.conftest import RepoImage, built
from tests.workers.languages.scenes import cpp, go, java, javascript, rust
from tests.workers.languages.scenes.scene import Scene
from workers.grading.grade import Grader
from workers.sandbox.docker import DockerSandboxes
from workers.verify.calibrating import Calibrator

IMAGE = BaseImage(
    tag="swerve/task-languages:3",
    packages=(
        *IMAGES["task-base"].packages,
        *(
            "cargo",
            "cmake",
            "default-jdk-headless",
            "g++",
            "golang-go",
            "junit5",
            "libgtest-dev",
            "make",
            "nodejs",
        ),
    ),
)
DOCKERFILE = """
FROM {base}
COPY repo /workspace
WORKDIR /workspace
RUN git init -q . && git config user.name t && git config user.email t@example.invalid && git add -A && git commit -qm base
"""
GRADE_CPU_S, GRADE_WALL_S = 120.0, 600.0


SCENES = {
    "go": go.SCENE,
    "java": java.SCENE,
    "javascript": javascript.SCENE,
    "rust": rust.SCENE,
    **cpp.SCENES,
}


@contextmanager
def built_scene(client: docker.DockerClient, scene: Scene) -> Iterator[RepoImage]:
    """An image with the repository of the scene; gone at the end."""
    ensure_image(IMAGE)
    files = {"Dockerfile": DOCKERFILE, **{f"repo/{path}": text for path, text in scene.files.items()}}
    with built(client, files, IMAGE.tag) as image:
        yield image


@dataclass(slots=True)
class Verified:
    """A task of a scene, calibrated as verification does it."""

    scene: Scene
    task: Task
    calibration: Calibration
    sandboxes: DockerSandboxes

    @classmethod
    async def of(cls, scene: Scene, task: Task, sandboxes: DockerSandboxes) -> "Verified":
        grader = Grader(sandboxes)
        calibrator = Calibrator(grader, sandboxes, num_controls=3, chance=random.Random(1))
        claim = make_claim(task, grade_cpu_s=GRADE_CPU_S, grade_wall_s=GRADE_WALL_S)
        calibration = await calibrator.calibrate(claim, scene.patch(scene.fix))
        return cls(scene, replace(task, calibration=pack(calibration)), calibration, sandboxes)

    async def grade(self, files: Mapping[str, str]) -> Reward:
        """The production grader's reward of a patch with these files."""
        claim = make_claim(self.task, grade_cpu_s=GRADE_CPU_S, grade_wall_s=GRADE_WALL_S)
        return await Grader(self.sandboxes).grade(claim, self.scene.patch(files))
