"""A run that goes on: what its trainer writes and beats appears on pages that are open."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from arq.connections import ArqRedis
from msgspec.structs import replace
from playwright.async_api import expect

from infra.redis_server import own_redis
from pipeline import census, queue
from pipeline.connection import connect
from pipeline.request import Claim
from tests.infra.web.browser import shown_runs
from tests.infra.web.browser.conftest import pages_of
from tests.infra.web.browser.reader import Reader, accessibility_findings, too_wide_by_px
from tests.infra.web.example_run import NO_REDIS, append, finished, settled, store
from tests.pipeline import samples
from tests.pipeline.cli.situations import dead_lettered, worker_lives

pytestmark = pytest.mark.asyncio(loop_scope="session")

RUN = "live-run"


@pytest.mark.slow
async def test_steps_and_rollouts_appear_while_the_page_is_open(reader: Reader, tmp_path: Path) -> None:
    run_dir = tmp_path / "live"
    shown_runs.begin_run(run_dir, RUN)
    rollouts = [finished(f"{RUN}-{member}", reward=float(member), run_id=RUN) for member in range(2)]
    async with pages_of(tmp_path, NO_REDIS) as url:
        await reader.open(f"{url}#/run/{RUN}")
        await expect(reader.page.locator("#connection")).to_have_text("live")
        shown_runs.write_step(run_dir, 1, rollouts)
        step = reader.page.locator(".facts div", has=reader.page.get_by_text("Step", exact=True))
        await expect(step).to_contain_text("1 of 6")
        shown_runs.write_step(run_dir, 2, rollouts)
        await expect(step).to_contain_text("2 of 6")
        await reader.open(f"{url}#/rollouts/{RUN}")
        store(run_dir, *rollouts)
        await expect(reader.page.locator("main")).to_contain_text("2 of 2 rollouts")
        append(run_dir, "episodes", *(settled(one, "zero_variance") for one in rollouts))
        await expect(reader.page.locator("tbody")).to_contain_text("zero_variance")
        await reader.leave()


@pytest.mark.slow
async def test_a_page_that_is_drawn_again_keeps_the_keyboards_place(reader: Reader, tmp_path: Path) -> None:
    run_dir = tmp_path / "live"
    shown_runs.begin_run(run_dir, RUN)
    rollouts = [finished(f"{RUN}-{member}", reward=float(member), run_id=RUN) for member in range(2)]
    store(run_dir, *rollouts)
    async with pages_of(tmp_path, NO_REDIS) as url:
        await reader.open(f"{url}#/rollouts/{RUN}")
        await expect(reader.page.locator("#connection")).to_have_text("live")
        link = reader.page.locator("tbody a").nth(2)
        await link.focus()
        append(run_dir, "episodes", *(settled(one, "zero_variance") for one in rollouts))
        await expect(reader.page.locator("tbody")).to_contain_text("zero_variance")
        # At once, and by one call: it was so when the text came.
        is_focused = "document.querySelectorAll('tbody a')[2] === document.activeElement"
        assert await reader.page.evaluate(is_focused)
        await reader.leave()


@pytest.mark.slow
async def test_what_a_reader_has_unfolded_and_scrolled_survives_an_update(
    reader: Reader, tmp_path: Path
) -> None:
    run_dir, page = tmp_path / "live", reader.page
    shown_runs.begin_run(run_dir, RUN)
    rollouts = [finished(f"{RUN}-{member}", reward=float(member), run_id=RUN) for member in range(2)]
    shown_runs.write_step(run_dir, 1, rollouts)
    store(run_dir, *rollouts)
    async with pages_of(tmp_path, NO_REDIS) as url:
        await reader.look(width=390, scheme="light")
        await reader.open(f"{url}#/run/{RUN}")
        await expect(page.locator("#connection")).to_have_text("live")
        await page.locator("details.more summary").click()
        shown_runs.write_step(run_dir, 2, rollouts)
        step = page.locator(".facts div", has=page.get_by_text("Step", exact=True))
        await expect(step).to_contain_text("2 of 6")
        assert await page.locator("details.more").evaluate("(one) => one.open")
        await reader.open(f"{url}#/rollouts/{RUN}")
        await expect(page.locator("#connection")).to_have_text("live")
        await page.locator(".scroll").evaluate("(one) => one.scrollTo(40, 0)")
        append(run_dir, "episodes", *(settled(one, "zero_variance") for one in rollouts))
        await expect(page.locator("tbody")).to_contain_text("zero_variance")
        assert await page.locator(".scroll").evaluate("(one) => one.scrollLeft") == 40
        await reader.leave()


@pytest.mark.slow
async def test_text_that_is_selected_stays_selected_and_the_page_says_that_it_waits(
    reader: Reader, tmp_path: Path
) -> None:
    run_dir, page = tmp_path / "live", reader.page
    shown_runs.begin_run(run_dir, RUN)
    shown_runs.write_step(run_dir, 1, [])
    selected = "window.getSelection().toString()"
    async with pages_of(tmp_path, NO_REDIS) as url:
        await reader.open(f"{url}#/run/{RUN}")
        await expect(page.locator("#connection")).to_have_text("live")
        await page.locator("h1").evaluate("(one) => window.getSelection().selectAllChildren(one)")
        shown_runs.write_step(run_dir, 2, [])
        await expect(page.locator("#connection")).to_have_text("not updated while text is selected")
        assert await page.evaluate(selected) == await reader.title()
        await page.evaluate("window.getSelection().removeAllRanges()")
        step = page.locator(".facts div", has=page.get_by_text("Step", exact=True))
        await expect(step).to_contain_text("2 of 6")
        await expect(page.locator("#connection")).to_have_text("live")
        await reader.leave()


@pytest.mark.slow
async def test_the_fleet_is_followed_until_redis_is_gone_and_the_stored_part_can_still_be_read(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "LEASE_S", 3600.0)  # also if the machine is slow with a renewal
    shown_runs.write_finished_run(tmp_path / "live", RUN)
    with own_redis() as redis_url:
        async with pages_of(tmp_path, redis_url) as url, await connect(redis_url) as redis:
            await census.beat_run(redis, _waiting_trainer(step=3))
            await reader.open(f"{url}#/fleet/{RUN}")
            main = reader.page.locator("main")
            await expect(main).to_contain_text("3 of 6")
            await expect(main).to_contain_text("There are no workers.")
            async with _playing(redis) as request_id:
                await expect(main).to_contain_text("4 of 6")
                await expect(main).to_contain_text("admission is closed: 2 versions ahead")
                await expect(main.get_by_role("link", name=request_id, exact=True)).to_be_visible()
                slots = reader.page.locator(".slots li")
                await expect(slots).to_have_count(4)
                await expect(
                    slots.get_by_role("link", name=f"{request_id}: agent, turn 2 of 20")
                ).to_be_visible()
                await expect(main).to_contain_text("the daemon does not answer")
                assert await accessibility_findings(reader.page) == []
                await reader.look(width=390, scheme="dark")
                assert await too_wide_by_px(reader.page) <= 0
                assert await accessibility_findings(reader.page) == []
            await redis.shutdown(nosave=True)
            await expect(main).to_contain_text("does not answer")
            await reader.open(f"{url}#/run/{RUN}")
            await expect(reader.page.get_by_role("img", name="Entropy")).to_be_visible()
            await reader.leave()


@pytest.mark.slow
async def test_runs_and_run_say_what_is_unwell_and_without_redis_that_nobody_knows(
    reader: Reader, tmp_path: Path, heartbeats_last: None
) -> None:
    write_long_run(tmp_path / "live")
    await reader.look(width=390, scheme="light")
    with own_redis() as redis_url:
        async with pages_of(tmp_path, redis_url) as url, await connect(redis_url) as redis:
            await census.beat_run(
                redis, replace(_waiting_trainer(step=3), alarms=("gap_grows since step 7",))
            )
            await worker_lives(redis, paused="docker is out")
            await dead_lettered(redis, run_id=RUN)
            main = reader.page.locator("main")
            for page in ("#/", f"#/run/{RUN}"):
                await reader.open(f"{url}{page}")
                await expect(main).to_contain_text(f"run {RUN} has 1 dead request")
                await expect(main).to_contain_text(f"run {RUN}, alarm gap_grows since step 7")
                await expect(main).to_contain_text("rollout worker host/1 is paused: docker is out")
                await expect(main.locator(".badge", has_text="unwell")).to_be_visible()
                assert await accessibility_findings(reader.page) == []
            await expect(main.get_by_role("link", name="1, listed there")).to_be_visible()
            kinds = (
                await main.locator("section", has_text="What happened")
                .locator("tbody .badge")
                .all_inner_texts()
            )
            assert kinds[:2] == ["alarm", "quarantined"]
            assert set(kinds[2:]) == {"published"}
            await expect(main).to_contain_text("250 older ones are not listed")
            assert await main.locator("figure.chart").first.locator("line.mark.published").count() < 300
            await redis.shutdown(nosave=True)
            for page in ("#/", f"#/run/{RUN}"):
                await reader.open(f"{url}{page}")
                await expect(main).to_contain_text("does not answer")
                await expect(main.locator(".badge", has_text="not known")).to_be_visible()
                await expect(main).not_to_contain_text("no trainer")
            await reader.leave()


def write_long_run(directory: Path) -> None:
    """A run of 300 steps that goes on, with an alarm and a task in quarantine long ago, and a publication at every step."""
    shown_runs.begin_run(directory, RUN)
    for number in range(1, 301):
        shown_runs.write_step(directory, number, [])
        append(
            directory,
            "publications",
            {"version": number, "step": number, "num_bytes": 1, "at": 1000.0 + number},
        )
    append(directory, "alarms", {"step": 9, "kind": "entropy", "text": "it fell", "at": 1009.0})
    append(directory, "quarantines", {"task_id": "t", "reason": "r", "request_id": "r", "at": 1010.0})


@asynccontextmanager
async def _playing(redis: ArqRedis) -> AsyncIterator[str]:
    """A trainer and a worker that live; the worker plays a request, whose id is yielded."""
    request = samples.request(run_id=RUN)
    await queue.enqueue(redis, request)
    claim = await queue.claim(redis, request.id, "host/1")
    assert isinstance(claim, Claim)

    async def live() -> None:
        lease = queue.Lease(
            worker="host/1", attempt=1, claimed_at=claim.claimed_at, phase="agent", turn=2, max_turns=20
        )
        while True:
            await queue.renew(redis, claim, lease)
            await census.beat_worker(redis, _worker(running=(request.id,)))
            await census.beat_run(redis, _waiting_trainer(step=4))
            await asyncio.sleep(0.5)

    life = asyncio.create_task(live())
    try:
        yield request.id
    finally:
        life.cancel()
        with suppress(asyncio.CancelledError):
            await life


def _waiting_trainer(*, step: int) -> census.RunStatus:
    phase, admission = "waiting for trajectories", "admission is closed: 2 versions ahead"
    return census.RunStatus(
        run_id=RUN, phase=phase, step=step, num_steps=6, admission=admission, updated_at=time.time()
    )


def _worker(*, running: tuple[str, ...]) -> census.WorkerStatus:
    """It has two Docker hosts, one of which is out."""
    counts = {"slots": 4, "finished": 0, "failed": 0}
    hosts = (
        census.HostStatus(name="tcp://one:2375", slots=2, running=1),
        census.HostStatus(name="tcp://two:2375", slots=2, running=0, out="the daemon does not answer"),
    )
    now = time.time()
    return census.WorkerStatus(
        **counts, name="host/1", running=running, started_at=now, updated_at=now, hosts=hosts
    )
