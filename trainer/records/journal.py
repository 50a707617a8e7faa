"""The run's diary, as JSON lines in its directory: what became of every episode, what every step did.

One file per kind of row, only ever appended to. A row is on disk once `checkpoint` has returned its offset; a
resumed run goes back to the offsets its checkpoint names, and what came after them is moved aside, never
deleted. Whoever reads may do so while the run goes on. Step rows are mirrored to TensorBoard, which only
shows what is here.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Self, TypeVar

import msgspec

from pipeline.request import Purpose, RolloutRequest
from pipeline.trajectory import TrajectoryHead

Fate = Literal[
    "trained",  # by the step whose row names its request id
    "zero_variance",  # its whole group was worth the same: nothing to learn
    "too_few_valid",  # too many of its group failed to tell good from bad
    "quarantined",  # its task's grader cannot be trusted
    "late",  # its group had closed without it, or its weights were too old
    "refused",  # its tokens do not add up; the trajectory is kept in Redis
    "failed",  # never had a reward: something of ours broke
    "evaluated",
    "not_finite",  # the loss or gradient of its batch was not finite, so the batch was skipped
    "withdrawn",  # asked for no longer, because its group closed without it or the run ended
]


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Base of everything in the journal.

    New fields go at the end, with a default, so that old runs stay readable.
    """


class EpisodeRow(Row, frozen=True, kw_only=True):
    """One request and what became of it; written when its fate is settled.

    Ids are unique, unless a person requeued a dead one.
    """

    request_id: str
    group_id: str
    task_id: str
    purpose: Purpose
    member: int
    group_size: int
    fate: Fate
    cursor: int = -1  # place of the group in the run's task order; -1 for evaluations
    evaluation: str = ""  # name of the evaluation it belongs to
    attempt: int = 0
    worker: str = ""
    outcome: str = ""  # as in the head; empty if withdrawn
    reward: float | None = None
    num_turns: int = 0
    sampled_tokens: int = 0
    version_at_enqueue: int = 0
    version_first: int | None = None
    version_last: int | None = None
    enqueued_at: float = 0.0  # Unix seconds, as the rest
    claimed_at: float = 0.0
    finished_at: float = 0.0
    at: float = 0.0  # when the row was made
    patch: str = ""  # fingerprint of the patch that was graded, as in the head


class StepRow(Row, frozen=True, kw_only=True):
    """One optimizer step. Shares are of trained tokens, log-probs natural, lags in weight versions."""

    step: int
    version: int  # of the weights the step started from
    loss: float
    grad_norm: float
    lr: float
    reward_mean: float  # over everything graded since the step before, groups without signal included
    num_trajectories: int
    request_ids: tuple[str, ...]
    num_trained_tokens: int
    num_unique_sampled_tokens: int  # that the policy drew in those trajectories, each counted once
    groups_dropped_zero_variance: int = 0  # since the step before
    groups_dropped_invalid: int = 0
    lag_max: int = 0
    lag_mean: float = 0.0
    # Between engine and learner under the same weights; None where it was not measured.
    logprob_gap_max: float | None = None
    logprob_gap_mean: float | None = None
    entropy: float = 0.0
    ratio_mean: float = 1.0
    ratio_max: float = 1.0
    ess_share: float = 1.0
    masked_share: float = 0.0
    vetoed_share: float = 0.0
    wait_s: float = 0.0  # for trajectories
    train_s: float = 0.0
    at: float = 0.0
    num_gap_tokens: int = 0  # on which the log-prob gap was measured
    members_refilled: int = 0  # since the step before: failed for reasons of ours, and asked for again
    members_withdrawn: int = 0  # since the step before: not in when their group had to close
    num_groups: int | None = None  # that the step trained; None in journals older than this field

    @property
    def is_gap_measured(self) -> bool:
        """Older journals say 0.0 where it was not, and the oldest do not count the tokens."""
        return self.logprob_gap_max is not None and bool(self.num_gap_tokens or self.logprob_gap_max)


class EvaluationRow(Row, frozen=True, kw_only=True):
    """The held-out tasks, played by one version."""

    name: str  # "heldout_before", "heldout_after", "heldout_step_40"
    version: int
    greedy: bool
    success: float  # mean reward of the episodes that have one
    standard_error: float
    num_episodes: int
    num_failed: int  # without a reward; not in `success`
    step: int = 0
    at: float = 0.0


class PublicationRow(Row, frozen=True, kw_only=True):
    """One version of the weights handed to the engines."""

    version: int
    step: int
    num_bytes: int
    engines: tuple[str, ...]  # confirmed
    quarantined: tuple[str, ...]
    export_s: float
    update_s: float  # from the first pause to the last confirmation
    at: float = 0.0


class QuarantineRow(Row, frozen=True, kw_only=True):
    """A training task that is not played any more."""

    task_id: str
    reason: str
    request_id: str  # of the answer that decided it
    at: float = 0.0


class SkippedRow(Row, frozen=True, kw_only=True):
    """A place in the task order that was passed over, for its task is in quarantine."""

    cursor: int
    task_id: str
    at: float = 0.0


EndReason = Literal[
    "finished",  # every step was taken
    "nothing to learn",  # no group had a signal for too long, or every task is in quarantine
    "failing",  # too many groups in a row failed; a resume goes on
    "stopped",  # by a signal; a resume goes on
    "error",  # an exception ended the trainer; a resume goes on from the newest checkpoint
]

COMPLETE: tuple[EndReason, ...] = ("finished", "nothing to learn")
"""Endings at which every request of the run has an episode row."""


class SkippedBatchRow(Row, frozen=True, kw_only=True):
    """A batch whose loss or gradient was not finite: weights and optimizer stayed as they were, its trajectories are settled."""

    step: int  # that it would have been
    version: int  # of the weights that the step started from
    what: Literal["loss", "gradient"]  # that was not finite
    request_ids: tuple[str, ...]
    at: float = 0.0


class EndRow(Row, frozen=True, kw_only=True):
    """How a trainer process ended. A trainer that was killed leaves none.

    The row of a run that can go on is written after the last checkpoint, so a resume cuts it off again.
    """

    step: int
    version: int
    reason: str  # an EndReason
    at: float = 0.0
    detail: str = ""  # one sentence for people, e.g. "stopped by a signal at step 7"

    @property
    def is_complete(self) -> bool:
        """Whether every request of the run has an episode row; otherwise what is missing is still open."""
        return self.reason in COMPLETE


R = TypeVar("R", bound=Row)

FILES: dict[type[Row], str] = {
    EpisodeRow: "episodes.jsonl",
    StepRow: "steps.jsonl",
    EvaluationRow: "evaluations.jsonl",
    PublicationRow: "publications.jsonl",
    QuarantineRow: "quarantines.jsonl",
    SkippedRow: "skipped.jsonl",
    SkippedBatchRow: "skipped_batches.jsonl",
    EndRow: "endings.jsonl",
}


class MalformedJournal(ValueError):
    """A line that is not the row it should be; the text says which file, line and field."""


class Journal:
    """The run's files, open for appending.

    One writer at a time; every row goes to the operating system at once.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._files = {kind: _open(directory / name) for kind, name in FILES.items()}

    def append(self, row: R) -> R:
        """Write one row and return it as written: a missing `at` becomes now."""
        if not getattr(row, "at", 1.0):
            row = msgspec.structs.replace(row, at=time.time())
        self._files[type(row)].write(msgspec.json.encode(row) + b"\n")
        return row

    def checkpoint(self) -> dict[str, int]:
        """Force all rows to disk; returns each file's length in bytes, to be kept in the checkpoint."""
        for file in self._files.values():
            os.fsync(file.fileno())
        return {FILES[kind]: file.tell() for kind, file in self._files.items()}

    def truncate_to(self, offsets: dict[str, int]) -> int:
        """Go back to a checkpoint: what came after it moves to `<file>.discarded`.

        Returns how many bytes moved.

        Raises ValueError if a file is shorter than its checkpoint says: the journal is not the one the
        checkpoint belongs to.
        """
        moved = 0
        for kind, file in self._files.items():
            path = self.directory / FILES[kind]
            kept, length = offsets.get(path.name, 0), path.stat().st_size
            if length < kept:
                raise ValueError(
                    f"{path} has {length} bytes, its checkpoint speaks of {kept}: restore the run's directory"
                )
            with path.open("rb") as source, path.with_name(f"{path.name}.discarded").open("ab") as aside:
                source.seek(kept)
                moved += aside.write(source.read())
                os.fsync(aside.fileno())
            file.truncate(kept)
            file.seek(kept)
        return moved

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def journal_of(run_dir: Path) -> Path:
    """Where a run keeps its journal; a journal's own directory will do as well."""
    inside = run_dir / "journal"
    return inside if inside.is_dir() else run_dir


def read(directory: Path, kind: type[R]) -> Iterator[R]:
    """The rows of one kind, in order; none if the file is not there. A last line cut short is not a row yet.

    Raises MalformedJournal.
    """
    path = directory / FILES[kind]
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise MalformedJournal(f"{path}, line {number}: {error}") from error


def episode_row(head: TrajectoryHead, fate: Fate, *, cursor: int = -1, evaluation: str = "") -> EpisodeRow:
    """The row of a trajectory that arrived."""
    return EpisodeRow(
        request_id=head.request_id,
        group_id=head.group_id,
        task_id=head.task_id,
        purpose=head.purpose,
        member=head.member,
        group_size=head.group_size,
        fate=fate,
        cursor=cursor,
        evaluation=evaluation,
        attempt=head.attempt,
        worker=head.worker,
        outcome=head.outcome,
        reward=head.reward,
        num_turns=head.num_turns,
        sampled_tokens=head.sampled_tokens,
        version_at_enqueue=head.version_at_enqueue,
        version_first=head.version_first,
        version_last=head.version_last,
        enqueued_at=head.enqueued_at,
        claimed_at=head.claimed_at,
        finished_at=head.finished_at,
        patch=head.patch,
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """What is kept of a request until it is answered: enough for its row, without the task and the prompts."""

    request_id: str
    group_id: str
    task_id: str
    purpose: Purpose
    member: int
    group_size: int
    cursor: int
    version: int
    enqueued_at: float  # Unix seconds

    @classmethod
    def of(cls, request: RolloutRequest) -> Self:
        return cls(
            request_id=request.id,
            group_id=request.group_id,
            task_id=request.task.id,
            purpose=request.purpose,
            member=request.member,
            group_size=request.group_size,
            cursor=request.cursor if request.purpose == "train" else -1,
            version=request.version_at_enqueue,
            enqueued_at=request.enqueued_at,
        )


def failed_head(run_id: str, asked: Asked) -> TrajectoryHead:
    """What is published of a request that nobody could play, for it cannot be read."""
    now = time.time()
    return TrajectoryHead(
        request_id=asked.request_id,
        run_id=run_id,
        purpose=asked.purpose,
        group_id=asked.group_id,
        member=asked.member,
        group_size=asked.group_size,
        task_id=asked.task_id,
        outcome="failed:request",
        reward=None,
        num_turns=0,
        sampled_tokens=0,
        body_bytes=0,
        version_at_enqueue=asked.version,
        version_first=None,
        version_last=None,
        attempt=0,
        worker="",
        enqueued_at=asked.enqueued_at,
        claimed_at=now,
        finished_at=now,
    )


def withdrawn_row(asked: Asked, *, evaluation: str = "") -> EpisodeRow:
    """The row of a request that nobody waits for any more."""
    return EpisodeRow(
        request_id=asked.request_id,
        group_id=asked.group_id,
        task_id=asked.task_id,
        purpose=asked.purpose,
        member=asked.member,
        group_size=asked.group_size,
        fate="withdrawn",
        cursor=asked.cursor,
        evaluation=evaluation,
        version_at_enqueue=asked.version,
        enqueued_at=asked.enqueued_at,
    )


def _open(path: Path) -> BinaryIO:
    """For appending, after the last whole line: what a crash cut short was never in a checkpoint."""
    path.touch()
    file = path.open("r+b", buffering=0)
    whole = file.read().rfind(b"\n") + 1
    file.truncate(whole)
    file.seek(whole)
    return file
