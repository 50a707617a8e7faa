"""The images of Harbor tasks, and their known fixes: what solution/solve.sh changes in the repository, in a container without a network."""

import hashlib
import re
import shlex
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from pipeline.errors import RolloutError
from pipeline.screen import visible_line
from pipeline.task import File, Task
from pipeline.taskfile import Gold, fingerprint
from workers.images.api import ImageApi, ImageError, in_daemon
from workers.images.eviction import Shelf
from workers.images.names import parse_name
from workers.images.pulling import BuildDirectory, Builder, BuildPlan, Unobserved
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.git import no_repository
from workers.sandbox.protocol import Sandboxes
from workers.settings import docker_host, image_settings
from workers.tasksets.harbor_directories import Tree, write_tree
from workers.tasksets.importing import Row
from workers.tasksets.rows import Fields
from workers.unqueued import side_by_side, unqueued_claim

SOLVE = "/solution/solve.sh"
_ENVIRONMENT = "environment/"
# Makes the image's workdir a repository, if it is none. Author and date are the same in every build.
_COMMIT = """RUN cd {workdir} && [ "$PWD" != / ] && {{ git -c safe.directory='*' rev-parse -q --verify HEAD || {{ \\
  export GIT_AUTHOR_DATE=2025-01-01T00:00:00Z GIT_COMMITTER_DATE=2025-01-01T00:00:00Z && git init -q && git add -A && \\
  git -c user.name=harbor -c user.email=harbor@localhost -c commit.gpgsign=false commit -q --allow-empty -m base; }}; }}
"""


class NoRepository(ValueError):
    """The workdir of the image is not a git repository with a commit."""


async def solved(rows: Sequence[Fields], *, build: bool, num_jobs: int) -> list[Fields]:
    """The rows of task directories with the image and the solution of each. One that cannot be used breaks its row by the reason."""
    sandboxes, done = DockerSandboxes(), dict(enumerate(rows))
    solver = _Solver(sandboxes, build=build)

    async def solve(number: int) -> None:
        fields = done[number]
        try:
            if "directory" in fields.values:
                done[number] = fields.having(**await solver.solved(fields))
        except (ValueError, OSError, ImageError, RolloutError) as error:
            done[number] = fields.broken_by(ValueError(str(error)))

    try:
        await side_by_side(range(len(rows)), solve, num_jobs=max(1, num_jobs))
    finally:
        await sandboxes.close()
    return [done[number] for number in range(len(rows))]


@dataclass(slots=True)
class _Solver:
    """Builds images where `build` allows it, and runs solutions."""

    sandboxes: Sandboxes
    build: bool
    _builder: Builder | None = field(default=None)

    async def solved(self, fields: Fields) -> Row:
        """The columns `task` and `gold`. Raises ValueError, ImageError and RolloutError."""
        directory, task = fields.values["directory"], fields.values["task"]
        if not task.image:
            task = replace(task, image=await self._built(fields, task))
        try:
            patch = await self._patch(fields, task)
        except NoRepository:
            if not self.build or task.image != directory.task.image:
                raise
            task = replace(task, image=await self._built(fields, task))
            patch = await self._patch(fields, task)
        tree = tuple(directory.tree.values())
        return {
            "task": task,
            "gold": Gold(id=task.id, patch=patch, directory=tree, directory_of=fingerprint(task)),
        }

    async def _patch(self, fields: Fields, task: Task) -> str:
        """What the solution changes in the workdir."""
        directory = fields.values["directory"]
        offline = replace(task, resources=replace(task.resources, network=False))
        files = [
            File(
                path=f"/{path}",
                content=file.content,
                mode=0o755 if f"/{path}" == SOLVE else file.mode & 0o777,
            )
            for path, file in directory.tree.items()
            if path.startswith("solution/")
        ]
        variables = (
            f"export {name}={shlex.quote(value)}\n" for name, value in directory.solution_env.items()
        )
        async with self.sandboxes.open(unqueued_claim(offline, command="import"), role="grade") as sandbox:
            if not sandbox.start.commit:
                raise NoRepository(
                    f"environment.workdir: {no_repository(sandbox.workdir, task.image)}; --build makes an image in which it is one"
                )
            await sandbox.put(files)
            result = await sandbox.run(f"{''.join(variables)}{SOLVE}", timeout_s=directory.solve_s)
            ended = "took too long" if result.exit_code is None else f"ended with status {result.exit_code}"
            shown = visible_line(result.output[-300:].decode("utf-8", "replace").strip())
            patch = await sandbox.diff()
        if result.exit_code is None or not patch.strip():
            why = "it changes nothing in the workdir, and only a patch of the workdir can be graded"
            raise ValueError(f"{SOLVE[1:]}: {ended}{'' if result.exit_code is None else f': {why}'}: {shown}")
        try:
            return patch.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{SOLVE[1:]}: changes text that is not UTF-8: {error}") from error

    async def _built(self, fields: Fields, task: Task) -> str:
        """The name of an image in which the task's workdir is a repository: its own image, or environment/Dockerfile, and a commit."""
        tree: Tree = fields.values["directory"].tree
        context = [
            replace(file, path=path.removeprefix(_ENVIRONMENT))
            for path, file in tree.items()
            if path.startswith(_ENVIRONMENT)
        ]
        digest = hashlib.sha256(repr((task.image, task.workdir, context)).encode()).hexdigest()[:12]
        name = f"harbor/{re.sub(r'[^a-z0-9]+', '-', task.repo.lower()).strip('-')}:{digest}"
        base = task.image or await self._build(f"{name}-environment", context)
        commit = _COMMIT.format(workdir=shlex.quote(task.workdir or "."))
        dockerfile = File(path="Dockerfile", content=f"FROM {base}\n{commit}".encode(), mode=0o644)
        return await self._build(name, [dockerfile])

    async def _build(self, name: str, context: Iterable[File]) -> str:
        if self._builder is None:
            api, settings = ImageApi(docker_host()), image_settings()
            plan = BuildPlan(settings.state_dir / "build-logs", {})
            self._builder = Builder(api, Shelf(settings.state_dir, api.id), plan, Unobserved())
        builder = self._builder
        with tempfile.TemporaryDirectory() as scratch:
            write_tree(context, Path(scratch, "context"))
            source = BuildDirectory(parse_name(name), Path(scratch, "context"))
            result = await in_daemon(lambda: builder.build(source))
        if result.state == "failed":
            raise ValueError(f"environment: {result.reason}")
        return name
