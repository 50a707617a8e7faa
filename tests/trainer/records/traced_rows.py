"""`python -m tests.trainer.records.traced_rows`: shows a sink of traces the rows of a made run. A process has one destination of spans.

The rollout `trained` is enqueued at 100 s and claimed at 104 s; its step begins at 130 s, and its weights are announced at 137 s.
"""

from typing import Any

from pipeline.journal.rows import DeliveryRow, EpisodeRow, EpisodeStamps, PublicationRow, StepRow
from pipeline.settings import telemetry_settings
from pipeline.telemetry import start_telemetry
from trainer.records.traces import TraceSink

STAMPS = EpisodeStamps(published_at=110, read_at=111, joined_at=112, closed_at=120, released_at=125)
NOT_JUDGED = EpisodeStamps(published_at=110, read_at=111, joined_at=112, closed_at=120)
LATE = EpisodeStamps(published_at=110, read_at=111)
EVALUATED = EpisodeStamps(published_at=110, read_at=111, joined_at=112)


def episode(request_id: str, fate: Any, **fields: Any) -> EpisodeRow:
    common = {"group_id": "g00000000", "task_id": "t", "purpose": "train", "member": 0, "group_size": 2}
    times = {"enqueued_at": 100.0, "claimed_at": 104.0, "finished_at": 109.0, "at": 140.0, "attempt": 1}
    return EpisodeRow(request_id=request_id, fate=fate, **common | times | fields)


def step(number: int, *request_ids: str, began_at: float) -> StepRow:
    return StepRow(
        step=number,
        version=number - 1,
        loss=0.0,
        grad_norm=1.0,
        lr=1e-4,
        reward_mean=0.5,
        num_trajectories=len(request_ids),
        request_ids=request_ids,
        num_trained_tokens=1,
        num_unique_sampled_tokens=1,
        began_at=began_at,
        trained_at=began_at + 5,
        at=began_at + 9,
    )


ROWS = (
    PublicationRow(version=0, step=0, num_bytes=1, began_at=90, at=91),
    PublicationRow(version=1, step=1, num_bytes=1, began_at=135, at=137),
    step(1, "trained", "unjudged", began_at=130),
    episode("trained", "trained", stamps=STAMPS, reward=1.0),
    episode("unjudged", "trained", stamps=NOT_JUDGED),
    episode("flat", "zero_variance", stamps=STAMPS, at=126.0),
    episode("late", "late", stamps=LATE, at=111.5),
    episode("evaluated", "evaluated", purpose="eval", stamps=EVALUATED, at=150.0),
    episode("withdrawn", "withdrawn", attempt=0, at=103.0),
    DeliveryRow(version=1, step=1, engines=("http://e",), quarantined=(), update_s=3.0, at=140.0),
    step(2, "unpublished", began_at=150),  # another run has taken the engines over
    episode("unpublished", "trained", stamps=STAMPS),
)

if __name__ == "__main__":
    provider = start_telemetry("trainer", telemetry_settings())
    sink = TraceSink("run")
    for row in ROWS:
        sink.show(row)
    provider.shutdown()
