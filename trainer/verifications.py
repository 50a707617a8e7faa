"""What `python -m workers.verify` found of a task file, as a run uses it: which tasks can be trusted, how strong their tests are, and
the calibration that the grader needs.

A verification counts only for the very task that it was made of: one that changed since is an unverified one.
"""

from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from pipeline.calibration import unpack
from pipeline.message import MalformedMessage
from pipeline.task import Task
from pipeline.task_facts import TaskFacts
from pipeline.taskfile import Verification, read_verified, standing, verified_path


@dataclass(frozen=True, slots=True)
class Verifications:
    """Of the tasks in the file `path`, which the key `field` of the recipe names."""

    field: str
    path: str  # "": the recipe names no file
    by_task: dict[str, Verification]

    @classmethod
    def beside(cls, field: str, path: str) -> "Verifications":
        """Those in the file beside `path`; none if there is no such file. Raises ValueError if it is damaged."""
        verified = verified_path(Path(path)) if path else None
        return cls(field, path, read_verified(verified) if verified and verified.exists() else {})

    def doubts(self, tasks: list[Task]) -> dict[str, str]:
        """Ids of the tasks whose grader may judge wrongly, and why."""
        return {task.id: doubt for task in tasks if (doubt := self._doubt(task))}

    def calibrated(self, tasks: list[Task]) -> list[Task]:
        """The tasks, each with the calibration that its verification holds. Raises ValueError for one that cannot be read."""
        return [replace(task, calibration=self._calibration(task)) for task in tasks]

    def strong(self, tasks: list[Task], *, max_weakness: float) -> list[Task]:
        """The tasks whose weakness is `max_weakness` at most. Raises ValueError if it was not measured, or if none is left."""
        weakness = {
            task.id: one.weakness if (one := standing(self.by_task, task)) else None for task in tasks
        }
        unmeasured = [task_id for task_id, share in weakness.items() if share is None]
        if unmeasured:
            raise ValueError(
                f"tasks.max_weakness: how strong the tests are was not measured for {len(unmeasured)} of the "
                f"{len(tasks)} tasks in {self.path}; the first is {unmeasured[0]}. Run `python -m workers.verify "
                f"{self.path} --strength`, or leave tasks.max_weakness out"
            )
        strong = [task for task in tasks if (weakness[task.id] or 0.0) <= max_weakness]
        if not strong:
            raise ValueError(
                f"tasks.max_weakness is {max_weakness:g}; every task in {self.path} is weaker: raise it, or leave it out"
            )
        return strong

    def facts(self, tasks: list[Task]) -> list[TaskFacts]:
        """How each task stands, for the directory of the run. Raises ValueError for a calibration that cannot be read."""
        return [self._facts(task) for task in tasks]

    def _facts(self, task: Task) -> TaskFacts:
        known = standing(self.by_task, task)
        if known is None:
            return TaskFacts(task_id=task.id, verified="changed" if task.id in self.by_task else "never")
        calibration = unpack(self._calibration(task))
        return TaskFacts(
            task_id=task.id,
            verified="ok" if known.ok else "wrong",
            num_tests=known.num_tests,
            num_controlled=known.num_controlled,
            num_flaky=len(calibration.flaky) if calibration else 0,
            num_partial_fixes=known.strength.num_partial_fixes if known.strength else 0,
            weakness=known.weakness,
        )

    def _doubt(self, task: Task) -> str:
        if task.id not in self.by_task:
            return "was never verified"
        known = standing(self.by_task, task)
        if known is None:
            return "has changed since it was verified"
        return "" if known.ok else f"was found wrong ({known.reason})"

    def _calibration(self, task: Task) -> bytes:
        known = standing(self.by_task, task)
        packed = known.calibration if known else b""
        try:
            unpack(packed)
        except MalformedMessage as error:
            raise ValueError(
                f"{self.field}: the calibration of {task.id} in {verified_path(Path(self.path))} cannot be read ({error}); "
                f"run `python -m workers.verify {self.path}` again"
            ) from error
        return packed


def has_controls(task: Task) -> bool:
    """Whether some test of a calibrated task has a contradiction under which it must fail."""
    calibration = unpack(task.calibration)
    return calibration is not None and bool(calibration.contradictions)
