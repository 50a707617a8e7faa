"""How a run ended, written down for `trainer.report` (a row of the journal) and `pipeline status` (the run's last status)."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from arq.connections import ArqRedis
from msgspec.structs import replace

from pipeline import census, retry
from trainer.loop.state import RunState
from trainer.loop.step_times import StepTimes
from trainer.records.journal import COMPLETE, EndReason, EndRow


class EndRecorder:
    """Of one process of one run."""

    def __init__(
        self,
        redis: ArqRedis,
        state: RunState,
        num_steps: int,
        root: Path,
        times: StepTimes,
        *,
        status: Callable[[], census.RunStatus],
        record: Callable[[EndRow], None],
    ) -> None:
        """`root` is the run's directory."""
        self._redis = redis
        self._state = state
        self._root = root
        self._times = times
        self._num_steps = num_steps
        self._status = status
        self._record = record

    def write_row(self, reason: EndReason, error: BaseException | None = None) -> None:
        """Before the last checkpoint if the run is complete, so that it holds the row; else after it, so that a resume
        cuts the row off.
        """
        state, detail = self._state, self._how(reason, error)
        seconds = {**self._times.lap()}
        self._record(
            EndRow(step=state.step, version=state.version, reason=reason, detail=detail, seconds=seconds)
        )

    async def write_status(self, reason: EndReason, error: BaseException | None = None) -> None:
        """The last status of this process; no heartbeat may follow."""
        how = self._how(reason, error)
        if reason not in COMPLETE:
            how += f"; resume with `python -m trainer.run {self._root}/recipe.toml --run-dir {self._root} --resume`"
        ended = replace(self._status(), phase=reason, detail="", admission="", ended=how)
        with retry.tolerating_outage():
            await census.beat_run(self._redis, ended)

    def _how(self, reason: EndReason, error: BaseException | None) -> str:
        place = f"step {self._state.step} of {self._num_steps}"
        match reason:
            case "finished":
                return f"finished all {self._num_steps} steps"
            case "nothing to learn":
                return f"ended at {place}: there was nothing more to learn"
            case "failing":
                return f"gave up at {place} after too many groups in a row failed"
            case "stopped":
                if self._state.superseded_by:
                    return f"stopped at {place}: {self._state.superseded_by} took the engines over"
                if self._state.stopped_by_alarm:
                    return f"stopped at {place} by an alarm, {self._state.stopped_by_alarm}"
                return f"stopped by a signal at {place}"
            case "error":
                return f"ended by an error at {place}: {_innermost(error)}"


def _innermost(error: BaseException | None) -> str:
    """The first error of a group, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, asyncio.CancelledError):
        return "interrupted at once"
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
