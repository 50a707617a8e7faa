"""Training tasks whose grader cannot be trusted, taken out of the task order for the rest of the run.

Two things put a task there: the same patch, byte for byte, was judged differently; or MAX_GRADER_FAILURES requests in
a row came back without a verdict because the grader broke, while it went on judging other tasks. The evidence is in
the journal's episode rows, so a resumed run knows what the journal of its checkpoint says.

The first does not count for a calibrated task: its tests were steady with the known fix in some ten runs, so a patch that is
judged differently is itself unsteady. A policy could otherwise get rid of a task by patches that act at random.
"""

from collections.abc import Container, Iterator

from pipeline.deadletters import DeadLetter
from pipeline.trajectory import TrajectoryHead
from trainer.records.journal import EpisodeRow, Journal, QuarantineRow, read

MAX_GRADER_FAILURES = 3
GRADER_FAILED = "failed:grader"


class Quarantine:
    """The tasks of one run that are not played any more, and what is known of the others."""

    def __init__(self, journal: Journal, calibrated: Container[str] = ()) -> None:
        """Starts from what `journal` says, which must have been cut back to its checkpoint. `calibrated` are ids of tasks."""
        self._journal = journal
        self._calibrated = calibrated
        # Calibrated tasks with a patch that was judged differently, and how.
        self.unsteady: dict[str, str] = {}
        self._verdicts: dict[str, dict[str, tuple[float, str]]] = {}  # by task and patch: reward, request id
        self._failures: dict[str, dict[str, int]] = {}  # by task and request id: verdicts seen until then
        self._num_verdicts = 0
        self._reasons = {row.task_id: row.reason for row in read(journal.directory, QuarantineRow)}
        for row in read(journal.directory, EpisodeRow):
            if row.purpose == "train":
                self._notice(row)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._reasons

    def __len__(self) -> int:
        return len(self._reasons)

    def __iter__(self) -> Iterator[str]:
        return iter(self._reasons)

    def reason(self, task_id: str) -> str:
        return self._reasons[task_id]

    def notice(self, head: TrajectoryHead) -> str:
        """Why the task of this trajectory belongs here from now on; "" if it does not, or is here already."""
        fault = self._notice(head)
        return "" if head.task_id in self else fault

    def observe(self, head: TrajectoryHead, letter: DeadLetter | None) -> None:
        """Take note of a trajectory, and put its task here if that shows that its grader cannot be trusted. `letter` is the dead
        letter of a failed one.
        """
        reason = self.notice(head)
        if not reason:
            return
        if head.outcome == GRADER_FAILED and letter is not None and letter.failures:
            reason += f", the last time with: {letter.failures[-1].message}"
        self.put(head.task_id, reason, request_id=head.request_id)

    def put(self, task_id: str, reason: str, *, request_id: str) -> None:
        """Put the task into quarantine; `request_id` is of the trajectory that decided it."""
        self._reasons[task_id] = reason
        self._journal.append(QuarantineRow(task_id=task_id, reason=reason, request_id=request_id))

    def _notice(self, answer: TrajectoryHead | EpisodeRow) -> str:
        if answer.reward is not None:
            return self._contradiction(answer, answer.reward)
        if answer.outcome == GRADER_FAILED:
            return self._failure(answer)
        return ""

    def _contradiction(self, answer: TrajectoryHead | EpisodeRow, reward: float) -> str:
        self._num_verdicts += 1
        self._failures.pop(answer.task_id, None)
        if not answer.patch:
            return ""
        verdicts = self._verdicts.setdefault(answer.task_id, {})
        before, request_id = verdicts.setdefault(answer.patch, (reward, answer.request_id))
        if before == reward:
            return ""
        found = f"the same patch was worth {before:g} in {request_id} and {reward:g} in {answer.request_id}"
        if answer.task_id not in self._calibrated:
            return f"flaky: {found}"
        self.unsteady.setdefault(answer.task_id, found)
        return ""

    def _failure(self, answer: TrajectoryHead | EpisodeRow) -> str:
        failures = self._failures.setdefault(answer.task_id, {})
        failures.setdefault(answer.request_id, self._num_verdicts)
        judges_others = self._num_verdicts > next(iter(failures.values()))
        if len(failures) < MAX_GRADER_FAILURES or not judges_others:
            return ""
        return f"the grader broke on it {len(failures)} times in a row, though not on others"
