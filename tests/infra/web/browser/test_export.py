"""An exported run, opened from a file: its pages work without a server, and none breaks the file's own policy."""

import subprocess
import sys

import pytest
from playwright.async_api import expect

from tests.infra.web.browser import shown_runs
from tests.infra.web.browser.reader import Reader, accessibility_findings, too_wide_by_px
from tests.infra.web.browser.shown_runs import FINISHED
from tests.infra.web.example_run import NO_REDIS

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="module")
def exported_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("exported")
    shown_runs.write_finished_run(directory / "run")
    words = ["-m", "infra.web", "--run-dir", str(directory / "run"), "--redis", NO_REDIS]
    subprocess.run([sys.executable, *words, "--export", str(directory / "out")], check=True)
    return (directory / "out" / "index.html").as_uri()


@pytest.mark.slow
async def test_every_page_of_an_exported_file_opens_without_a_server(
    reader: Reader, exported_url: str
) -> None:
    await reader.open(exported_url)
    assert reader.page.url == f"{exported_url}#/run/{FINISHED}"
    await expect(reader.page.get_by_text("Exported 2")).to_be_visible()
    for place, text in (
        ("/", FINISHED),
        (f"/run/{FINISHED}", "Entropy"),
        (f"/fleet/{FINISHED}", "an exported file holds nothing of it"),
        (f"/rollouts/{FINISHED}", "26 of 26 rollouts"),
        (f"/rollout/{FINISHED}/{FINISHED}-1-0", "Conversation"),
        (f"/tasks/{FINISHED}", "django"),
        (f"/trained/{FINISHED}", "django"),
        (f"/where/{FINISHED}", "waiting for groups"),
        (f"/recipe/{FINISHED}", "num_steps = 6"),
    ):
        await reader.open(f"{exported_url}#{place}")
        assert text in await reader.page.inner_text("body"), place
    await reader.look(width=390, scheme="dark")
    assert await too_wide_by_px(reader.page) == 0
    assert await accessibility_findings(reader.page) == []


@pytest.mark.slow
async def test_the_table_of_an_exported_file_filters_and_sorts_as_the_servers(
    reader: Reader, exported_url: str
) -> None:
    await reader.open(f"{exported_url}#/rollouts/{FINISHED}")
    main = reader.page.locator("main")
    await reader.page.get_by_role("textbox", name="Task").fill("*django*")
    await reader.page.get_by_role("textbox", name="Reward").fill("1")
    await expect(main).to_contain_text("4 of 26 rollouts")
    await reader.page.get_by_role("button", name="Sort by Turns").click()
    await expect(reader.page.locator("tbody tr")).to_have_count(4)
    await reader.page.get_by_role("textbox", name="Text in it").fill("no rollout says this")
    await expect(main).to_contain_text("0 of 26 rollouts")
