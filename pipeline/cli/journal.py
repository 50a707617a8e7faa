"""What became of a trajectory and of its judgement, from the trainer's journal, which is read as JSON lines.

The trainer need not be alive.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from redis.asyncio import Redis

from pipeline import census
from pipeline.cli.ink import age, count
from pipeline.cli.moments import Moment
from pipeline.kinds import JUDGE
from pipeline.message import UnixSeconds

EPISODES, STEPS, JUDGEMENTS = "episodes.jsonl", "steps.jsonl", "judgements.jsonl"

FATES = {
    "trained": "trained",
    "zero_variance": "not trained: all members of its group had the same reward, so there was nothing to learn",
    "too_few_valid": "not trained: too many members of its group failed",
    "late": "not trained: it arrived after its group had closed, or its weights were too old",
    "refused": "not trained: rejected, invalid samples",
    "altered": "not trained: rejected, it is not what the engine sampled",
    "failed": "not trained: it has no reward, because the infrastructure failed",
    "not_finite": "not trained: the loss or gradient of its batch was not finite, so the batch was skipped",
    "quarantined": "not trained: its task is in quarantine",
    "evaluated": "not for training: it counted in a held-out evaluation",
    "withdrawn": "not trained: it was withdrawn",
}

JUDGEMENT_FATES = {
    "joined": "joined its rollout before a step took the group",
    "late": "not used: a step took its group without it",
    "failed": "not used: the judge failed for good, so its rollout has no scores",
    "unneeded": "not used: its group was not trained, or the run ended first",
}


class _StepRequests(msgspec.Struct):
    """What is read of a step's row."""

    step: int
    version: int
    request_ids: frozenset[str]
    at: UnixSeconds = 0.0


class _EpisodeFate(msgspec.Struct):
    """What is read of an episode's row."""

    request_id: str
    fate: str
    evaluation: str = ""
    at: UnixSeconds = 0.0


class _TurnScore(msgspec.Struct, array_like=True):
    """What is read of a turn, which the journal has as an array."""

    turn: int
    score: float | None = None


class JudgementFate(msgspec.Struct):
    """What is read of a judge request's row."""

    rollout_id: str
    fate: str
    task_id: str = ""
    group_id: str = ""
    turns: tuple[_TurnScore, ...] = ()
    error: str = ""
    waited_s: float = 0.0
    at: UnixSeconds = 0.0

    @property
    def scored(self) -> str:
        """How many turns have a score, in words; "" if no judgement arrived."""
        scores = [turn.score for turn in self.turns if turn.score is not None]
        mean = f", mean {sum(scores) / len(scores):+.2f}" if scores else ""
        return f"{len(scores)} of {count(len(self.turns), 'turn')} scored{mean}" if self.turns else ""


Row = TypeVar("Row", _StepRequests, _EpisodeFate, JudgementFate)


async def known(redis: Redis, run_id: str) -> Path | None:
    """The journal that the trainer's last status names, if it is on this machine."""
    status, _ = await census.last_status(redis, run_id) if run_id else (None, 0.0)
    directory = Path(status.journal) if status and status.journal else None
    return directory if directory and directory.is_dir() else None


def directory_in(run_dir: Path) -> Path:
    """Raises LookupError for a directory that holds none."""
    for directory in (run_dir / "journal", run_dir):
        if (directory / EPISODES).is_file():
            return directory
    raise LookupError(f"{run_dir} holds no journal: give a run's directory, as in runs/demo")


def of_rollout(journal: Path, request_id: str) -> Iterator[Moment]:
    """The step that trained the request, and its episode's row."""
    for step in _rows(journal / STEPS, request_id, _StepRequests):
        if request_id in step.request_ids:
            detail = f"step {step.step}, from weights v{step.version}"
            yield Moment(at=step.at, what="trained", detail=detail)
    for episode in _rows(journal / EPISODES, request_id, _EpisodeFate):
        fate = episode.fate
        if episode.request_id == request_id and fate != "trained":
            yield Moment(at=episode.at, what=fate, detail=episode.evaluation or FATES.get(fate, fate))


def step_of(journal: Path, request_id: str) -> int | None:
    """The step that trained the request; None if none did."""
    steps = _rows(journal / STEPS, request_id, _StepRequests)
    return next((row.step for row in steps if request_id in row.request_ids), None)


def of_judging(journal: Path, rollout_id: str) -> Iterator[Moment]:
    """The row of the request that judges the rollout."""
    for row in judgements(journal, rollout_id):
        if row.rollout_id == rollout_id:
            detail = ", ".join(
                part for part in (row.scored or row.error, f"waited {age(row.waited_s)}") if part
            )
            yield Moment(at=row.at, what=row.fate, detail=detail, kind=JUDGE.name)


def judgements(journal: Path, rollout_id: str = "") -> Iterator[JudgementFate]:
    """The rows of judge requests, oldest first; with `rollout_id` only rows that mention it."""
    return _rows(journal / JUDGEMENTS, rollout_id, JudgementFate)


def _rows(path: Path, request_id: str, kind: type[Row]) -> Iterator[Row]:
    """The rows of one file of a journal that mention the id. An incomplete last line is skipped."""
    if not path.is_file():
        return
    wanted, decoder = request_id.encode(), msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for line in file:
            if wanted in line and line.endswith(b"\n"):
                with contextlib.suppress(msgspec.DecodeError):
                    yield decoder.decode(line)
