"""Alarms of a run at work: measurements of a real disk and Redis, rows from the ledger, and what a resumed run knows."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from arq.connections import ArqRedis
from msgspec.structs import replace
from redis.asyncio import Redis

from pipeline import connection, stream
from pipeline.journal.reading import read
from pipeline.journal.rows import AlarmRow, EpisodeRow, Row
from tests.trainer.records.test_console import row
from tests.trainer.trajectories import head
from trainer.loop.alarms import measured_storage, recalled_alarms
from trainer.recipe import AlarmsRecipe, Recipe, load_recipe
from trainer.records.alarms import Alarms
from trainer.records.journal_writer import Journal
from trainer.records.sinks import Records
from trainer.rollouts.ledger import Ledger

NOTHING_ELSE = AlarmsRecipe(window_steps=3, disk_free_bytes=0, redis_share=0)


class Seen:
    """A sink that keeps what it is shown."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def show(self, row: Row) -> None:
        self.rows.append(row)


@pytest.fixture
async def pool(redis_url: str, redis: Redis) -> AsyncIterator[ArqRedis]:
    pool = await connection.connect(redis_url)
    yield pool
    await pool.config_set("maxmemory", 0)
    await pool.aclose()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal") as opened:
        yield opened


def recipe(alarms: AlarmsRecipe) -> Recipe:
    return replace(load_recipe(Path("trainer/recipes/demo.toml")), alarms=alarms)


async def test_a_redis_that_fills_begins_an_alarm_and_one_with_room_again_ends_it(
    pool: ArqRedis, tmp_path: Path
) -> None:
    alarms, found = Alarms(replace(NOTHING_ELSE, redis_share=0.9), max_lag_versions=4), list[AlarmRow]()

    async def measure() -> None:
        found.extend(alarms.observe_storage(await measured_storage(pool, tmp_path)))

    used_bytes, host_bytes = await stream.memory_use(pool)
    assert 0 < used_bytes < host_bytes, "Redis has no limit, so it may use its host's memory"
    await measure()
    assert found == []
    await pool.config_set("maxmemory", used_bytes)
    await measure()
    await measure()
    assert [(one.kind, one.is_over) for one in found] == [("redis_fills", False)]
    await pool.config_set("maxmemory", 10 * used_bytes)
    await measure()
    assert [(one.kind, one.is_over) for one in found[1:]] == [("redis_fills", True)]


async def test_a_disk_that_fills_is_an_alarm_even_while_redis_is_away(tmp_path: Path) -> None:
    alarms, found = Alarms(replace(NOTHING_ELSE, disk_free_bytes=2**60), max_lag_versions=4), list[AlarmRow]()
    away = ArqRedis(host="127.0.0.1", port=1)
    found += alarms.observe_storage(await measured_storage(away, tmp_path))
    await away.aclose()
    (begun,) = found
    assert begun.kind == "disk_fills"
    assert "GiB free" in begun.text


def test_what_the_ledger_settles_reaches_every_sink_and_the_alarms(journal: Journal) -> None:
    alarms, seen = Alarms(NOTHING_ELSE, max_lag_versions=4), Seen()
    records = Records(journal, [seen], alarms)
    ledger = Ledger(records)
    for step in range(1, 13):
        outcome = "submitted" if step < 7 else "exhausted:format_errors"
        ledger.settle(replace(head(step, 0), outcome=outcome), [], "trained")
        records.append(row(step, 0.5))
    shown = [one for one in seen.rows if isinstance(one, EpisodeRow)]
    assert shown == [*read(journal.directory, EpisodeRow)]
    assert len(shown) == 12
    (begun,) = read(journal.directory, AlarmRow)
    assert begun.kind == "format_errors_rise"
    assert begun in seen.rows


def test_a_resumed_run_knows_the_alarms_of_its_journal_and_what_they_compare_with(journal: Journal) -> None:
    chosen = recipe(NOTHING_ELSE)
    records = Records(journal, [], recalled_alarms(chosen, journal.directory))
    for step in range(1, 13):
        records.append(replace(row(step, 0.8 if step < 7 else 0.1), at=float(step)))
    (begun,) = read(journal.directory, AlarmRow)
    resumed = recalled_alarms(chosen, journal.directory)
    assert resumed.firing == (begun,)
    assert resumed.observe(row(13, 0.1)) == [], "it does not begin twice"
    found = [one for step in range(14, 20) for one in resumed.observe(row(step, 0.8))]
    assert [(one.kind, one.is_over) for one in found] == [("success_falls", True)]
