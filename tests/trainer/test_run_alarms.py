"""The table [alarms]: what is refused, and a run that an alarm stops."""

import re
from pathlib import Path

import pytest
from redis.asyncio import Redis

from benchmarks.scripted_fleet import fleet
from pipeline import census
from pipeline.journal.reading import read
from pipeline.journal.rows import AlarmRow, EndRow
from tests.trainer.processes import recipe as recipe
from tests.trainer.processes import sets, start, steps
from tests.trainer.test_recipe import MINIMAL
from trainer.recipe import load_recipe
from trainer.report import __main__ as report

FULL = sets("alarms.disk_free_bytes=9000000000000000", 'alarms.stop_on=["disk_fills"]')
OFF = sets("alarms.disk_free_bytes=0")


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (("alarms.window_steps=1",), "alarms.window_steps is 1"),
        (("alarms.success_drop=1.5",), "alarms.success_drop is 1.5"),
        (("alarms.lag_share=-0.1",), "alarms.lag_share is -0.1"),
        (("alarms.gap_growth=0.5",), "alarms.gap_growth is 0.5; set it above 1, or to 0"),
        (("alarms.disk_free_bytes=-1",), "alarms.disk_free_bytes is -1"),
        (('alarms.stop_on=["lag_saturates"]',), "alarms.stop_on names lag_saturates, which is switched off"),
        (('alarms.stop_on=["rain"]',), 'alarms.stop_on is ["rain"]; it must be a list of "success_falls"'),
    ],
)
def test_alarms_that_make_no_sense_are_refused_by_field(
    tmp_path: Path, overrides: tuple[str, ...], complaint: str
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(MINIMAL)
    with pytest.raises(ValueError, match=re.escape(complaint)):
        load_recipe(path, overrides)


@pytest.mark.slow
async def test_an_alarm_stops_a_run_in_good_order_and_a_resume_without_it_finishes(
    recipe: Path, redis_url: str, redis: Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recipe.parent / "run"
    trainer = await start(redis_url, recipe, "--run-dir", run, "--run-id", "full", *FULL)
    assert await trainer.ended() == 0, trainer.output
    assert "ALARM: disk_fills: the file system of the run's directory has" in trainer.output
    (end,) = read(run / "journal", EndRow)
    assert end.reason == "stopped"
    assert end.detail.startswith("stopped at step 0 of 4 by an alarm, disk_fills: the file system of")
    status = await census.run_status(redis, "full")
    assert status is not None
    (alarm,) = status.alarms
    assert alarm.startswith("disk_fills since step 0: the file system of")
    assert [row.kind for row in read(run / "journal", AlarmRow)] == ["disk_fills"]
    report.main([str(run)])
    assert "step 0: ALARM: disk_fills" in capsys.readouterr().out
    async with fleet(redis_url):
        resumed = await start(redis_url, recipe, "--run-dir", run, "--resume", *OFF)
        assert await resumed.ended() == 0, resumed.output
    assert [row.step for row in steps(run)] == [1, 2, 3, 4]
