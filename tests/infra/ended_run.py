"""A run that has ended, as the accounts of infra/chaos find it."""

from pathlib import Path

import redis

from infra.chaos.system import RUN_ID
from pipeline import keys
from pipeline.journal.rows import EpisodeRow, JudgementRow, StepRow
from pipeline.judge import judge_request_id
from pipeline.kinds import JUDGE, ROLLOUT, AnyKind
from pipeline.message import encode
from pipeline.request_store import Event
from pipeline.stream import GROUP
from tests.pipeline.journal_rows import made, write

TRAINED = ("enqueued", "claimed", "published", "acknowledged")


class EndedRun:
    """A run that has ended, as Redis and its journal tell it."""

    def __init__(self, client: redis.Redis, directory: Path) -> None:
        self.client = client
        self.directory = directory
        (directory / "journal").mkdir()
        client.xgroup_create(keys.stream(RUN_ID), GROUP, id="0", mkstream=True)

    def live(self, request_id: str, *events: str, kind: AnyKind = ROLLOUT) -> None:
        for at, what in enumerate(events):
            self.client.rpush(keys.events(request_id, kind), encode(Event(float(at), what)))

    def judge(self, rollout_id: str, fate: str, *events: str) -> None:
        """The rollout's judge request lived through `events` and ended up in the journal."""
        self.live(judge_request_id(rollout_id), *events, kind=JUDGE)
        write(self.directory, made(JudgementRow, rollout_id=rollout_id, fate=fate))

    def journal(self, request_id: str, fate: str, *, member: int = 0) -> None:
        write(self.directory, made(EpisodeRow, request_id=request_id, cursor=0, member=member, fate=fate))

    def train(self, step: int, *request_ids: str, at: float = 2.5) -> None:
        write(self.directory, made(StepRow, step=step, request_ids=request_ids, at=at))
