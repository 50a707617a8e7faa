"""A whole run beside an engine that accepts new weights and never answers: every step is taken while it hangs."""

from pathlib import Path

import pytest
from redis.asyncio import Redis

from benchmarks.scripted_fleet import fleet
from pipeline.journal.reading import read
from pipeline.journal.rows import DeliveryRow
from tests.conftest import Serving
from tests.trainer.processes import recipe as recipe
from tests.trainer.processes import sets, start, steps
from tests.trainer.weights.run_of_weights import CONTROL_S, eventually_routed, fake_engine
from trainer.report.summary import summarize
from trainer.weights.engines import Engines

FOREVER = "weights.engine_deadline_s=3600.0"  # beyond the time limit of any test, so whoever waited for the engine would fail it


@pytest.mark.slow
async def test_an_engine_that_never_answers_delays_no_step_of_a_run(
    recipe: Path, serving: Serving, redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERVE_ROUTER_URL", serving.router_url)
    run = recipe.parent / "run"
    wishes = sets("weights.engines=router", FOREVER, "admission.max_lag_versions=0")
    async with Engines(serving.router_url, control_s=CONTROL_S) as engines, fake_engine(engines) as hanging:
        hanging.answers.clear()
        async with fleet(redis_url):
            trainer = await start(redis_url, recipe, "--run-dir", run, "--run-id", "hangs", *wishes)
            assert await trainer.ended() == 0, trainer.output
        assert hanging.asked == ["hangs@0"], "it still hangs in the first version"
        assert [row.step for row in steps(run)] == [1, 2, 3, 4]
        deliveries = list(read(run / "journal", DeliveryRow))
        assert [row.version for row in deliveries][-1] == 4
        assert {row.engines for row in deliveries} == {(serving.engine_url,)}
        assert {row.quarantined for row in deliveries} == {(hanging.url,)}
        await eventually_routed(engines, {serving.engine_url})
    report = summarize(run)
    assert (report.lost, report.trained_twice, report.open) == (0, 0, 0)
