"""What became of every request, settled from three accounts that know nothing of each other: the life of each as
Redis noted it, the journal of the run, and the stream.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import redis

from infra.chaos.system import RUN_ID
from pipeline import keys
from pipeline.deadletters import DeadLetter
from pipeline.events import Event
from pipeline.message import decode
from pipeline.stream import GROUP

T = TypeVar("T")
WITHDRAWN = "withdrawn"


class Episode(msgspec.Struct, frozen=True):
    """A row of the journal: what became of a request."""

    request_id: str
    cursor: int
    member: int
    fate: str


class Step(msgspec.Struct, frozen=True):
    """A row of the journal: what a step trained, and when."""

    step: int
    request_ids: tuple[str, ...]
    at: float


class Books(msgspec.Struct, frozen=True):
    """``lost`` and ``trained_twice`` say why, request by request."""

    fates: dict[str, int] = {}
    lost: list[str] = []
    trained_twice: list[str] = []


def settle(client: redis.Redis, run_dir: Path, asked: Iterable[str], *, ended: bool) -> Books:
    """The accounts of a run; ``asked`` are requests known from elsewhere to have been made. While it has not ended, what it
    owes is in good hands; and as a request is settled before it is owed no more, the journal is read last.
    """
    lives = _lives(client)
    owed = [request_id.decode() for request_id in client.zrange(keys.open_requests(RUN_ID), 0, -1)]
    dead = {name.decode(): decode(row, DeadLetter) for name, row in client.hgetall(keys.dead(RUN_ID)).items()}
    episodes = list(_rows(run_dir / "journal/episodes.jsonl", Episode))
    steps = list(_rows(run_dir / "journal/steps.jsonl", Step))
    trained = Counter(request_id for step in steps for request_id in step.request_ids)
    fates = {row.request_id: row.fate for row in episodes} | dict.fromkeys(trained, "trained")
    lost: list[str] = []
    for request_id in sorted({*lives, *asked, *fates}.difference(() if ended else owed)):
        letter = dead.get(request_id)
        if letter is not None and letter.failures:
            fates[request_id] = "dead"
        elif lives.get(request_id) and lives[request_id][-1].what == WITHDRAWN:
            fates.setdefault(request_id, WITHDRAWN)
        if request_id not in fates:
            last = [event.what for event in lives.get(request_id, [])][-3:]
            lost.append(f"{request_id}: no row, no letter; its life ends with {', '.join(last) or 'nothing'}")
    if ended:
        lost += _still_owed(client, owed)
    return Books(
        fates=dict(Counter(fates.values()).most_common()),
        lost=lost,
        trained_twice=[*_trained_again(trained, steps, lives), *_places_taken_twice(episodes, trained)],
    )


def _still_owed(client: redis.Redis, owed: list[str]) -> Iterator[str]:
    """What an ended run must not have left: requests that are owed, answers that nobody took."""
    for request_id in owed:
        yield f"{request_id}: still owed"
    pending = client.xpending(keys.stream(RUN_ID), GROUP)["pending"]
    if pending:
        yield f"{pending} answers are not acknowledged"


def _trained_again(trained: Counter[str], steps: list[Step], lives: dict[str, list[Event]]) -> Iterator[str]:
    """In two steps; in a step of a number that another has; or after a checkpoint had settled it."""
    for request_id, times in trained.items():
        if times > 1:
            yield f"{request_id}: in {times} steps"
    for number, times in Counter(step.step for step in steps).items():
        if times > 1:
            yield f"step {number} was made {times} times"
    for step in steps:
        for request_id in step.request_ids:
            settled = [event.at for event in lives.get(request_id, []) if event.what == "acknowledged"]
            if settled and settled[0] < step.at:
                yield f"{request_id}: step {step.step} trained it after a checkpoint had settled it"
            answers = sum(event.what == "published" for event in lives.get(request_id, []))
            if answers > 1:
                yield f"{request_id}: published {answers} times"


def _places_taken_twice(episodes: list[Episode], trained: Counter[str]) -> Iterator[str]:
    """One member of one group, asked for again under another id although the first was trained."""
    rows = {row.request_id: row for row in episodes if row.request_id in trained}
    places = Counter((row.cursor, row.member) for row in rows.values())
    for (cursor, member), times in places.items():
        if times > 1:
            yield f"member {member} of group {cursor}: {times} requests for it were trained"


def _lives(client: redis.Redis) -> dict[str, list[Event]]:
    """Of every request that Redis has heard of, oldest event first."""
    found = list(client.scan_iter(match=keys.events("*"), count=1000))
    with client.pipeline(transaction=False) as pipe:
        for key in found:
            pipe.lrange(key, 0, -1)
        rows = pipe.execute()
    names = [key.decode().removeprefix(keys.events("")) for key in found]
    return {name: [decode(row, Event) for row in life] for name, life in zip(names, rows, strict=True)}


def _rows(file: Path, kind: type[T]) -> Iterator[T]:
    """All that are whole: the last one may be being written."""
    decoder = msgspec.json.Decoder(kind)
    with file.open("rb") as lines:
        yield from (decoder.decode(line) for line in lines if line.endswith(b"\n"))
