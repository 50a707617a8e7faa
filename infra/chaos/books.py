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
from pipeline.events import Event
from pipeline.message import decode
from pipeline.queue import DeadLetter
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

    fates: dict[str, int]
    lost: list[str]
    trained_twice: list[str]


def settle(client: redis.Redis, run_dir: Path, asked: Iterable[str]) -> Books:
    """The accounts of a run that has ended; ``asked`` are requests known from elsewhere to have been made."""
    episodes = list(_rows(run_dir / "journal/episodes.jsonl", Episode))
    steps = list(_rows(run_dir / "journal/steps.jsonl", Step))
    lives = _lives(client)
    dead = {name.decode(): decode(row, DeadLetter) for name, row in client.hgetall(keys.dead(RUN_ID)).items()}
    trained = Counter(request_id for step in steps for request_id in step.request_ids)
    fates = {row.request_id: row.fate for row in episodes} | dict.fromkeys(trained, "trained")
    lost: list[str] = []
    for request_id in sorted({*lives, *asked, *fates}):
        letter = dead.get(request_id)
        if letter is not None and letter.failures:
            fates[request_id] = "dead"
        elif lives.get(request_id) and lives[request_id][-1].what == WITHDRAWN:
            fates.setdefault(request_id, WITHDRAWN)
        if request_id not in fates:
            last = [event.what for event in lives.get(request_id, [])][-3:]
            lost.append(f"{request_id}: no row, no letter; its life ends with {', '.join(last) or 'nothing'}")
    lost += _still_owed(client)
    return Books(
        fates=dict(Counter(fates.values()).most_common()),
        lost=lost,
        trained_twice=[*_trained_again(trained, steps, lives), *_places_taken_twice(episodes, trained)],
    )


def _still_owed(client: redis.Redis) -> Iterator[str]:
    """What an ended run must not have left: requests that are owed, answers that nobody took."""
    for request_id in client.zrange(keys.open_requests(RUN_ID), 0, -1):
        yield f"{request_id.decode()}: still owed"
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
    found: dict[str, list[Event]] = {}
    for key in client.scan_iter(match=keys.events("*"), count=1000):
        request_id = key.decode().removeprefix(keys.events(""))
        found[request_id] = [decode(row, Event) for row in client.lrange(key, 0, -1)]
    return found


def _rows(file: Path, kind: type[T]) -> Iterator[T]:
    decoder = msgspec.json.Decoder(kind)
    with file.open("rb") as lines:
        yield from (decoder.decode(line) for line in lines)
