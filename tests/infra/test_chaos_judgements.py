"""Fault injection: how judge requests are accounted for."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from infra.chaos.accounts import Accounts, Leftovers, audit, summarize, table
from infra.chaos.system import RUN_ID
from pipeline import keys
from pipeline.judge import judge_request_id
from pipeline.kinds import JUDGE
from pipeline.stream import GROUP
from tests.infra.ended_run import TRAINED, EndedRun


@pytest.fixture
def run(redis_url: str, tmp_path: Path) -> Iterator[EndedRun]:
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
        run = EndedRun(client, tmp_path)
        run.live("good", *TRAINED)
        run.journal("good", "trained")
        run.train(1, "good")
        yield run


def accounts(run: EndedRun, *, ended: bool = True) -> Accounts:
    return audit(run.client, run.directory, seen=[], ended=ended)


def test_judge_requests_that_joined_came_late_or_were_withdrawn_are_accounted_for(run: EndedRun) -> None:
    run.judge("good", "joined", *TRAINED)
    run.judge("slow", "late", *TRAINED)
    run.live("flat.judge", "enqueued", "withdrawn", kind=JUDGE)
    found = accounts(run)
    assert (found.lost, found.judged_twice) == ([], [])
    assert found.judge_fates == {"joined": 1, "late": 1, "withdrawn": 1}
    assert found.fates == {"trained": 1}


def test_a_judge_request_that_no_source_accounts_for_is_lost(run: EndedRun) -> None:
    run.judge("good", "joined", *TRAINED)
    run.live("vanished.judge", "enqueued", "claimed", kind=JUDGE)
    (line,) = accounts(run).lost
    assert line.startswith("vanished.judge: ")
    run.client.zadd(keys.open_requests(RUN_ID, JUDGE), {"vanished.judge": 1})
    assert accounts(run, ended=False).lost == []


def test_a_trained_rollout_of_whose_judging_nothing_is_known_is_a_loss(run: EndedRun) -> None:
    run.judge("another", "joined", *TRAINED)
    assert accounts(run, ended=False).lost == []
    assert accounts(run).lost == ["good: trained, and nothing tells of a request to judge it"]


def test_what_is_left_of_judging_when_the_run_has_ended_is_lost(run: EndedRun) -> None:
    run.judge("good", "joined", *TRAINED)
    stream = keys.stream(RUN_ID, JUDGE)
    run.client.xgroup_create(stream, GROUP, id="0", mkstream=True)
    run.client.xadd(stream, {"head": b""})
    run.client.xreadgroup(GROUP, "learner", {stream: ">"})
    run.client.zadd(keys.open_requests(RUN_ID, JUDGE), {judge_request_id("good"): 1})
    assert accounts(run).lost == ["good.judge: still outstanding", "1 judgements are not acknowledged"]


def test_a_rollout_with_two_rows_or_two_publications_is_judged_twice(run: EndedRun) -> None:
    run.judge("good", "joined", *TRAINED)
    run.judge("good", "late")
    run.judge("again", "joined", "enqueued", "published", "published")
    assert accounts(run).judged_twice == [
        "good.judge: 2 rows in the journal",
        "again.judge: published 2 times",
    ]


def test_the_table_tells_of_judge_requests(run: EndedRun) -> None:
    run.judge("good", "joined", *TRAINED)
    slo = summarize([], {}, accounts(run), Leftovers(), num_wanted=0, problems=[], steps=1, minutes=0.0)
    assert slo.is_kept
    assert "judge requests: 1 joined" in table(slo)
    run.judge("good", "joined")
    slo = summarize([], {}, accounts(run), Leftovers(), num_wanted=0, problems=[], steps=1, minutes=0.0)
    assert not slo.is_kept
    assert "1 judged twice" in table(slo)
