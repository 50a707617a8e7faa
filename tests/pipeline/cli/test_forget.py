"""`forget` deletes a run from Redis, and nothing else."""

import json
import time

import pytest
from arq.connections import ArqRedis

from pipeline import census, deadletters, keys, queue, request_store, stream, weights
from pipeline.__main__ import main
from pipeline.queue import Lease
from pipeline.request import Claim
from pipeline.tokenizer import TokenizerBundle, put_tokenizer
from pipeline.weights import ServedWeights, WeightVersion
from tests.pipeline import samples
from tests.pipeline.cli.situations import (
    BROKEN,
    RunCommand,
    answered,
    dead_lettered,
    silent,
    taken,
    trainer_lives,
    worker_lives,
)

OTHER = "other"


async def whole_run(pool: ArqRedis) -> set[str]:
    """A run with a request in every state, whose trainer is gone; returns the ids of its requests."""
    await trainer_lives(pool)
    await silent(pool, samples.RUN, 60)
    await stream.open_reader(pool, samples.RUN)
    read = {await answered(pool) for _ in range(3)}
    settled = await stream.read_new(pool, samples.RUN)
    await stream.acknowledge(pool, samples.RUN, [(one.entry_id, one.head.request_id) for one in settled])
    await pool.xtrim(keys.stream(samples.RUN), maxlen=0, approximate=False)
    unread, dead = await answered(pool), await dead_lettered(pool)
    queued, held, failed, gone = samples.request(), await taken(pool), await taken(pool), await taken(pool)
    await queue.enqueue(pool, queued)
    await queue.renew(pool, held, Lease(worker="host/1", attempt=1, claimed_at=1.0))
    failure = deadletters.attempt_failure(failed, BROKEN)
    await queue.return_to_queue(pool, failed, failure=failure)
    await queue.withdraw(pool, samples.RUN, [gone.request.id])
    await pool.xadd(keys.stream(samples.RUN), {"head": b"rubbish"})
    await stream.read_new(pool, samples.RUN, count=1)
    version = WeightVersion(
        run_id=samples.RUN,
        version=1,
        step=1,
        directory="/w",
        num_bytes=1,
        published_at=time.time(),
    )
    await weights.announce(pool, version)
    await weights.record_served(pool, samples.RUN, ServedWeights(version=1, engines=("e",)))
    claims = (held, failed, gone)
    return {*read, unread, dead, queued.id, *(claim.request.id for claim in claims)}


async def contents(pool: ArqRedis) -> bytes:
    """Every key, with whatever of its value names something."""
    found: list[bytes] = []
    for key in sorted(await pool.keys("*")):
        found += [key, await pool.dump(key) or b""]
    return b"\n".join(found)


async def test_nothing_that_names_the_run_or_its_requests_is_left(pool: ArqRedis, run: RunCommand) -> None:
    request_ids = await whole_run(pool)
    before = await contents(pool)
    assert all(one.encode() in before for one in request_ids)
    status, out, _ = await run("forget", samples.RUN)
    assert status == 0
    assert out.startswith(f"forgotten: {samples.RUN}  {len(request_ids)} requests, ")
    after = await contents(pool)
    assert [one for one in request_ids if one.encode() in after] == []
    assert samples.RUN.encode() not in after
    assert (await run("ls"))[1] == "nothing to list\n"


async def test_other_runs_and_what_runs_share_stay(pool: ArqRedis, run: RunCommand) -> None:
    bundle = TokenizerBundle(
        tokenizer_json=b"{}", chat_template="", eos_token="", bos_token="", stop_token_ids=(1,), vocab_size=2
    )
    tokenizer = await put_tokenizer(pool, bundle)
    await trainer_lives(pool, run_id=OTHER)
    await worker_lives(pool)
    theirs = await taken(pool, run_id=OTHER, tokenizer=tokenizer)
    before = {key: await pool.dump(key) for key in await pool.keys("*")}
    await whole_run(pool)
    await run("forget", samples.RUN)
    left = {key: await pool.dump(key) for key in await pool.keys("*")}
    assert left.pop(keys.wake().encode()), "tokens name no request"
    before.pop(keys.wake().encode(), None)
    assert left == before
    assert isinstance(theirs, Claim)
    assert await queue.renew(pool, theirs, Lease(worker="host/1", attempt=1, claimed_at=1.0))


async def test_a_run_whose_trainer_is_alive_is_not_forgotten_without_force(
    pool: ArqRedis, run: RunCommand
) -> None:
    await trainer_lives(pool)
    request_id = await answered(pool)
    status, out, err = await run("forget", samples.RUN)
    assert (status, out) == (2, "")
    assert err == "the trainer of run laptop is alive: stop it first, or add --force\n"
    assert await request_store.read(pool, request_id) is not None
    status, out, _ = await run("forget", samples.RUN, "--force", "--json")
    assert (status, json.loads(out)["num_requests"]) == (0, 1)
    assert await census.run_ids(pool) == []


async def test_a_run_that_ended_is_forgotten_at_once_and_only_once(pool: ArqRedis, run: RunCommand) -> None:
    await trainer_lives(pool, ended="finished all 9 steps")
    assert (await run("forget", samples.RUN))[0] == 0
    status, _, err = await run("forget", samples.RUN)
    assert (status, err) == (2, "no run laptop; there is none at all\n")


async def test_a_worker_of_a_forgotten_run_stops_and_publishes_nothing(
    pool: ArqRedis, run: RunCommand
) -> None:
    await trainer_lives(pool, ended="stopped by a signal")
    claim = await taken(pool)
    await run("forget", samples.RUN)
    assert not await queue.renew(pool, claim, Lease(worker="host/1", attempt=1, claimed_at=1.0))
    assert await stream.publish(pool, samples.trajectory(claim)) == "withdrawn"
    assert not await queue.return_to_queue(pool, claim)
    assert await pool.keys("*laptop*") == []


def test_a_run_must_be_named() -> None:
    with pytest.raises(SystemExit):
        main(["forget"])
