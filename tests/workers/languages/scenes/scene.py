"""A small repository with a bug, as a task and as patches."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.task import ExitCode, File, Resources, Task
from tests.workers.attacks.patches import edited_text, new
from tests.workers.claims import make_task
from tests.workers.conftest import RepoImage


@dataclass(frozen=True, slots=True)
class Scene:
    """A small repository with a bug, its hidden tests, and patches. The fix and the cheats are the files that they change."""

    files: Mapping[str, str]
    hidden: Mapping[str, str]
    script: str
    fix: Mapping[str, str]
    right_fixes: Mapping[str, Mapping[str, str]]
    cheats: Mapping[str, Mapping[str, str]]

    def patch(self, files: Mapping[str, str]) -> bytes:
        """A patch with which the repository has these files."""
        return b"".join(
            edited_text(path, self.files[path], text) if path in self.files else new(path, text)
            for path, text in sorted(files.items())
        )

    def task(self, image: RepoImage) -> Task:
        files = tuple(File(path=path, content=text.encode()) for path, text in self.hidden.items())
        verdict = ExitCode(eval_script=self.script, files=files)
        resources = Resources(memory_bytes=2 * 1024**3, cpus=2.0, pids=256)
        return make_task(image.tag, base_commit=image.commit, verdict=verdict, resources=resources)
