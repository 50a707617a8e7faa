"""Judgements in the store of rollouts: with their rollouts, each once, and never at the cost of a rollout."""

import shutil
import time
from pathlib import Path

from msgspec.structs import replace

from pipeline.judge import JudgedStep, Judgement, Vote, judge_request_id, judgement_head
from pipeline.request import Claim
from pipeline.rollout_store import segment
from pipeline.rollout_store.reading import RolloutStore
from pipeline.rollout_store.record import StoredRollout
from pipeline.trajectory import Failed, Trajectory, head_of
from tests.pipeline.judging import judge_request
from tests.trainer.trajectories import trajectory, turn
from trainer.records.rollout_writer import RolloutWriter

MAX_BYTES = 2**30


def rollout(name: str) -> Trajectory:
    made = trajectory(turn([5], [6, 7], kept=0))
    return replace(made, claim=replace(made.claim, request=replace(made.claim.request, id=name)))


def judgement(name: str, text: str, *, at: float = 0.0, failed: Failed | None = None) -> Judgement:
    request = replace(judge_request(judge_request_id(name)), rollout_id=name)
    vote = Vote(seed=1, value=1.0, text=text)
    return Judgement(
        claim=Claim(request=request, attempt=1, worker="j", claimed_at=1.0),
        steps=() if failed else (JudgedStep(turn=0, score=1.0, votes=(vote,)),),
        failed=failed,
        started_at=1.0,
        finished_at=at or time.time(),
    )


def add(writer: RolloutWriter, name: str) -> None:
    made = rollout(name)
    writer.add(head_of(made, 0), StoredRollout(trajectory=made))


def judge(writer: RolloutWriter, made: Judgement) -> bool:
    return writer.add_judgement(judgement_head(made, 0), made)


def texts(store: RolloutStore) -> dict[str, str | None]:
    """Of the first vote on each rollout."""
    return {
        one.head.head.request_id: one.rollout.judgement and one.rollout.judgement.steps[0].votes[0].text
        for one in store.rollouts(lambda _: True)
    }


def test_a_rollout_is_read_with_the_votes_on_it_whether_its_segment_is_open_or_closed(tmp_path: Path) -> None:
    writer, store = RolloutWriter(tmp_path, max_bytes=MAX_BYTES), RolloutStore(tmp_path)
    for name in ("a", "b"):
        add(writer, name)
    judge(writer, judgement("a", "a test was run"))
    for _ in range(2):
        assert texts(store) == {"a": "a test was run", "b": None}
        found = store.find("a")
        assert found is not None
        assert found.rollout.trajectory is not None
        assert found.rollout.judgement is not None
        assert found.rollout.judgement.scores == {0: 1.0}
        assert [one.head.request_id for one in store.heads()] == ["a", "b"], "a judgement is no rollout"
        writer.close()


def test_a_judgement_is_found_in_a_later_segment_than_its_rollout(tmp_path: Path) -> None:
    first = RolloutWriter(tmp_path, max_bytes=MAX_BYTES)
    add(first, "a")
    first.close()
    second = RolloutWriter(tmp_path, max_bytes=MAX_BYTES)
    judge(second, judgement("a", "late"))
    assert texts(RolloutStore(tmp_path)) == {"a": "late"}
    second.close()
    assert len(segment.segments_in(tmp_path)) == 2
    assert texts(RolloutStore(tmp_path)) == {"a": "late"}


def test_a_judgement_that_comes_again_is_written_once_and_a_later_one_replaces_it(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, max_bytes=MAX_BYTES)
    add(writer, "a")
    assert judge(writer, judgement("a", "first", at=10.0))
    assert not judge(writer, judgement("a", "first", at=10.0))
    writer.close()
    again = RolloutWriter(tmp_path, max_bytes=MAX_BYTES)
    assert not judge(again, judgement("a", "first", at=10.0))
    assert judge(again, judgement("a", "second", at=11.0))
    again.close()
    assert texts(RolloutStore(tmp_path)) == {"a": "second"}


def test_a_judgement_that_a_kill_cut_short_costs_nothing_else(tmp_path: Path) -> None:
    writer, killed = RolloutWriter(tmp_path / "a", max_bytes=MAX_BYTES), tmp_path / "killed"
    add(writer, "a")
    judge(writer, judgement("a", "torn"))
    shutil.copytree(tmp_path / "a", killed)
    writer.close()
    (path,) = segment.segments_in(killed)
    path.write_bytes(path.read_bytes()[:-3])
    assert texts(RolloutStore(killed)) == {"a": None}
    next_life = RolloutWriter(killed, max_bytes=MAX_BYTES)
    assert judge(next_life, judgement("a", "again"))
    next_life.close()
    assert texts(RolloutStore(killed)) == {"a": "again"}


def test_what_a_worker_says_of_its_own_crash_is_withheld(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, max_bytes=MAX_BYTES)
    add(writer, "a")
    failed = Failed(boundary="worker", message="bug: assert hidden == 4", transient=True)
    judge(writer, judgement("a", "", failed=failed))
    writer.close()
    found = RolloutStore(tmp_path).find("a")
    assert found is not None
    assert found.rollout.judgement is not None
    assert found.rollout.judgement.failed is not None
    assert found.rollout.judgement.failed.message == "bug: (withheld)"
