"""The run's journal, JSON lines in its directory: what became of every episode, what every step did, how the run ended.

There is one file per kind of row, and rows are only appended. A row is on disk once `checkpoint` has returned its offset. A
resumed run cuts the files at the offsets in its checkpoint; the rows after them are moved aside, never deleted. The files may
be read while the run goes on.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Self, TypeVar

import msgspec

from pipeline.request import Purpose
from pipeline.trajectory import EpisodeSeconds
from trainer.learner.config import LagMetrics
from trainer.records.alarm_row import AlarmRow
from trainer.records.audit_row import AuditRow
from trainer.records.judgement_row import JudgementRow
from trainer.records.row import Row
from trainer.records.stamps import EpisodeStamps
from trainer.records.step_judging import StepJudging
from trainer.records.time_rows import EnginePause, FleetRow, StartRow

Fate = Literal[
    "trained",  # by the step whose row names its request id
    "zero_variance",  # all rewards of its group were equal, so there was nothing to learn
    "too_few_valid",  # too few members of its group had a reward
    "quarantined",  # its task's grader cannot be trusted
    "late",  # its group had closed without it, or its weights were too old
    "overlong",  # a limit ended it for which the recipe filters trajectories; its reward counts in the baseline
    "refused",  # its samples were invalid; the trajectory is kept in Redis
    "altered",  # it is not what the engine sampled, by its digests; the trajectory is kept in Redis
    "failed",  # it has no reward because of an infrastructure failure
    "evaluated",
    "not_finite",  # the loss or gradient of its batch was not finite, so the batch was skipped
    "withdrawn",  # its request was withdrawn, because its group closed without it or the run ended
]


class EpisodeRow(Row, frozen=True, kw_only=True):
    """One request and what became of it; written when its trajectory is settled.

    Ids are unique, unless somebody requeued a dead letter.
    """

    request_id: str
    group_id: str
    task_id: str
    purpose: Purpose
    member: int
    group_size: int
    fate: Fate
    cursor: int = -1  # position of the group in the run's task order; -1 for evaluations
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
    control: str = ""  # what the control run said of a pass, as in the head
    num_cuts: int = 0  # turns before which something was taken out of the context
    repeated_tokens: int = 0  # that engines computed again because of that
    num_tokens: int = 0  # told and sampled, each counted once; 0 in journals older than this field
    stamps: EpisodeStamps = EpisodeStamps()
    seconds: EpisodeSeconds | None = None  # on its worker; None in journals older than this field


class StepRow(Row, frozen=True, kw_only=True):
    """One optimizer step. Shares are of trained tokens, log-probs natural, lags in weight versions."""

    step: int
    version: int  # of the weights the step started from
    loss: float
    grad_norm: float
    lr: float
    reward_mean: float  # over all episodes graded since the step before, groups without signal included
    num_trajectories: int
    request_ids: tuple[str, ...]
    num_trained_tokens: int
    num_unique_sampled_tokens: int  # that the policy sampled in those trajectories, each counted once
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
    members_refilled: int = 0  # since the step before: enqueued again after an infrastructure failure
    members_withdrawn: int = 0  # since the step before: had not arrived when their group had to close
    num_groups: int | None = None  # that the step trained; None in journals older than this field
    num_samples: int = 0  # that the trajectories are trained as; 0 in journals older than this field
    num_sample_tokens: int = 0  # in all samples, which repeat what they share
    num_unique_tokens: int = 0  # told and sampled in the trajectories, each counted once
    # Trajectories whose rewards count in the baselines of their groups, though the step did not train them.
    baseline_ids: tuple[str, ...] = ()
    # Trained, each with a digest that matches; 0 in journals older than this field.
    num_proved_replies: int = 0
    # Where the time since the row before went. `wall_s` is the sum of `wait_s` and of the fields from `forward_s` to `other_s`;
    # 0 in journals older than these fields.
    wall_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    audit_s: float = 0.0  # the log-prob gap
    export_s: float = 0.0  # making the weights ready for the engines
    engines_s: float = 0.0  # announcing the weights; engines load them beside the next steps
    checkpoint_s: float = 0.0  # that training waited for a checkpoint
    evaluation_s: float = 0.0  # that training waited for an evaluation, because the next one had to begin
    other_s: float = 0.0
    tokens_per_s: float = 0.0  # tokens of all samples over `train_s`
    # Floating-point operations that the model needed, over what all devices can do in `train_s`; None where their peak is not known.
    utilisation: float | None = None
    # What the objective did to the tokens of each lag, in order; empty in journals older than this field.
    by_lag: tuple[LagMetrics, ...] = ()
    # How many versions admission could run ahead when the step was taken; None in journals older than this field.
    ahead_versions: int | None = None
    judging: StepJudging | None = None  # what a judge's scores did to the step; None: nobody judges
    # When its batch was begun and when the weights had changed (Unix seconds); 0.0 in journals older than these fields.
    began_at: float = 0.0
    trained_at: float = 0.0

    @property
    def is_gap_measured(self) -> bool:
        """Older journals say 0.0 where it was not, and the oldest do not count the tokens."""
        return self.logprob_gap_max is not None and bool(self.num_gap_tokens or self.logprob_gap_max)


class EvaluationRow(Row, frozen=True, kw_only=True):
    """One held-out evaluation of one weight version, sampled or greedy."""

    name: str  # "heldout_before", "heldout_after", "heldout_step_40"
    version: int
    greedy: bool
    success: float  # mean reward of the episodes that have one
    standard_error: float
    num_episodes: int
    num_failed: int  # without a reward; not in `success`
    step: int = 0
    at: float = 0.0
    tasks: str = ""  # name of the held-out set, from tasks.heldout_sets; "": tasks.heldout
    mean_turns: float = 0.0  # of the episodes with a reward
    mean_sampled_tokens: float = 0.0
    # How the episodes ended, see `pipeline.trajectory.outcome_tag`.
    outcomes: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    # pass@k by k, up to the episodes of a task, over the tasks that have as many with a reward.
    pass_at: dict[str, float] = msgspec.field(default_factory=dict[str, float])


class PublicationRow(Row, frozen=True, kw_only=True):
    """One weight version, ready for the engines and announced to them."""

    version: int
    step: int
    num_bytes: int
    at: float = 0.0
    began_at: float = 0.0  # when making them ready began; 0.0 in journals older than this field


class DeliveryRow(Row, frozen=True, kw_only=True):
    """From here on all engines that get requests serve this version. A version that a newer one overtook has none."""

    version: int
    step: int
    engines: tuple[str, ...]  # that confirmed it and get requests
    quarantined: tuple[str, ...]  # out of routing, until they confirm
    update_s: float  # since the version was announced
    at: float = 0.0
    pauses: tuple[EnginePause, ...] = ()  # of engines, since the row before


class StalenessRow(Row, frozen=True, kw_only=True):
    """From here on admission may run so far ahead, by the decision of `trainer.rollouts.staleness`."""

    step: int  # after which it was decided
    before: int  # versions that admission could run ahead until then
    ahead_versions: int
    reason: str
    at: float = 0.0


class QuarantineRow(Row, frozen=True, kw_only=True):
    """A training task that no request is made of any more."""

    task_id: str
    reason: str
    request_id: str  # of the trajectory that decided it
    at: float = 0.0


class SkippedRow(Row, frozen=True, kw_only=True):
    """A position in the task order that was passed over, because its task is in quarantine."""

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
    # Since the last step's row, by part; empty in journals older than this field.
    seconds: dict[str, float] = msgspec.field(default_factory=dict[str, float])

    @property
    def is_complete(self) -> bool:
        """Whether every request of the run has an episode row; otherwise what is missing is still open."""
        return self.reason in COMPLETE


R = TypeVar("R", bound=Row)

FILES: dict[type[Row], str] = {
    EpisodeRow: "episodes.jsonl",
    JudgementRow: "judgements.jsonl",
    StepRow: "steps.jsonl",
    AuditRow: "audits.jsonl",
    EvaluationRow: "evaluations.jsonl",
    PublicationRow: "publications.jsonl",
    DeliveryRow: "deliveries.jsonl",
    StalenessRow: "staleness.jsonl",
    QuarantineRow: "quarantines.jsonl",
    AlarmRow: "alarms.jsonl",
    SkippedRow: "skipped.jsonl",
    SkippedBatchRow: "skipped_batches.jsonl",
    EndRow: "endings.jsonl",
    StartRow: "starts.jsonl",
    FleetRow: "fleet.jsonl",
}


class MalformedJournal(ValueError):
    """A line that is not the row it should be; the text says which file, line and field."""


class Journal:
    """The run's files, open for appending by one process. Every row is handed to the operating system at once."""

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
        """Go back to a checkpoint: move the rows after its offsets to `<file>.discarded`. Returns how many bytes moved.

        Raises ValueError if a file is shorter than its offset: then the checkpoint belongs to another journal.
        """
        moved = 0
        for kind, file in self._files.items():
            path = self.directory / FILES[kind]
            kept, length = offsets.get(path.name, 0), path.stat().st_size
            if length < kept:
                raise ValueError(
                    f"{path} has {length} bytes, fewer than the {kept} in its checkpoint: restore the run's directory"
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
    """The journal's directory in a run's; `run_dir` may also be the journal's directory itself."""
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


def _open(path: Path) -> BinaryIO:
    """Open for appending after the last whole line: a line that a crash cut short was in no checkpoint."""
    path.touch()
    file = path.open("r+b", buffering=0)
    whole = file.read().rfind(b"\n") + 1
    file.truncate(whole)
    file.seek(whole)
    return file
