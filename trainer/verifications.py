"""A run's use of the results of `python -m workers.verify` about a task file: which tasks can be trusted, how strong their tests are, and
what is added to the tasks: the calibration that the grader needs, and the paths in the image that hold the answer.

A verification counts only for the task in the form that was verified: a task that has changed since is unverified.
"""

from dataclasses import dataclass
from pathlib import Path

from pipeline.message import MalformedMessage
from pipeline.task import BEST_CONTROLS, BestControl, Task, unpack
from pipeline.taskfile import (
    TaskFacts,
    Verification,
    as_verified,
    fingerprint,
    read_verified,
    standing,
    verified_path,
)


@dataclass(frozen=True, slots=True)
class Verifications:
    """The verifications of the tasks in the file `path`, which the recipe's key `field` names."""

    field: str
    path: str  # "": the recipe names no file
    by_task: dict[str, Verification]

    @classmethod
    def beside(cls, field: str, path: str) -> "Verifications":
        """The verifications in the file beside `path`; none if there is no such file. Raises ValueError if it is damaged."""
        verified = verified_path(Path(path)) if path else None
        return cls(field, path, read_verified(verified) if verified and verified.exists() else {})

    def doubts(self, tasks: list[Task]) -> dict[str, str]:
        """Ids of the tasks whose grader may judge wrongly, with the reason."""
        return {task.id: doubt for task in tasks if (doubt := self._doubt(task))}

    def as_verified(self, tasks: list[Task]) -> list[Task]:
        """The tasks, each with the results of its verification. Raises ValueError for a calibration that cannot be read."""
        for task in tasks:
            self._calibration(task)
        return [as_verified(task, standing(self.by_task, task)) for task in tasks]

    def strong(self, tasks: list[Task], *, max_weakness: float | None) -> list[Task]:
        """The tasks whose weakness is at most `max_weakness`, judged by the lower end of its interval; all tasks if `max_weakness` is None.

        A task for which no partial fix could be made is included. Raises ValueError if the weakness of a task was not measured, or if no
        task is left.
        """
        if max_weakness is None:
            return tasks
        known = {task.id: standing(self.by_task, task) for task in tasks}
        unmeasured = [task_id for task_id, one in known.items() if one is None or one.strength is None]
        if unmeasured:
            raise ValueError(
                f"tasks.max_weakness: how strong the tests are was not measured for {len(unmeasured)} of the "
                f"{len(tasks)} tasks in {self.path}; the first is {unmeasured[0]}. Run `python -m workers.verify "
                f"{self.path} --strength`, or leave tasks.max_weakness out"
            )
        strong = [
            task
            for task in tasks
            if (one := known[task.id]) and one.strength and one.strength.interval[0] <= max_weakness
        ]
        if not strong:
            raise ValueError(
                f"tasks.max_weakness is {max_weakness:g}; every task in {self.path} is weaker: raise it, or leave it out"
            )
        return strong

    def controlled(self, tasks: list[Task], *, min_control: BestControl) -> list[Task]:
        """The tasks for whose passes a control can have the result `min_control` or a stronger one. Raises ValueError if none is left."""
        known = {task.id: standing(self.by_task, task) for task in tasks}
        says = {task_id: one.control if one else "none" for task_id, one in known.items()}
        wanted = BEST_CONTROLS.index(min_control)
        controlled = [task for task in tasks if BEST_CONTROLS.index(says[task.id]) >= wanted]
        if not controlled:
            raise ValueError(
                f'tasks.min_control is "{min_control}"; the controls of every task in {self.path} say less: lower it, or run '
                f"`python -m workers.verify {self.path}`"
            )
        return controlled

    def facts(self, tasks: list[Task]) -> list[TaskFacts]:
        """The verification of each task, for the directory of the run. Raises ValueError for a calibration that cannot be read."""
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
            control=known.control,
            num_flaky=len(calibration.flaky) if calibration else 0,
            num_partial_fixes=known.strength.num_partial_fixes if known.strength else 0,
            weakness=known.weakness,
            weakness_interval=known.weakness_interval,
        )

    def _doubt(self, task: Task) -> str:
        if task.id not in self.by_task:
            return "was never verified"
        known = standing(self.by_task, task)
        if known is None:
            is_same = self.by_task[task.id].fingerprint == fingerprint(task)
            return "was not verified in every state" if is_same else "has changed since it was verified"
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
