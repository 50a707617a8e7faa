"""The trainer's part of the traces, made of the rows of the journal as they are written.

A rollout's trace ends when its row is written. The children of its root follow one another without a gap: the wait in the queue and the
attempt, which the worker writes, then the stream, the intake, the wait for the group, the wait for the step, the step and the publication.
The step has a trace of its own, which links the rollouts that it trained, and each of those links the step; the same holds for a
publication and its step. [docs/traces.md](../../docs/traces.md) has all spans.
"""

from dataclasses import dataclass

from pipeline import telemetry
from pipeline.journal.rows import DeliveryRow, EpisodeRow, PublicationRow, Row, StepRow
from pipeline.kinds import ROLLOUT
from pipeline.telemetry import Attribute, record


class TraceSink:
    """A sink that writes spans as soon as the rows of a run contain their data."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._published: PublicationRow | None = None
        self._step: TrainedStep | None = None

    def show(self, row: Row) -> None:
        match row:
            case PublicationRow():
                self._published = row
                _publication(self._run_id, row)
            case DeliveryRow():
                _delivery(self._run_id, row)
            case StepRow():
                self._step = TrainedStep(self._run_id, row, self._published)
                self._step.write()
            case EpisodeRow():
                is_of_step = self._step is not None and row.fate == "trained"
                _rollout(self._run_id, row, self._step if is_of_step else None)
            case _:
                pass

    def close(self) -> None:
        """Does nothing, because spans are written at once."""


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A step, and the publication of the weights that it made, if there was one."""

    run_id: str
    row: StepRow
    newest: PublicationRow | None

    @property
    def published(self) -> PublicationRow | None:
        """The row of the publication;

        None if there was none. The row of a step follows its publication. A run that another has superseded publishes nothing.
        """
        return self.newest if self.newest is not None and self.newest.step == self.row.step else None

    @property
    def traceparent(self) -> str:
        return telemetry.step(self.run_id, self.row.step)

    def write(self) -> None:
        """Write the trace of the step."""
        row = self.row
        record(
            "step",
            row.began_at,
            row.at,
            parent="",
            own=self.traceparent,
            links=[telemetry.rollout(one) for one in row.request_ids],
            run=self.run_id,
            step=row.step,
            version=row.version,
            num_trajectories=row.num_trajectories,
            num_trained_tokens=row.num_trained_tokens,
            forward_s=row.forward_s,
            backward_s=row.backward_s,
            optimizer_s=row.optimizer_s,
        )
        self._child("train", row.began_at, row.trained_at)
        audited_from = row.trained_at
        if self.published is not None:
            link = telemetry.publication(self.run_id, self.published.version)
            self._child("publish weights", row.trained_at, self.published.at, links=(link,))
            audited_from = self.published.at
        self._child("audit", audited_from, row.at)

    def _child(self, name: str, started_at: float, ended_at: float, links: tuple[str, ...] = ()) -> None:
        own = telemetry.named(self.traceparent, name)
        record(name, started_at, ended_at, parent=self.traceparent, own=own, links=links)


def _rollout(run_id: str, row: EpisodeRow, step: TrainedStep | None) -> None:
    """Writes the root span of a rollout's trace and the child spans that the trainer knows."""
    root = telemetry.rollout(row.request_id)
    published = step.published if step is not None else None
    end = row.at if step is None else published.at if published is not None else step.row.trained_at
    named: dict[str, Attribute] = {"gen_ai.conversation.id": row.request_id}
    if row.reward is not None:
        named["swerve.reward"] = row.reward
    if step is not None:
        named["swerve.step"] = step.row.step
    record(
        "rollout",
        row.enqueued_at,
        end,
        parent="",
        own=root,
        error=row.outcome if row.fate == "failed" else "",
        named=named,
        run=run_id,
        request=row.request_id,
        task=row.task_id,
        group=row.group_id,
        purpose=row.purpose,
        fate=row.fate,
        outcome=row.outcome,
    )
    stages = _Stages(root, row.enqueued_at)
    if not row.attempt:  # no worker wrote it: the request was withdrawn, or no worker could carry it out
        stages.enter(
            "queue wait", row.stamps.published_at or end, own=telemetry.queue_wait(root, ROLLOUT.name)
        )
    if row.stamps.published_at:
        _after_publishing(stages, row, step, end)


def _after_publishing(stages: "_Stages", row: EpisodeRow, step: TrainedStep | None, end: float) -> None:
    """Writes the spans from the stream to the end of the trace."""
    stamps, stages.at = row.stamps, row.stamps.published_at
    stages.enter("stream", stamps.read_at)
    stages.enter("intake", stamps.joined_at or end)
    if row.purpose == "eval":
        return stages.enter("evaluation wait", end)
    left_at = stamps.released_at or (step.row.began_at if step is not None else end)
    waiting = telemetry.group_wait(row.request_id)
    inside = _Stages(waiting, stages.at)
    stages.enter("group wait", min(left_at, end), own=waiting)
    if stamps.closed_at and stamps.closed_at != stamps.released_at:
        inside.enter("other members", min(stamps.closed_at, stages.at))
        inside.enter("judgements", stages.at)
    if step is None:
        return stages.enter("settling", end)
    stages.enter("step wait", step.row.began_at)
    stages.enter("trained", step.row.trained_at, links=(step.traceparent,), version=step.row.version)
    if step.published is not None:
        version = step.published.version
        link = telemetry.publication(step.run_id, version)
        stages.enter("publication", step.published.at, links=(link,), version=version)
    return None


@dataclass(slots=True)
class _Stages:
    """Spans that follow one another under one parent."""

    parent: str
    at: float  # Unix seconds, where the next span begins

    def enter(
        self,
        name: str,
        until: float,
        *,
        own: str = "",
        links: tuple[str, ...] = (),
        version: int | None = None,
    ) -> None:
        """Writes the span of a stage from the end of the previous stage to `until`; no span if the stage took no time."""
        if until == self.at:
            return
        own = own or telemetry.named(self.parent, name)
        named: dict[str, Attribute] = {} if version is None else {"swerve.version": version}
        record(name, self.at, until, parent=self.parent, own=own, links=links, named=named)
        self.at = max(self.at, until)


def _publication(run_id: str, row: PublicationRow) -> None:
    record(
        "publication",
        row.began_at,
        row.at,
        parent="",
        own=telemetry.publication(run_id, row.version),
        links=(telemetry.step(run_id, row.step),) if row.step else (),
        run=run_id,
        version=row.version,
        step=row.step,
        num_bytes=row.num_bytes,
    )


def _delivery(run_id: str, row: DeliveryRow) -> None:
    above = telemetry.publication(run_id, row.version)
    own = telemetry.named(above, "deliver weights")
    started_at = row.at - row.update_s
    record("deliver weights", started_at, row.at, parent=above, own=own, engines=tuple(row.engines))
