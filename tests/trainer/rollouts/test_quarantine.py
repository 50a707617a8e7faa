"""Which tasks are not to be trusted any more, by what came back for them."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from arq.connections import ArqRedis
from msgspec.structs import replace
from redis.asyncio import Redis

from benchmarks.scripted_fleet import work_off
from pipeline import connection
from pipeline.journal.reading import read
from pipeline.journal.rows import EpisodeRow, QuarantineRow
from pipeline.trajectory import Failed
from tests.trainer.trainer_side import TrainerSide
from tests.trainer.trajectories import head
from trainer.records.journal_writer import Journal, episode_row
from trainer.rollouts.dispatch import MAX_GRADER_FAILURES, Quarantine

BROKEN = Failed(boundary="grader", message="the tests took 7200 s", transient=False)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path) as journal:
        yield journal


@pytest.fixture
def quarantine(journal: Journal) -> Quarantine:
    return Quarantine(journal)


def test_the_same_patch_worth_one_thing_and_then_another_says_which_requests(quarantine: Quarantine) -> None:
    assert quarantine.notice(head(1, 0, reward=1.0, patch="p")) == ""
    assert quarantine.notice(head(1, 1, reward=1.0, patch="p")) == ""
    reason = quarantine.notice(head(1, 2, reward=0.0, patch="p"))
    assert reason == "flaky: the same patch was worth 1 in r1.0 and 0 in r1.2"


def test_a_calibrated_task_stays_whatever_a_patch_makes_of_its_verdicts(journal: Journal) -> None:
    first, second = head(1, 0, reward=1.0, patch="p"), head(1, 1, reward=0.0, patch="p")
    quarantine = Quarantine(journal, {first.task_id})
    assert [quarantine.notice(one) for one in (first, second)] == ["", ""]
    assert quarantine.unsteady == {first.task_id: "the same patch was worth 1 in r1.0 and 0 in r1.1"}


def test_other_patches_other_tasks_and_no_patch_at_all_contradict_nothing(quarantine: Quarantine) -> None:
    heads = [
        head(1, 0, reward=1.0, patch="p"),
        head(1, 1, reward=0.0, patch="q"),
        head(2, 0, reward=0.0, patch="p"),
        head(3, 0, reward=0.0),
        head(3, 1, reward=1.0),
        head(1, 2, reward=None, patch="p"),
    ]
    assert [quarantine.notice(one) for one in heads] == [""] * len(heads)


def test_a_task_on_which_the_grader_alone_keeps_breaking_is_told_from_an_outage(
    quarantine: Quarantine,
) -> None:
    def fails(task: int, number: int) -> str:
        return quarantine.notice(head(task, number, reward=None, boundary="grader"))

    assert [fails(1, number) for number in range(5)] == [""] * 5, "so far it may be the machine"
    assert [fails(2, number) for number in range(5)] == [""] * 5
    assert quarantine.notice(head(2, 5)) == ""
    assert fails(1, 5) == "the grader broke on it 6 times in a row, though not on others"
    assert fails(2, 6) == "", "a verdict is a verdict"


def test_one_request_that_comes_twice_and_failures_elsewhere_are_not_counted(quarantine: Quarantine) -> None:
    for _ in range(MAX_GRADER_FAILURES + 1):
        assert quarantine.notice(head(1, 0, reward=None, boundary="grader")) == ""
        assert quarantine.notice(head(2, 0)) == ""
    for number in range(MAX_GRADER_FAILURES + 1):
        assert quarantine.notice(head(3, number, reward=None, boundary="sandbox")) == ""


def test_what_the_journal_holds_is_known_after_a_restart(journal: Journal) -> None:
    Quarantine(journal).put("t9", "flaky", request_id="r9.0")
    journal.append(episode_row(head(1, 0, reward=1.0, patch="p"), "trained"))
    journal.append(replace(episode_row(head(2, 0, reward=1.0, patch="p"), "evaluated"), purpose="eval"))
    again = Quarantine(journal)
    assert "t9" in again
    assert again.reason("t9") == "flaky"
    assert again.notice(head(1, 1, reward=0.0, patch="p")).startswith("flaky")
    assert again.notice(head(2, 1, reward=0.0, patch="p")) == "", "evaluations prove nothing here"


@pytest.fixture
async def side(redis_url: str, redis: Redis, tmp_path: Path) -> AsyncIterator[TrainerSide]:
    pool: ArqRedis = await connection.connect(redis_url)
    with Journal(tmp_path) as journal:
        made = TrainerSide(pool, journal)
        await made.streams.recover()
        yield made
    await pool.aclose()


async def test_the_groups_of_such_a_task_are_dropped_untrained_ready_ones_too(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(2, version=0)
    await work_off(side.pool, limit=3)
    await side.streams.read(block_ms=10)
    assert side.book.num_ready == 1
    await work_off(side.pool, patches=lambda request: b"the same", limit=2)
    await side.streams.read(block_ms=10)
    assert side.book.num_live == 0
    assert side.fates() == ["quarantined"] * 5
    assert [row.task_id for row in read(side.journal.directory, QuarantineRow)] == ["t"]


async def test_the_reason_names_the_graders_last_failure(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)

    await work_off(side.pool, lambda request: BROKEN, limit=2)
    await side.streams.read(block_ms=10)
    side.quarantine.notice(head(5, 0))
    await work_off(side.pool, lambda request: BROKEN)
    await side.streams.read(block_ms=10)
    (row,) = read(side.journal.directory, QuarantineRow)
    assert row.reason.endswith("the last time with: the tests took 7200 s")
    assert {one.fate for one in read(side.journal.directory, EpisodeRow)} == {"failed"}
