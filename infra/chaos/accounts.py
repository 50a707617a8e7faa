"""What became of every request, from three independent sources: its events in Redis, the run's journal, and the stream."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import redis

from infra.chaos.system import RUN_ID
from pipeline import keys
from pipeline.deadletters import DeadLetter
from pipeline.events import Event
from pipeline.judge import judge_request_id
from pipeline.kinds import JUDGE, ROLLOUT, AnyKind
from pipeline.message import decode
from pipeline.stream import GROUP

T = TypeVar("T")
WITHDRAWN = "withdrawn"


class JournaledEpisode(msgspec.Struct, frozen=True):
    """A row of the journal: what became of a request."""

    request_id: str
    cursor: int
    member: int
    fate: str


class JournaledStep(msgspec.Struct, frozen=True):
    """A row of the journal: what a step trained, and when."""

    step: int
    request_ids: tuple[str, ...]
    at: float


class JournaledJudgement(msgspec.Struct, frozen=True):
    """A row of the journal: what became of a request to judge a rollout."""

    rollout_id: str
    fate: str


class Accounts(msgspec.Struct, frozen=True):
    """`lost`, `trained_twice` and `judged_twice` have a line for each request, with the reason."""

    fates: dict[str, int] = {}
    lost: list[str] = []
    trained_twice: list[str] = []
    judge_fates: dict[str, int] = {}  # of judge requests
    judged_twice: list[str] = []


def audit(client: redis.Redis, run_dir: Path, seen: Iterable[str], *, ended: bool) -> Accounts:
    """The accounts of a run; `seen` are ids of requests that were observed while it ran.

    While the run goes on, outstanding requests are not lost. The journal is read last, because a request is journalled
    before it stops being outstanding.
    """
    judged = _audit_judgements(client, run_dir, ended=ended)
    lives = _events_by_request(client, ROLLOUT)
    outstanding = _outstanding(client, ROLLOUT)
    dead = _dead_letters(client, ROLLOUT)
    episodes = list(_rows(run_dir / "journal/episodes.jsonl", JournaledEpisode))
    steps = list(_rows(run_dir / "journal/steps.jsonl", JournaledStep))
    trained = Counter(request_id for step in steps for request_id in step.request_ids)
    fates = {row.request_id: row.fate for row in episodes} | dict.fromkeys(trained, "trained")
    known = sorted({*lives, *seen, *fates}.difference(() if ended else outstanding))
    lost = [*_unaccounted(known, fates, lives, dead), *judged.lost]
    if ended:
        lost += [*_left_by_ended_run(client, outstanding, ROLLOUT), *judged.without_row(trained)]
    return Accounts(
        fates=dict(Counter(fates.values()).most_common()),
        lost=lost,
        trained_twice=[*_trained_again(trained, steps, lives), *_members_trained_twice(episodes, trained)],
        judge_fates=dict(Counter(judged.fates.values()).most_common()),
        judged_twice=judged.twice,
    )


@dataclass(frozen=True, slots=True)
class _JudgeAccounts:
    """What became of the judge requests, by id."""

    fates: dict[str, str]
    lost: list[str]
    twice: list[str]

    def without_row(self, trained: Iterable[str]) -> Iterator[str]:
        """Rollouts that were trained although nothing is known of a request to judge them."""
        if self.fates:
            for rollout_id in sorted(trained):
                if judge_request_id(rollout_id) not in self.fates:
                    yield f"{rollout_id}: trained, and nothing tells of a request to judge it"


def _audit_judgements(client: redis.Redis, run_dir: Path, *, ended: bool) -> _JudgeAccounts:
    lives = _events_by_request(client, JUDGE)
    outstanding = _outstanding(client, JUDGE)
    dead = _dead_letters(client, JUDGE)
    rows = list(_rows(run_dir / "journal/judgements.jsonl", JournaledJudgement))
    fates = {judge_request_id(row.rollout_id): row.fate for row in rows}
    known = sorted({*lives, *fates}.difference(() if ended else outstanding))
    lost = list(_unaccounted(known, fates, lives, dead))
    if ended:
        lost += _left_by_ended_run(client, outstanding, JUDGE)
    twice = [
        f"{judge_request_id(rollout_id)}: {times} rows in the journal"
        for rollout_id, times in Counter(row.rollout_id for row in rows).items()
        if times > 1
    ]
    return _JudgeAccounts(fates, lost, [*twice, *_published_again(lives)])


def _unaccounted(
    known: Iterable[str],
    fates: dict[str, str],
    lives: dict[str, list[Event]],
    dead: dict[str, DeadLetter],
) -> Iterator[str]:
    """Requests of which no source says what became of them. Completes `fates` by what Redis says."""
    for request_id in known:
        letter = dead.get(request_id)
        if letter is not None and letter.failures:
            fates[request_id] = "dead"
        elif lives.get(request_id) and lives[request_id][-1].what == WITHDRAWN:
            fates.setdefault(request_id, WITHDRAWN)
        if request_id not in fates:
            last = [event.what for event in lives.get(request_id, [])][-3:]
            yield f"{request_id}: not in the journal, no dead letter; its last events: {', '.join(last) or 'none'}"


def _left_by_ended_run(client: redis.Redis, outstanding: list[str], kind: AnyKind) -> Iterator[str]:
    """What an ended run must not leave: outstanding requests, and results that were not acknowledged."""
    for request_id in outstanding:
        yield f"{request_id}: still outstanding"
    stream = keys.stream(RUN_ID, kind)
    if not client.exists(stream):
        return
    pending = cast(dict[str, int], client.xpending(stream, GROUP))["pending"]
    if pending:
        yield f"{pending} {'trajectories' if kind is ROLLOUT else 'judgements'} are not acknowledged"


def _published_again(lives: dict[str, list[Event]]) -> Iterator[str]:
    for request_id, events in lives.items():
        num_published = sum(event.what == "published" for event in events)
        if num_published > 1:
            yield f"{request_id}: published {num_published} times"


def _trained_again(
    trained: Counter[str], steps: list[JournaledStep], lives: dict[str, list[Event]]
) -> Iterator[str]:
    """Trained in two steps, in a step number that was made twice, or after a checkpoint had settled it."""
    for request_id, times in trained.items():
        if times > 1:
            yield f"{request_id}: in {times} steps"
    for number, times in Counter(step.step for step in steps).items():
        if times > 1:
            yield f"step {number} was made {times} times"
    for step in steps:
        for request_id in step.request_ids:
            events = lives.get(request_id, [])
            acknowledged = [event.at for event in events if event.what == "acknowledged"]
            if acknowledged and acknowledged[0] < step.at:
                yield f"{request_id}: step {step.step} trained it after a checkpoint had settled it"
    yield from _published_again({name: lives.get(name, []) for name in trained})


def _members_trained_twice(episodes: list[JournaledEpisode], trained: Counter[str]) -> Iterator[str]:
    """One member of one group, enqueued again under another id although the first was trained."""
    rows = {row.request_id: row for row in episodes if row.request_id in trained}
    places = Counter((row.cursor, row.member) for row in rows.values())
    for (cursor, member), times in places.items():
        if times > 1:
            yield f"member {member} of group {cursor}: {times} requests for it were trained"


def _outstanding(client: redis.Redis, kind: AnyKind) -> list[str]:
    found = cast(list[bytes], client.zrange(keys.open_requests(RUN_ID, kind), 0, -1))
    return [request_id.decode() for request_id in found]


def _dead_letters(client: redis.Redis, kind: AnyKind) -> dict[str, DeadLetter]:
    rows = cast(dict[bytes, bytes], client.hgetall(keys.dead(RUN_ID, kind)))
    return {name.decode(): decode(row, DeadLetter) for name, row in rows.items()}


def _events_by_request(client: redis.Redis, kind: AnyKind) -> dict[str, list[Event]]:
    """Of every request that Redis knows of, oldest event first."""
    found = list(client.scan_iter(match=keys.events("*", kind), count=1000))
    with client.pipeline(transaction=False) as pipe:
        for key in found:
            pipe.lrange(key, 0, -1)
        rows: list[Any] = pipe.execute()
    names = [key.decode().removeprefix(keys.events("", kind)) for key in found]
    return {name: [decode(row, Event) for row in life] for name, life in zip(names, rows, strict=True)}


def _rows(file: Path, kind: type[T]) -> Iterator[T]:
    """Complete rows only: the last one may still be written."""
    decoder = msgspec.json.Decoder(kind)
    with file.open("rb") as lines:
        yield from (decoder.decode(line) for line in lines if line.endswith(b"\n"))
