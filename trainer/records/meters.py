"""A sink that shows the rows of a run as metrics: the newest numbers of each kind, and counts and durations since the process began.

Numbers have the names that every sink gives them (`points.py`), with dots: `train/loss` is `swerve.train.loss`. A name that ends in `_s`
becomes one with the unit second: `train/wait_s` is `swerve.train.wait`, in Prometheus `swerve_train_wait_seconds`. Of held-out
evaluations, the name of the set and how episodes were sampled are labels. After a resume, counts begin at 0 again, as those of any
process that was restarted; those that may stay at 0 are shown from the beginning, so that an increase is seen as one.
"""

from typing import get_args

from opentelemetry.metrics import Histogram, Meter
from opentelemetry.metrics import _Gauge as Gauge

from pipeline.metrics import OUTCOME, SECONDS
from trainer.records.journal import (
    DeliveryRow,
    EpisodeRow,
    PublicationRow,
    QuarantineRow,
    SkippedBatchRow,
    StepRow,
)
from trainer.records.judgement_row import JudgementFate, JudgementRow
from trainer.records.points import points
from trainer.records.row import Row
from trainer.records.step_seconds import PARTS

PURPOSE, FATE, PART, STATE = "swerve.purpose", "swerve.fate", "swerve.part", "swerve.state"
SET, SAMPLING = "swerve.heldout.set", "swerve.sampling"


class Meters:
    """Of one run. Without an exporter its instruments do nothing."""

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
            case StepRow() | SkippedBatchRow():
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
    """Name, unit and labels of the number that sinks call `shown`."""
    group, *middle, field = shown.split("/")
    labels = {SET: "/".join(middle[:-1]), SAMPLING: middle[-1]} if middle else {}
    is_seconds = field.endswith("_s") and not field.endswith("_per_s")
    name = f"swerve.{group}.{field.removesuffix('_s') if is_seconds else field}"
    return name, "s" if is_seconds else "", labels


class StepMeters:
    """Steps and where their time went."""

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

    def show(self, row: StepRow | SkippedBatchRow) -> None:
        if isinstance(row, SkippedBatchRow):
            self._skipped.add(1)
            return
        self._taken.add(1)
        self._trained.add(row.num_trained_tokens)
        for part in PARTS:
            self._time.add(max(0.0, getattr(row, part)), {PART: part.removesuffix("_s")})


class RolloutMeters:
    """What became of rollouts and of the requests to judge them."""

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
    """Publications, and how long engines take to serve them."""

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
