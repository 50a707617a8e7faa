"""Sentences about groups that keep failing and tasks put in quarantine, each said once."""

from collections.abc import Callable

from arq.connections import ArqRedis

from pipeline import deadletters
from trainer.rollouts.ledger import Ledger
from trainer.rollouts.quarantine import Quarantine


class Notices:
    """Of one run."""

    def __init__(
        self,
        redis: ArqRedis,
        run_id: str,
        ledger: Ledger,
        quarantine: Quarantine,
        *,
        last_failed: Callable[[], str],
        say: Callable[[str], None],
    ) -> None:
        """`last_failed` returns the id of the request that failed last."""
        self._redis = redis
        self._run_id = run_id
        self._ledger = ledger
        self._quarantine = quarantine
        self._last_failed = last_failed
        self._say = say
        self._failures_told = 0
        self._quarantine_told: set[str] = set()
        self._unsteady_told: set[str] = set()

    async def give(self) -> None:
        """Say what is new since the last call."""
        await self._tell_of_failures()
        self._tell_of_quarantine()
        self._tell_of_unsteady_patches()

    async def _tell_of_failures(self) -> None:
        brake = self._ledger.brake
        if brake.pause_s and brake.failed_groups != self._failures_told:
            letter = await deadletters.find(self._redis, self._run_id, self._last_failed())
            evidence = letter.failures[-1:] if letter else ()
            last = "".join(f", the last at {one.boundary}: {one.message}" for one in evidence)
            self._say(
                f"{brake.failed_groups} groups in a row failed{last}; "
                f"the next is enqueued in {brake.pause_s:.0f} s"
            )
        self._failures_told = brake.failed_groups

    def _tell_of_quarantine(self) -> None:
        for task_id in [one for one in self._quarantine if one not in self._quarantine_told]:
            self._quarantine_told.add(task_id)
            self._say(
                f"{task_id} is in quarantine and not played any more: {self._quarantine.reason(task_id)}"
            )

    def _tell_of_unsteady_patches(self) -> None:
        for task_id, found in self._quarantine.unsteady.items():
            if task_id not in self._unsteady_told:
                self._unsteady_told.add(task_id)
                self._say(f"{task_id} goes on being played, its tests were steady when verified: {found}")
