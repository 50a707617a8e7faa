"""Whatever data sets, policies and workers call themselves, no verb lets it control the terminal."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from arq.connections import ArqRedis
from msgspec.structs import replace

from pipeline import census, deadletters, queue, stream, telemetry, weights
from pipeline.__main__ import main
from pipeline.cli import trace, verbs
from pipeline.journal.rows import EpisodeRow, StepRow
from pipeline.judge import Judge, Judgement, JudgeRequest, judge_request_id
from pipeline.kinds import JUDGE, ROLLOUT
from pipeline.request import Claim, RolloutRequest
from pipeline.rollout_store.record import StoredRollout
from pipeline.trajectory import Failed, Submitted, Trajectory, Turn, head_of
from tests.hostile import HOSTILE, filled, screens, shown
from tests.pipeline.journal_rows import made, write
from trainer.records.rollout_writer import RolloutWriter

RUN = f"run{HOSTILE}"
ANSWERED, DEAD, CLAIMED, QUEUED, GONE = (
    f"{name}{HOSTILE}" for name in ("one", "two", "three", "four", "five")
)
JUDGING = judge_request_id(ANSWERED)


def request(request_id: str) -> RolloutRequest:
    return filled(RolloutRequest, id=request_id, run_id=RUN, enqueued_at=time.time())


async def claimed(pool: ArqRedis, request_id: str) -> Claim:
    await queue.enqueue(pool, request(request_id))
    claim = await queue.claim(pool, request_id, HOSTILE)
    assert isinstance(claim, Claim)
    return claim


def played(claim: Claim, **fields: object) -> Trajectory:
    times = {"started_at": claim.claimed_at, "finished_at": time.time()}
    turns = (filled(Turn, kept_tokens=0, repeated_tokens=0),)
    return replace(
        filled(Trajectory, **times, turns=turns, outcome=Submitted(patch=HOSTILE.encode())),
        claim=claim,
        **fields,
    )


@pytest.fixture
async def fleet(pool: ArqRedis, tmp_path: Path) -> Path:
    """Requests in every state, a trainer, a worker, a judge and weights, whose every text is hostile; the run's directory."""
    answered = played(await claimed(pool, ANSWERED))
    await stream.publish(pool, answered)
    claim = await claimed(pool, DEAD)
    failed = filled(Failed, transient=False)
    evidence = [deadletters.attempt_failure(claim, failed, detail=HOSTILE)]
    await deadletters.dead_letter(pool, replace(played(claim), outcome=failed, reward=None), evidence)
    await claimed(pool, CLAIMED)
    await queue.enqueue(pool, request(QUEUED))
    asked = filled(
        JudgeRequest,
        id=JUDGING,
        run_id=RUN,
        rollout_id=ANSWERED,
        judge=Judge(method="rule", name=HOSTILE),
        enqueued_at=time.time(),
    )
    await queue.enqueue(pool, asked, JUDGE)
    judging = await queue.claim(pool, JUDGING, HOSTILE, JUDGE)
    assert isinstance(judging, Claim)
    scored = replace(filled(Judgement, started_at=1.0, finished_at=time.time()), claim=judging)
    await stream.publish(pool, scored, kind=JUDGE)
    now = time.time()
    await census.beat_run(
        pool,
        filled(census.RunStatus, run_id=RUN, ended="", journal=str(tmp_path / "journal"), updated_at=now),
    )
    for kind in (ROLLOUT.name, JUDGE.name):
        about = {"name": kind + HOSTILE, "kind": kind, "started_at": now, "updated_at": now}
        await census.beat_worker(pool, filled(census.WorkerStatus, **about))
    await weights.announce(pool, filled(weights.WeightVersion, run_id=RUN, version=1))
    await weights.record_served(pool, RUN, filled(weights.ServedWeights, version=1))
    store(tmp_path, claim)
    return tmp_path


def store(run_dir: Path, claim: Claim) -> None:
    """A rollout that Redis does not know, its journal and its spans."""
    gone = played(replace(claim, request=request(GONE)))
    writer = RolloutWriter(run_dir / "rollouts", max_bytes=10**9)
    writer.add(head_of(gone, 0), StoredRollout(trajectory=gone))
    writer.close()
    write(run_dir, filled(EpisodeRow, request_id=GONE, fate="evaluated", at=1e9))
    write(run_dir, made(StepRow, step=7, version=6, at=1e9, request_ids=[GONE]))
    trace_id, span_id = telemetry.parts(telemetry.rollout(GONE))
    span = {
        **{"name": HOSTILE, "service": HOSTILE, "trace_id": trace_id, "span_id": span_id, "parent_id": None},
        **{"started_ns": 1, "ended_ns": 2, "status": "ERROR", "attributes": {HOSTILE: HOSTILE}, "links": []},
    }
    (run_dir / "traces").mkdir()
    (run_dir / "traces" / "one.jsonl").write_text(json.dumps(span) + "\n")


VERBS = [
    *(
        ["status"],
        ["top"],
        ["ls"],
        ["ls", "--run-dir", "DIR"],
        ["tail"],
        ["tail", "--kind", "judge"],
        ["dead", "--full"],
    ),
    *(
        ["show", one, "--full", "--run-dir", "DIR"]
        for one in (ANSWERED, DEAD, CLAIMED, QUEUED, GONE, JUDGING)
    ),
    *(["explain", one, "--run-dir", "DIR"] for one in (ANSWERED, DEAD, CLAIMED, QUEUED, GONE, JUDGING)),
    *(
        ["trace", GONE, "--run-dir", "DIR"],
        ["show", f"no such {HOSTILE}"],
        ["status", "--run", f"no such {HOSTILE}"],
    ),
    *(
        ["requeue", HOSTILE],
        ["drop", f"no such {HOSTILE}"],
        ["requeue", DEAD],
        ["forget", RUN],
        ["forget", RUN, "--force"],
    ),
]


async def test_no_verb_lets_hostile_text_through(
    fleet: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "has_colours", lambda _: True)
    monkeypatch.setattr(trace, "has_colours", lambda _: True)
    told = ""
    for words in VERBS:
        command = [str(fleet) if word == "DIR" else word for word in words] + ["--redis", redis_url]
        # What changes something is done once.
        for more in ([],) if words[0] in ("requeue", "drop", "forget") else ([], ["--json"]):
            with screens(monkeypatch) as terminal:
                await asyncio.to_thread(main, [*command, *more])
            text = shown(terminal.getvalue())
            assert text.strip(), words
            told += text
            if more and "no such" not in "".join(words):
                objects = [json.loads(line) for line in text.splitlines()]
                assert any(HOSTILE in said for one in objects for said in texts(one)), words
    assert {*verbs.VERBS, "trace"} == {words[0] for words in VERBS}
    assert "\u241b]0;PWN" in told


def texts(value: Any) -> Iterator[str]:
    """All texts in a value of JSON."""
    match value:
        case str():
            yield value
        case dict() | list():
            inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            for one in inside:
                yield from texts(one)
        case _:
            return
