"""Whether a run goes on, how it ended if it does not, and how to resume it: read from its directory."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from trainer.records.journal import EndReason, EndRow, StepRow
from trainer.records.run_directory import RECIPE, is_locked

State = Literal[EndReason, "running", "crashed"]


class RecordedState(msgspec.Struct, frozen=True, kw_only=True):
    state: State
    sentence: str  # for people


def read_state(run_dir: Path, steps: Iterable[StepRow], endings: Sequence[EndRow]) -> RecordedState:
    """The state of the run in `run_dir`, whose journal holds `steps` and `endings`.

    A trainer that was killed leaves no EndRow, and the operating system releases its lock.
    """
    last_step = max((row.step for row in steps), default=0)
    newest = endings[-1] if endings and endings[-1].step >= last_step else None
    if newest is not None and newest.is_complete:
        return RecordedState(state=_reason(newest), sentence=newest.detail or newest.reason)
    if is_locked(run_dir):
        return RecordedState(state="running", sentence="still running")
    if newest is not None:
        how = newest.detail or f"{newest.reason} at step {newest.step}"
        return RecordedState(state=_reason(newest), sentence=f"{how}; {_resume_hint(run_dir)}")
    how = f"crashed after step {last_step}: its trainer is gone and recorded no ending"
    return RecordedState(state="crashed", sentence=f"{how}; {_resume_hint(run_dir)}")


def _reason(row: EndRow) -> EndReason:
    return msgspec.convert(row.reason, EndReason)


def _resume_hint(run_dir: Path) -> str:
    recipe = run_dir / RECIPE
    named = str(recipe) if recipe.exists() else "RECIPE.toml"
    return f"resume with `python -m trainer.run {named} --run-dir {run_dir} --resume`"
