"""Dead letters on the fleet page: an action is asked about in a dialog, and carried out only after a yes."""

from pathlib import Path

import pytest
from playwright.async_api import expect

from infra.redis_server import own_redis
from pipeline import deadletters
from pipeline.connection import connect
from tests.infra.web.browser import shown_runs
from tests.infra.web.browser.conftest import pages_of
from tests.infra.web.browser.reader import Reader
from tests.pipeline import samples
from tests.pipeline.claims import queued_ids
from tests.pipeline.cli.situations import dead_lettered, trainer_lives

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.slow
async def test_a_dead_letter_is_requeued_only_after_the_reader_agreed(reader: Reader, tmp_path: Path) -> None:
    shown_runs.begin_run(tmp_path / "run", samples.RUN)
    log = tmp_path / "actions.jsonl"
    with own_redis() as redis_url:
        flags = ("--allow-actions", str(log))
        async with pages_of(tmp_path, redis_url, *flags) as url, await connect(redis_url) as redis:
            await trainer_lives(redis)
            request_id = await dead_lettered(redis)
            await reader.open(f"{url}#/fleet/{samples.RUN}")
            dialog = reader.page.get_by_role("dialog")
            requeue = reader.page.get_by_role("button", name="Requeue", exact=True)
            await requeue.click()
            await expect(dialog).to_contain_text(f"Requeue request {request_id} of run {samples.RUN}?")
            await expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
            await reader.page.keyboard.press("Escape")
            await expect(dialog).to_have_count(0)
            assert set(await deadletters.listed(redis, samples.RUN)) == {request_id}
            assert log.read_text() == ""
            await requeue.click()
            await dialog.get_by_role("button", name="Requeue").click()
            await expect(requeue).to_have_count(0)
            assert await queued_ids(redis) == {request_id}
            assert len(log.read_text().splitlines()) == 2
            await reader.leave()
