"""The pages of a run as one file: opened from the disk, without a server."""

import asyncio
import sys
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.infra.web.browser import shown_runs
from tests.infra.web.browser.reader import Reader, too_wide_by_px
from tests.infra.web.browser.shown_runs import FINISHED, MEMBERS
from tests.infra.web.example_run import NO_REDIS

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.slow
async def test_an_exported_run_is_read_and_filtered_from_its_file(reader: Reader, tmp_path: Path) -> None:
    shown_runs.write_finished_run(tmp_path / "run")
    words = ["--run-dir", str(tmp_path / "run"), "--export", str(tmp_path / "page"), "--redis", NO_REDIS]
    export = await asyncio.create_subprocess_exec(sys.executable, "-m", "infra.web", *words)
    assert await export.wait() == 0
    page = (tmp_path / "page" / "index.html").as_uri()
    await reader.open(f"{page}#/rollouts/{FINISHED}?tokens=1-3&version=3&lag=1-")
    main = reader.page.locator("main")
    await expect(main).to_contain_text("24 of 26 rollouts")
    await reader.page.get_by_role("textbox", name="Sampled tokens").fill("4-")
    await expect(main).to_contain_text("0 of 26 rollouts")
    await reader.open(f"{page}#/rollouts/{FINISHED}?step=1&worker=host*")
    await expect(main).to_contain_text(f"{MEMBERS} of 26 rollouts")
    await reader.page.get_by_role("textbox", name="Step").fill("")
    await reader.page.get_by_role("textbox", name="Engine").fill("ONE:")
    await expect(main).to_contain_text("1 of 26 rollouts")
    await reader.open(f"{page}#/step/{FINISHED}/1")
    await expect(main).to_contain_text("All of its numbers")
    await reader.open(f"{page}#/rollout/{FINISHED}/{FINISHED}-1-0")
    await expect(main.locator("figure.lifeline")).to_be_visible()
    assert await too_wide_by_px(reader.page) <= 0
