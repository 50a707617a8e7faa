"""The numbers of a row under their names in every sink: `train/loss`, `heldout/sampled/success`, `judge/score_mean`; and the sinks that
need only these: `Board` for TensorBoard, `MetricsFile` as JSON lines for scripts, and `Meters`, the metrics of the process.

`heldout/` is followed by the name of the held-out set, if it has one, and by how its episodes were sampled. A line of the file is
{"step": 3, "at": ..., "train/loss": ...}.

In metrics the names have dots: `train/loss` is `swerve.train.loss`. A name that ends in `_s` becomes one with the unit second:
`train/wait_s` is `swerve.train.wait`, in Prometheus `swerve_train_wait_seconds`. For held-out evaluations, labels name the set and the way
in which episodes were sampled. Metrics are the newest numbers of each kind, and counts and durations since the process began. After a
resume, counts begin at 0 again, as in any restarted process; counts that may stay at 0 are shown from the beginning, so that an increase is
visible.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import get_args

import msgspec
from opentelemetry.metrics import Histogram, Meter
from opentelemetry.metrics import _Gauge as Gauge
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from pipeline.journal.rows import (
    PARTS,
    AuditRow,
    DeliveryRow,
    EpisodeRow,
    EvaluationRow,
    HeldoutLossRow,
    ImitationStepRow,
    JudgementFate,
    JudgementRow,
    PublicationRow,
    QuarantineRow,
    Row,
    SkippedBatchRow,
    StepRow,
)
from pipeline.telemetry import OUTCOME, SECONDS

# The axes and the name of a point, and the size of its run.
_NOT_SHOWN = {"step", "num_steps", "at", "greedy", "began_at", "trained_at"}
_GAP = {"logprob_gap_max", "logprob_gap_mean"}


@dataclass(frozen=True, slots=True)
class Point:
    """Finite numbers by name, all of one optimizer step."""

    step: int
    at: float  # Unix seconds
    values: Mapping[str, float]


def points(row: Row) -> Iterator[Point]:
    """Every number of a step, an audit, an evaluation or a held-out loss; nothing for other rows."""
    match row:
        case StepRow():
            hidden = set[str]() if row.is_gap_measured else _GAP
            yield _point(row, "train", _fields(row, without=hidden) | row.signal_numbers)
            if row.judging:
                yield _point(row, "judge", msgspec.structs.asdict(row.judging))
            if row.distillation:
                yield _point(row, "distill", msgspec.structs.asdict(row.distillation))
        case EvaluationRow():
            yield _evaluation(row)
        case ImitationStepRow():
            yield _point(row, "train", _fields(row))
        case HeldoutLossRow():
            yield _point(row, "heldout", _fields(row))
        case AuditRow():
            means = {f"mean_{kind}": drift.mean for kind, drift in row.by_kind.items()}
            yield _point(row, "audit", _fields(row) | means)
        case _:
            pass


def _evaluation(row: EvaluationRow) -> Point:
    """The numbers of an evaluation, and the share of each way in which episodes ended."""
    group = "/".join(part for part in ("heldout", row.tasks, "greedy" if row.greedy else "sampled") if part)
    num_ended = sum(row.outcomes.values())
    passes = {f"pass_at_{k}": value for k, value in row.pass_at.items()}
    ended = {f"ended_{name.replace(':', '_')}": count / num_ended for name, count in row.outcomes.items()}
    return _point(row, group, _fields(row) | passes | ended)


def _fields(row: Row, *, without: set[str] | None = None) -> dict[str, object]:
    hidden = _NOT_SHOWN | (without or set())
    return {name: value for name, value in msgspec.structs.asdict(row).items() if name not in hidden}


def _point(
    row: StepRow | EvaluationRow | AuditRow | ImitationStepRow | HeldoutLossRow,
    group: str,
    fields: Mapping[str, object],
) -> Point:
    """A point of the fields that are finite numbers."""
    values = {
        f"{group}/{name}": float(value)
        for name, value in fields.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return Point(row.step, row.at, values)


class _Line(msgspec.Struct, frozen=True):
    step: int


class MetricsFile(AbstractContextManager["MetricsFile", None]):
    """A file with one line for each point.

    After a resume, lines from `resumed_at` on are removed, because those steps are taken again.
    """

    def __init__(self, path: Path, *, resumed_at: int | None = None) -> None:
        if resumed_at is not None and path.is_file():
            _keep_before(path, resumed_at)
        self._file = path.open("ab", buffering=0)

    def show(self, row: Row) -> None:
        for point in points(row):
            line = {"step": point.step, "at": point.at, **point.values}
            self._file.write(msgspec.json.encode(line) + b"\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _keep_before(path: Path, step: int) -> None:
    """Removes the lines of later steps, and a last line that a crash cut short."""
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    kept = [line for line in whole if msgspec.json.decode(line, type=_Line).step < step]
    partial = path.with_name(f".{path.name}")
    partial.write_bytes(b"".join(kept))
    partial.replace(path)


class Board(AbstractContextManager["Board", None]):
    """An event file of TensorBoard.

    After a resume, TensorBoard discards the points from `resumed_at` on, because those steps are taken again.
    """

    def __init__(self, directory: Path, *, resumed_at: int | None = None) -> None:
        self._writer = EventFileWriter(str(directory))
        if resumed_at is not None:
            self._writer.add_event(Event(step=resumed_at, session_log=SessionLog(status=SessionLog.START)))

    def show(self, row: Row) -> None:
        """Writes every number of the row, at its step."""
        for point in points(row):
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._writer.add_event(Event(wall_time=point.at, step=point.step, summary=Summary(value=values)))
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


PURPOSE, FATE, PART, STATE = "swerve.purpose", "swerve.fate", "swerve.part", "swerve.state"
SET, SAMPLING = "swerve.heldout.set", "swerve.sampling"


class Meters:
    """The metrics of one run. Without an exporter its instruments do nothing."""

    def __init__(self, meter: Meter) -> None:
        self._newest = NewestNumbers(meter)
        self._steps = StepMeters(meter)
        self._rollouts = RolloutMeters(meter)
        self._weights = WeightMeters(meter)
        self._quarantined = meter.create_counter(
            "swerve.tasks.quarantined",
            unit="{task}",
            description="Training tasks of which no request is made any more",
        )
        self._quarantined.add(0)

    def show(self, row: Row) -> None:
        self._newest.show(row)
        match row:
            case StepRow() | ImitationStepRow() | SkippedBatchRow():
                self._steps.show(row)
            case EpisodeRow() | JudgementRow():
                self._rollouts.show(row)
            case PublicationRow() | DeliveryRow():
                self._weights.show(row)
            case QuarantineRow():
                self._quarantined.add(1)
            case _:
                pass


class NewestNumbers:
    """A gauge for each number that sinks show."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._gauges: dict[str, Gauge] = {}

    def show(self, row: Row) -> None:
        for point in points(row):
            for shown, value in point.values.items():
                name, unit, labels = metric_of(shown)
                if name not in self._gauges:
                    self._gauges[name] = self._meter.create_gauge(
                        name, unit=unit, description="As every sink shows it, of the newest row"
                    )
                self._gauges[name].set(value, labels)


def metric_of(shown: str) -> tuple[str, str, dict[str, str]]:
    """Name, unit and labels of the metric for the number that sinks call `shown`."""
    group, *middle, field = shown.split("/")
    labels = {SET: "/".join(middle[:-1]), SAMPLING: middle[-1]} if middle else {}
    is_seconds = field.endswith("_s") and not field.endswith("_per_s")
    name = f"swerve.{group}.{field.removesuffix('_s') if is_seconds else field}"
    return name, "s" if is_seconds else "", labels


class StepMeters:
    """Meters of steps and of the parts of their time."""

    def __init__(self, meter: Meter) -> None:
        self._taken = meter.create_counter(
            "swerve.steps.taken", unit="{step}", description="Optimizer steps that changed the weights"
        )
        self._skipped = meter.create_counter(
            "swerve.steps.skipped",
            unit="{step}",
            description="Batches whose loss or gradient was not finite",
        )
        self._time = meter.create_counter(
            "swerve.step.time",
            unit="s",
            description="Time of the training loop by part; the parts sum up to the wall time of the steps",
        )
        self._trained = meter.create_counter(
            "swerve.tokens.trained", unit="{token}", description="Tokens that steps trained"
        )
        self._taken.add(0)
        self._skipped.add(0)

    def show(self, row: StepRow | ImitationStepRow | SkippedBatchRow) -> None:
        if isinstance(row, SkippedBatchRow):
            self._skipped.add(1)
            return
        self._taken.add(1)
        self._trained.add(row.num_trained_tokens)
        for part in PARTS:
            self._time.add(max(0.0, getattr(row, part, 0.0)), {PART: part.removesuffix("_s")})


class RolloutMeters:
    """Meters of the fates of rollouts and of the requests to judge them."""

    def __init__(self, meter: Meter) -> None:
        self._settled = meter.create_counter(
            "swerve.rollouts.settled",
            unit="{rollout}",
            description="Rollouts by purpose, by what became of them and by how they ended",
        )
        self._sampled = meter.create_counter(
            "swerve.tokens.sampled", unit="{token}", description="Tokens that settled rollouts sampled"
        )
        self._queued = _seconds(
            meter, "swerve.rollout.queue.duration", "From the enqueueing of a rollout to its last claim"
        )
        self._played = _seconds(
            meter, "swerve.rollout.claim.duration", "From the last claim of a rollout to its end"
        )
        self._judged = meter.create_counter(
            "swerve.judgements.settled",
            unit="{judgement}",
            description="Requests to judge a rollout, by what became of them",
        )
        for fate in get_args(JudgementFate):
            self._judged.add(0, {FATE: fate})
        self._judge_waits = _seconds(
            meter, "swerve.judgement.wait.duration", "From the enqueueing of a judge request to its result"
        )

    def show(self, row: EpisodeRow | JudgementRow) -> None:
        if isinstance(row, JudgementRow):
            self._judged.add(1, {FATE: row.fate})
            self._judge_waits.record(row.waited_s, {FATE: row.fate})
            return
        purpose = {PURPOSE: row.purpose}
        self._settled.add(1, purpose | {FATE: row.fate, OUTCOME: row.outcome})
        self._sampled.add(row.sampled_tokens, purpose)
        if row.claimed_at:
            self._queued.record(max(0.0, row.claimed_at - row.enqueued_at), purpose)
            self._played.record(max(0.0, row.finished_at - row.claimed_at), purpose)


class WeightMeters:
    """Meters of publications, and of the time that engines take to serve them."""

    def __init__(self, meter: Meter) -> None:
        self._published = meter.create_counter(
            "swerve.weights.published",
            unit="{version}",
            description="Weight versions that were made ready for engines",
        )
        self._delivered = _seconds(
            meter,
            "swerve.weights.delivery.duration",
            "From the announcement of a weight version until all engines in routing serve it",
        )
        self._engines = meter.create_gauge(
            "swerve.engines", unit="{engine}", description="Engines that are in routing, and out of it"
        )

    def show(self, row: PublicationRow | DeliveryRow) -> None:
        if isinstance(row, PublicationRow):
            self._published.add(1)
            return
        self._delivered.record(row.update_s)
        self._engines.set(len(row.engines), {STATE: "in_routing"})
        self._engines.set(len(row.quarantined), {STATE: "out_of_routing"})


def _seconds(meter: Meter, name: str, description: str) -> Histogram:
    return meter.create_histogram(
        name, unit="s", description=description, explicit_bucket_boundaries_advisory=SECONDS
    )
