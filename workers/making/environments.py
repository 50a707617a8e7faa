"""The images of a repository's tasks: one with its dependencies for each period of its history, and on top of it one for each task.

A period is the time in which the files that declare dependencies stay the same. What the images hold beside the repository is up to its
ecosystem. A task's image has the repository as one commit without history. Builds have no network. Images are named by what they are made
of.
"""

import asyncio
import hashlib
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import RolloutError
from pipeline.task import ExitCode, Task
from workers.images.api import ImageApi, ImageError, in_daemon
from workers.images.eviction import Shelf
from workers.images.names import parse_name
from workers.images.pulling import BuildDirectory, Builder, BuildPlan, Unobserved
from workers.making.ecosystems.ecosystem import BaseEnvironment, Declared, Ecosystem
from workers.making.history import Fallen, History
from workers.sandbox.protocol import Sandboxes
from workers.settings import docker_host, image_settings
from workers.unqueued import unqueued_claim

WORKDIR = "/workspace"
VERSIONS_LABEL = "swerve.versions_before"  # the date, or why versions are not limited by one
_TASK = """FROM {period} AS source
COPY base.bundle /
RUN git init -q {workdir} && cd {workdir} && git -c core.logAllRefUpdates=false fetch -q /base.bundle refs/bases/{commit} \\
 && git -c core.logAllRefUpdates=false reset -q --hard {commit} && rm -rf .git/FETCH_HEAD .git/ORIG_HEAD .git/logs \\
 && echo '*.egg-info/' >>.git/info/exclude

FROM {period}
COPY --from=source {workdir} {workdir}
WORKDIR {workdir}
"""


@dataclass(slots=True)
class Environments:
    """Builds images in `scratch`. `before_date`: versions of packages are those of the commit's month, if that can be known."""

    ecosystem: Ecosystem
    history: History
    base: BaseEnvironment
    name: str  # of the repository, as a part of images' names
    scratch: Path
    before_date: bool = False
    requires: tuple[str, ...] = ()
    _builder: Builder = field(init=False)
    _locks: dict[str, asyncio.Lock] = field(default_factory=dict[str, asyncio.Lock])
    _fallen: dict[str, Fallen] = field(default_factory=dict[str, Fallen])

    def __post_init__(self) -> None:
        api, settings = ImageApi(docker_host()), image_settings()
        plan = BuildPlan(settings.state_dir / "build-logs", {}, network="none")
        self._builder = Builder(api, Shelf(settings.state_dir, api.id), plan, Unobserved())

    async def image(self, commit: str, authored: str) -> tuple[str, str, Declared, str]:
        """The image of a task: its name, its base commit, what the repository declares, and how versions were limited.

        Raises Fallen, and ImageError or PackageError for a failure of the infrastructure.
        """
        needs = await asyncio.to_thread(self.ecosystem.declared, self.history, commit, self.requires)
        period, versions = await self._period(needs, authored)
        base = await asyncio.to_thread(self.history.base_commit, commit)
        dockerfile = _TASK.format(period=period, commit=base, workdir=WORKDIR) + self.ecosystem.install(needs)
        name = f"swerve-git/{self.name}:{_digest(dockerfile)}"
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            context = Path(folder)
            (context / "Dockerfile").write_text(dockerfile)
            if self._builder.api.find(name) is None:
                await asyncio.to_thread(self.history.bundle, commit, context / "base.bundle")
                await self._build(name, context, "the repository cannot be installed")
        return name, base, needs, versions

    async def _period(self, needs: Declared, authored: str) -> tuple[str, str]:
        """The image with the dependencies, and how their versions were limited."""
        until = _end_of_month(authored) if self.before_date else ""
        what = (self.base, needs.requirements, needs.build, needs.fingerprint, until)
        name = f"swerve-git/{self.name}-packages:{_digest(repr(what))}"
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name in self._fallen:
                raise self._fallen[name]
            found = self._builder.api.find(name)
            if found is not None:
                return name, found.labels.get(VERSIONS_LABEL, "")
            with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
                context = Path(folder)
                try:
                    dockerfile, versions = await asyncio.to_thread(
                        self.ecosystem.fetch, needs, self.base, until, context
                    )
                    label = f'LABEL {VERSIONS_LABEL}="{versions}"\n'
                    (context / "Dockerfile").write_text(dockerfile + label)
                    await self._build(name, context, "packages cannot be put into the image")
                except Fallen as fallen:
                    self._fallen[name] = fallen
                    raise
            return name, versions

    async def _build(self, name: str, context: Path, reason: str) -> None:
        """Raises Fallen with `reason` if a command of the Dockerfile fails, ImageError if Docker does."""
        source = BuildDirectory(parse_name(name), context)
        result = await in_daemon(lambda: self._builder.build(source))
        if result.state == "failed":
            if "returned a non-zero code" in result.reason:
                raise Fallen(reason, result.reason)
            raise ImageError(result.reason)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _end_of_month(date: str) -> str:
    """The first day after the month of an ISO date, so that one image serves all commits of a period in a month."""
    year, month = int(date[:4]), int(date[5:7])
    return f"{year + month // 12}-{month % 12 + 1:02}-01"


async def probed_base(image: str, ecosystem: Ecosystem, sandboxes: Sandboxes) -> BaseEnvironment:
    """The base image. Raises ValueError naming --base."""
    try:
        found = ImageApi(docker_host()).find(image)
        if found is None:
            raise ValueError(
                f"--base: no image {image} on this host: pull it, or make ours (`python -m infra.images.build task-base task-go`)"
            )
        task = Task(
            id="git:base",
            repo="",
            base_commit="",
            image=image,
            workdir="/",
            problem="",
            verdict=ExitCode(eval_script="true"),
        )
        async with sandboxes.open(unqueued_claim(task, command="making"), role="grade") as sandbox:
            result = await sandbox.run(ecosystem.probe, timeout_s=60)
    except (ImageError, RolloutError) as error:
        raise ValueError(f"--base: {image}: {error}") from error
    try:
        return BaseEnvironment(image, found.id, json.loads(result.output.decode().strip().split("\n")[-1]))
    except ValueError as error:
        raise ValueError(
            f"--base: {image} must have {ecosystem.base_needs}: {result.output[-200:]!r}"
        ) from error
