"""The defence before the tests: the patch is applied without the files that it must not contain, and files that must not change are
restored.

These are the files that govern the runner, the scripts and settings that the eval script uses, and the files of the tests. No step is
judged by what it prints: its exit status decides, and the container's first process reports it, because no code of the patch has run by
then.
"""

import base64
import binascii
import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from pipeline.errors import GraderError, TaskBroken
from pipeline.task import Calibration, ExitCode, File, SwebenchLog, Task
from workers.grading import steps
from workers.grading.defence import witness
from workers.grading.defence.governing import (
    IMPORTING_NAMES,
    MOST_DIRECTORIES,
    GoverningFiles,
    added,
    hidden_paths,
    hides_names,
    same_runner_settings,
    searchable,
)
from workers.grading.defence.survey import Surveyed, Surveys
from workers.grading.steps import StepFailed, failed_step, tail
from workers.isolation import calls as isolation
from workers.isolation.calls import LimitExceeded
from workers.sandbox.git import ended, no_repository
from workers.sandbox.protocol import CommandResult, Sandbox

NOT_APPLIED = "patch does not apply"
SETTINGS_KEEP_BYTES = 16 * 1024 * 1024  # size of the settings files that a patch touches


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of applying a patch: the command that applied it, "" if none did, and the output of the commands.

    `fault` is the reason why its tests are not run at all, for which the reward is 0.
    """

    by: str
    complaints: str
    fault: str | None = None
    restored: tuple[str, ...] = ()  # see `GoverningFiles.restored`
    # Files of the patch without which the tests run, because they govern the runner.
    put_back: tuple[str, ...] = ()
    # Import directories that those files added, which are searched nevertheless.
    searched: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BeforeTests:
    """The steps before the tests in one container, without the eval script."""

    task: Task
    sandbox: Sandbox
    patch: bytes
    calibration: Calibration
    surveys: Surveys

    async def apply(self) -> Applied:
        """Applies the patch and puts the hidden tests in place. Files that a patch must not touch are restored.

        Raises StepFailed and CannotWrite for failures that may be the patch's fault.
        """
        governing = await self._begin()
        try:
            headers = await isolation.call(
                patch_headers, self.patch, governing.script, governing.surveyed.paths, self._of_tests
            )
        except LimitExceeded as error:
            return Applied("", "", fault=f"the patch could not be read {error}")
        if headers.touches_runner:
            await self._succeed(governing.step("save_governing"))
        loosely = str(int(not headers.hides_names))
        result = await self._step(governing.step("apply_patch", LOOSELY=loosely, **witness.installed()))
        complaints = result.output.decode("utf-8", "replace")
        if result.exit_code == steps.DOES_NOT_APPLY:
            return Applied("", complaints, fault=NOT_APPLIED)
        if result.exit_code not in steps.APPLIED_BY:
            raise failed_step("applying the patch", result)
        applied_by = steps.APPLIED_BY[result.exit_code]
        hidden = hidden_paths(self.task.verdict, self.sandbox.workdir)
        put_back, directories = tuple(path for path in headers.put_back if path not in hidden), ()
        try:
            if headers.touches_runner:
                settings = await self._restore_runner(governing)
                directories = settings.import_directories
                tampered = (path.decode("utf-8", "replace") for path in settings.tampered)
                put_back += tuple(path.removeprefix("./") for path in tampered)
            fault = await self._restore_protected(governing)
            searched = await self._search(governing, directories) if directories and not fault else ()
        except LimitExceeded as error:
            return Applied(applied_by, complaints, fault=f"its settings files could not be parsed {error}")
        restored = (*governing.restored, *(f"/{path}" for path in headers.put_back))
        return Applied(applied_by, complaints, fault, restored, put_back, searched)

    async def do_without_patch(self) -> None:
        """Takes the steps of `apply` without a patch. Errors are therefore no patch's fault."""
        governing = await self._begin()
        await self._succeed(governing.step("save_governing"))
        await self._restore_runner(governing)
        if await self._restore_protected(governing):
            raise TaskBroken("the hidden tests do not apply to their base")

    async def run_at_start(self, code: str) -> None:
        """Makes every Python of the container run `code` when it starts."""
        task = self.task
        governing = await self._governing_files(
            (*hidden_paths(task.verdict, self.sandbox.workdir), *self._of_tests)
        )
        await self._succeed(governing.step("install_files", **witness.started(code)))

    @property
    def _of_tests(self) -> tuple[str, ...]:
        """Files in the repository that contain tests, or that tests read."""
        return (*self.calibration.test_files, *self.calibration.reads)

    async def _begin(self) -> GoverningFiles:
        task = self.task
        if not self.sandbox.start.commit:
            raise TaskBroken(no_repository(self.sandbox.workdir, task.image))
        hidden = hidden_paths(task.verdict, self.sandbox.workdir)
        await self.sandbox.put(_files(task, self.patch, hidden, self._of_tests))
        return await self._governing_files((*hidden, *self.calibration.test_files))

    async def _governing_files(self, hidden: Sequence[str]) -> GoverningFiles:
        task = self.task
        surveyed = await self.surveys.survey(
            self.sandbox, task, hidden=hidden, under_test=self.calibration.fix_paths
        )
        return GoverningFiles(task.verdict.eval_script, surveyed)

    async def _restore_runner(self, governing: GoverningFiles) -> "ChangedSettings":
        """Restores the files that govern the runner. Returns what was changed in settings files."""
        listing = await self._succeed(governing.step("print_changed_settings"))
        try:
            changed = await isolation.call(
                changed_settings, listing.output, governing.script, self.sandbox.workdir
            )
        except GraderError as error:
            raise StepFailed(str(error)) from error
        if changed.tampered:
            listed = b"".join(path + b"\0" for path in changed.tampered)
            await self.sandbox.put([File(path=steps.TAMPERED, content=listed)])
        await self._succeed(governing.step("restore_governing", HEAD=self.sandbox.start.commit))
        return changed

    async def _search(self, governing: GoverningFiles, directories: Sequence[str]) -> tuple[str, ...]:
        """Makes Python search those of `directories` in which no module has the name of another one. Returns these.

        Call it once all files are in place.
        """
        listing = await self._succeed(governing.step("print_modules", DIRECTORIES=directories))
        searched = await isolation.call(searchable, listing.output)
        if searched:
            await self._succeed(governing.step("search_directories", DIRECTORIES=searched))
        return tuple(searched)

    async def _restore_protected(self, governing: GoverningFiles) -> str | None:
        """Restores files of the hidden tests from the base commit, then applies the hidden tests.

        Returns why the patch is to blame if they cannot be applied. Raises TaskBroken if nobody could apply them.
        """
        task = self.task
        base = self.sandbox.start.commit if task.setup_patch.strip() else task.base_commit
        result = await self._step(
            governing.step("restore_protected", BASE=base, HEAD=self.sandbox.start.commit)
        )
        if result.exit_code == steps.TESTS_DO_NOT_APPLY:
            raise TaskBroken(f"the hidden tests do not apply to their base: {tail(result)}")
        if result.exit_code == steps.IN_THE_WAY:
            return "the patch is in the way of the hidden tests"
        if result.exit_code != 0:
            raise failed_step("restoring protected files", result)
        if not isinstance(task.verdict, SwebenchLog) and task.verdict.files:
            await self.sandbox.put(task.verdict.files)
        return None

    async def _succeed(self, script: str) -> CommandResult:
        result = await self._step(script)
        if result.exit_code != 0 or result.dropped_bytes:
            raise failed_step("putting the runner's files back", result)
        return result

    async def _step(self, script: str) -> CommandResult:
        return await self.sandbox.run(
            script, timeout_s=steps.STEP_S, keep_bytes=SETTINGS_KEEP_BYTES, plain=True
        )


def _files(task: Task, patch: bytes, hidden: Sequence[str], of_tests: Sequence[str]) -> list[File]:
    """The files that the scripts read. A patch may lack its last newline, and git would call it corrupt."""
    verdict = task.verdict
    files = [
        File(path=steps.PATCH, content=ended(patch)),
        File(path=steps.PROTECTED, content=_listed(hidden)),
        File(path=steps.TESTED, content=_listed(path for path in of_tests if not path.startswith("/"))),
    ]
    if isinstance(verdict, ExitCode) and verdict.test_patch.strip():
        files.append(File(path=steps.TESTS, content=ended(verdict.test_patch)))
    return files


def _listed(paths: Iterable[str]) -> bytes:
    return "".join(f"{path}\0" for path in paths).encode("utf-8", "surrogateescape")


# The following functions read the output of a patch, which may take very long, so they run in a process of their own.


class PatchHeaders(msgspec.Struct, frozen=True):
    """The information in the headers of a patch. Either flag may be true too often, never too rarely."""

    touches_runner: bool  # whether it touches files that govern the test runner
    hides_names: bool  # whether it writes plain letters as octal escapes
    # Files of the patch that are as in the image when the tests run, without settings files.
    put_back: tuple[str, ...]


def patch_headers(
    patch: bytes, script: str, paths: tuple[str, ...], of_tests: tuple[str, ...]
) -> PatchHeaders:
    """The headers of `patch`, for the eval script `script`, which runs or names the files `paths`. Files `of_tests` are restored too."""
    governing, own = GoverningFiles(script, Surveyed(paths=paths)), frozenset(of_tests)
    put_back = tuple(
        path for path in witness.touched_paths(patch) if path in own or governing.puts_back(path)
    )
    return PatchHeaders(governing.touched_by(patch), hides_names(patch), put_back)


class ChangedSettings(msgspec.Struct, frozen=True):
    """The changes of a patch in settings files."""

    tampered: tuple[bytes, ...]  # paths of the files that change the settings of the script's runner
    import_directories: tuple[str, ...]  # import directories that they add, settings or not


def changed_settings(listing: bytes, script: str, workdir: str) -> ChangedSettings:
    """Reads the output of `print_changed_settings`, for the runner of `script`."""
    tampered: list[bytes] = []
    directories: set[str] = set()
    for line in listing.splitlines():
        try:
            path, old, new = (None if word == b"-" else base64.b64decode(word) for word in line.split(b" "))
        except (ValueError, binascii.Error) as error:
            raise GraderError(f"unreadable list of settings files: {line[:200]!r}") from error
        assert path is not None
        file = path.decode("utf-8", "replace")
        name = posixpath.basename(file)
        directories |= added(file, old, new, workdir)
        if name not in IMPORTING_NAMES and not same_runner_settings(name, old, new, script):
            tampered.append(path)
    return ChangedSettings(tuple(tampered), tuple(sorted(directories)[:MOST_DIRECTORIES]))
