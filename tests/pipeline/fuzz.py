"""Messages that are not what they should be, on every wire: nothing crashes, each bad one is refused with its reason.

    python -m tests.pipeline.fuzz [--messages 100000] [--seed 0]

Each wire is fed rubbish, torn and flipped bytes, and well-formed messages some field of which is of another type or
absurd. What is said to be readable must be of use to everybody who reads that wire.
"""

import argparse
import asyncio
import contextlib
import copy
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import msgspec
import zstandard
from arq.connections import ArqRedis
from arq.jobs import SerializationError, deserialize_job_raw

from infra.redis_server import own_redis
from pipeline import census, connection, deadletters, keys, queue, request_store, stream, tokenizer, weights
from pipeline.cli import finding, listing, show, status
from pipeline.cli.status import complaints, fleet_census
from pipeline.deadletters import DeadLetter
from pipeline.judge import judgement_head
from pipeline.kinds import JUDGE, ROLLOUT, AnyKind
from pipeline.message import MalformedMessage, Message, encode
from pipeline.queue import Lease
from pipeline.request import Claim
from pipeline.screen import Ink
from pipeline.trajectory import Failed, head_of
from tests.pipeline import samples
from tests.pipeline.judging import judge_request, voted

RUN = samples.RUN
BATCH = 500
SAMPLE_ID = "fuzz-xxxxx"
INK = Ink(coloured=False)
ABSURD: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**63 - 1, -(2**63), 2**64 - 1, 1e308, -1e308, float("nan"), float("inf"), ""),
    *("x" * 3000, "\x00\x1b[2J", "*?[", b"\xff\x00", [], {}, [[[[]]]], {"a": {"b": None}}, [None] * 50),
)


@dataclass(slots=True)
class Tally:
    """Of one wire."""

    accepted: int = 0
    refused: int = 0

    def refuse(self, error: BaseException | None) -> None:
        assert str(error), "a refusal says why"
        self.refused += 1


Wire = Callable[[ArqRedis, list[bytes], Tally], Awaitable[None]]


def claim() -> Claim:
    return Claim(request=samples.request(), attempt=1, worker="host/1", claimed_at=time.time())


def mutant(rng: random.Random, sample: bytes) -> bytes:
    """Something like `sample`, or nothing like it."""
    match rng.randrange(6):
        case 0:
            return rng.randbytes(rng.randrange(200))
        case 1:
            return sample[: rng.randrange(len(sample))]
        case 2:
            flipped = bytearray(sample)
            for _ in range(rng.randint(1, 8)):
                flipped[rng.randrange(len(flipped))] = rng.randrange(256)
            return bytes(flipped)
        case 3:
            cut = rng.randrange(len(sample))
            return sample[:cut] + rng.randbytes(rng.randrange(20)) + sample[cut:]
        case _:
            return _absurd(rng, sample)


def _absurd(rng: random.Random, sample: bytes) -> bytes:
    """Well-formed, with a field somewhere that is missing, or of another type or size."""
    tree: Any = msgspec.msgpack.decode(sample)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        node = tree
        while isinstance(node, dict | list) and node:
            within = cast(Any, node)
            place = rng.choice(list(within)) if isinstance(node, dict) else rng.randrange(len(within))
            if isinstance(within[place], dict | list) and within[place] and rng.random() < 0.7:
                node = within[place]
                continue
            if rng.random() < 0.2:
                del within[place]
            else:
                within[place] = copy.deepcopy(rng.choice(ABSURD))
            break
    return msgspec.msgpack.encode(tree)


async def requests(pool: ArqRedis, payloads: list[bytes], tally: Tally) -> None:
    """Stored requests, as a worker takes them."""
    given = await _stored(pool, payloads)
    await pool.zadd(keys.queue(), dict.fromkeys(given, 1.0))
    while found := await queue.take(pool, "host/1", 100):
        for one in found:
            match one:
                case Claim():
                    given.remove(one.request.id)
                    lease = Lease(worker="host/1", attempt=one.attempt, claimed_at=one.claimed_at)
                    assert await queue.renew(pool, one, lease)
                    assert one.request.limits.retries.of("grader").wait_s(9) >= 0
                    assert await stream.publish(pool, samples.trajectory(one)) == "published"
                    tally.accepted += 1
                case queue.Unclaimable():
                    given.remove(one.request_id)
                    assert one.reason
                    tally.refused += 1
    assert not given, "each is claimed or refused"


async def unswept_requests(pool: ArqRedis, payloads: list[bytes], tally: Tally) -> None:
    """Stored requests, as the trainer's sweep finds them."""
    given = await _stored(pool, payloads)
    queued = set(await queue.sweep(pool, RUN))
    runs = (RUN, *await census.run_ids(pool))
    letters = [letter for run in runs for letter in (await deadletters.listed(pool, run)).values()]
    dead_lettered = {letter.request_id for letter in letters if letter.failures[0].message}
    assert given == queued | (given & dead_lettered)
    tally.accepted += len(queued)
    tally.refused += len(given & dead_lettered)


async def _stored(pool: ArqRedis, payloads: list[bytes]) -> set[str]:
    """Owed under an id of its own each, which those that are fit to read carry."""
    found = {f"fuzz-{number:05d}": payload for number, payload in enumerate(payloads)}
    async with pool.pipeline(transaction=False) as pipe:
        for one, payload in found.items():
            pipe.set(keys.request(one), payload.replace(SAMPLE_ID.encode(), one.encode()))
            pipe.zadd(keys.open_requests(RUN), {one: 1.0})
        await pipe.execute()
    return set(found)


async def jobs(pool: ArqRedis, payloads: list[bytes], tally: Tally) -> None:
    """arq's jobs, as its worker reads them and as `ls` does."""
    for payload in payloads:
        try:
            function, arguments, label, number, enqueued_ms = deserialize_job_raw(
                payload, deserializer=request_store.decode_job
            )
        except SerializationError as error:
            tally.refuse(error.__cause__)
            continue
        assert isinstance(function, str)
        assert isinstance(number, int | None)
        assert {type(one) for one in (*arguments, *label.values())} <= {str}
        assert time.gmtime(enqueued_ms / 1000)
        tally.accepted += 1
    request_ids = [f"job-{number}" for number in range(len(payloads))]
    await pool.mset({keys.arq_job(one): data for one, data in zip(request_ids, payloads, strict=True)})
    assert len(await request_store.labels(pool, request_ids)) == len(payloads)


async def leases(pool: ArqRedis, payloads: list[bytes], tally: Tally) -> None:
    """Claims, as the census and `ls` show them, and as the reaper asks for them."""
    ids: list[str] = []
    async with pool.pipeline(transaction=False) as pipe:
        for payload in payloads:
            ids.append(f"r{len(ids)}")
            pipe.zadd(keys.open_requests(RUN), {ids[-1]: 1.0})
            pipe.set(keys.lease(ids[-1]), payload or b"\xc1")
        await pipe.execute()
    shown = await listing.lines(pool, RUN, "claimed", len(ids))
    for line in shown:
        assert listing.row(line, INK)
    for one in ids[:50]:
        assert await queue.is_leased(pool, one, 1) in (True, False)
    assert status.text_of_fleet(await fleet_census(pool, [RUN]), [], INK)
    tally.accepted += len(shown)
    tally.refused += len(ids) - len(shown)


async def heads(pool: ArqRedis, payloads: list[bytes], tally: Tally, *, kind: AnyKind = ROLLOUT) -> None:
    """Heads, as the learner reads them and `ls` and `status` show them."""
    await stream.open_reader(pool, RUN, kind)
    name = keys.stream(RUN, kind)
    async with pool.pipeline(transaction=False) as pipe:
        for payload in payloads:
            pipe.xadd(name, {"head": payload})
        await pipe.execute()
    read = await stream.read_new(pool, RUN, count=len(payloads), block_ms=None, kind=kind)
    aside: list[bytes] = await cast(Any, pool).lrange(keys.malformed(RUN, kind), 0, -1)
    assert len(read) + len(aside) == len(payloads)
    assert all(b": " in reason for reason in aside)
    lines = await listing.lines(pool, RUN, "answered", len(payloads), kind=kind)
    assert listing.text(lines, INK)
    assert msgspec.json.encode(lines)
    assert status.text_of_fleet(await fleet_census(pool, [RUN]), [], INK)
    await stream.acknowledge(pool, RUN, [(one.entry_id, one.head.request_id) for one in read], kind)
    assert await stream.read_unacknowledged(pool, RUN, kind) == []
    tally.accepted += len(read)
    tally.refused += len(aside)


async def bodies(pool: ArqRedis, payloads: list[bytes], tally: Tally, *, kind: AnyKind = ROLLOUT) -> None:
    """Bodies, as the learner loads them and `show` prints them. Some are not even compressed."""

    async def shown(request_id: str) -> str:
        if kind is JUDGE:
            return show.judging_text(await finding.find_judging(pool, request_id), INK, full=True)
        return show.rollout_text(await finding.find_rollout(pool, request_id), None, INK, full=False)

    async def one(number: int, payload: bytes) -> None:
        data = payload if number % 5 == 0 else zstandard.ZstdCompressor(level=1).compress(payload)
        await pool.set(keys.body(f"r{number}", kind), data)
        try:
            assert await stream.read_body(pool, f"r{number}", kind) is not None
            assert await shown(f"r{number}")
            tally.accepted += 1
        except MalformedMessage as error:
            tally.refuse(error)

    await _side_by_side(one, payloads)


async def announcements(pool: ArqRedis, payloads: list[bytes], tally: Tally) -> None:
    """Weights, learned and served, and tokenizers; `status` shows a run whatever it announced."""

    async def one(number: int, payload: bytes) -> None:
        run = f"{RUN}-{number}"
        wanted = (keys.weights(run), keys.served(run), keys.tokenizer(run))
        await pool.mset(dict.fromkeys(wanted, payload))
        try:
            await weights.newest_version(pool, run)
            tally.accepted += 1
        except MalformedMessage as error:
            tally.refuse(error)
        for read in (weights.served_weights(pool, run), tokenizer.get_tokenizer(pool, run)):
            with contextlib.suppress(MalformedMessage):
                await cast(Awaitable[object], read)
        if number % 50 == 0:
            assert status.text_of_fleet(await fleet_census(pool, [run]), [], INK)

    await _side_by_side(one, payloads)


async def _side_by_side(one: Callable[[int, bytes], Awaitable[None]], payloads: list[bytes]) -> None:
    for start in range(0, len(payloads), 50):
        await asyncio.gather(
            *(one(start + number, payload) for number, payload in enumerate(payloads[start : start + 50]))
        )


async def beats(pool: ArqRedis, payloads: list[bytes], tally: Tally) -> None:
    """What workers and trainers say of themselves, as `status` shows it."""
    now = time.time()
    await pool.mset({keys.worker(f"host/{number}"): data for number, data in enumerate(payloads)})
    await pool.zadd(keys.workers(), {f"host/{number}": now for number in range(len(payloads))})
    fleet = await fleet_census(pool, [RUN])
    assert status.text_of_fleet(fleet, complaints(fleet), INK)
    num_alive = len(fleet.workers) + len(fleet.judges)
    tally.accepted += num_alive
    tally.refused += len(payloads) - num_alive
    for payload in payloads[:50]:
        await pool.set(keys.run_status(RUN), payload)
        assert status.text_of_fleet(await fleet_census(pool, [RUN]), [], INK)


async def evidence(pool: ArqRedis, payloads: list[bytes], tally: Tally) -> None:
    """Dead letters, failures and events, as `dead`, `show` and `explain` read them."""
    async with pool.pipeline(transaction=False) as pipe:
        for number, payload in enumerate(payloads):
            pipe.hset(keys.dead(RUN), f"r{number}", cast(Any, payload))
            pipe.rpush(keys.failures("one"), payload)
            pipe.rpush(keys.events("one"), payload)
        await pipe.execute()
    letters = await deadletters.listed(pool, RUN)
    assert len(letters) == len(payloads)
    assert listing.text(await listing.lines(pool, RUN, "dead", len(payloads)), INK)
    assert (
        len(await deadletters.failures(pool, "one"))
        == len(await request_store.events(pool, "one"))
        == len(payloads)
    )
    refused = sum(letter.task_id == "" and letter.died_at == 0 for letter in letters.values())
    tally.accepted += len(payloads) - refused
    tally.refused += refused


def _samples() -> dict[str, tuple[Wire, list[bytes]]]:
    """Each wire, and what travels on it when all is well."""
    ours, now = claim(), time.time()
    trajectory = samples.trajectory(ours)
    asked = Claim(request=judge_request(), attempt=1, worker="host/1", claimed_at=now)
    judgement = voted(asked, (1.0, None), None)
    failed = Failed(boundary="sandbox", message="gone", transient=True)
    failure = deadletters.attempt_failure(ours, failed)
    letter = DeadLetter(request_id="r", task_id="t", failures=(failure,), died_at=now)
    request = encode(samples.request(id=SAMPLE_ID))
    status = census.WorkerStatus(
        name="host/1", slots=4, running=("r",), finished=1, failed=0, started_at=now, updated_at=now
    )
    version = weights.WeightVersion(
        run_id=RUN, version=1, step=1, directory="/w", num_bytes=1, published_at=now
    )
    lease = Lease(worker="host/1", attempt=1, claimed_at=now, task_id="t", max_turns=9)
    job = request_store.encode_job({"t": None, "f": "rollout", "a": ["r"], "k": {"task_id": "t"}, "et": 1})
    messages: list[Message] = [trajectory, samples.trajectory(ours, turns=(), outcome=failed, reward=None)]
    return {
        "requests": (requests, [request]),
        "requests found by the sweep": (unswept_requests, [request]),
        "arq jobs": (jobs, [job]),
        "leases": (leases, [encode(lease)]),
        "heads": (heads, [encode(head_of(trajectory, body_bytes=1))]),
        "bodies": (bodies, [encode(message) for message in messages]),
        "heads of judgements": (
            partial(heads, kind=JUDGE),
            [encode(judgement_head(judgement, body_bytes=1))],
        ),
        "bodies of judgements": (partial(bodies, kind=JUDGE), [encode(judgement)]),
        "announcements": (announcements, [encode(version)]),
        "census": (beats, [encode(status), encode(census.RunStatus(run_id=RUN, phase="waiting"))]),
        "evidence": (evidence, [encode(letter), encode(failure)]),
    }


async def fuzz(pool: ArqRedis, messages: int, *, seed: int = 0) -> dict[str, Tally]:
    """So many messages on every wire of an empty database. Raises whatever they break."""
    rng = random.Random(seed)
    tallies: dict[str, Tally] = {}
    for name, (wire, good) in _samples().items():
        tally = tallies[name] = Tally()
        for start in range(0, messages, BATCH):
            await pool.flushdb()
            payloads = [mutant(rng, rng.choice(good)) for _ in range(min(BATCH, messages - start))]
            await wire(pool, payloads, tally)
        assert tally.accepted + tally.refused == messages, name
    return tallies


async def _main(messages: int, seed: int) -> None:
    with own_redis() as url:
        pool = await connection.connect(url)
        began_at = time.monotonic()
        for name, tally in (await fuzz(pool, messages, seed=seed)).items():
            print(f"{name:<28} {tally.accepted:>8} fit to read  {tally.refused:>8} refused")
        print(f"no crash; {time.monotonic() - began_at:.0f} s")
        await pool.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.pipeline.fuzz", description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="on every wire")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    asyncio.run(_main(given.messages, given.seed))
    sys.exit(0)
