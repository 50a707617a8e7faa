"""A rollout of many turns is read in parts, and what a reader looks for in it is found."""

import pytest
from playwright.async_api import expect

from tests.infra.web.browser.reader import Reader
from tests.infra.web.browser.shown_runs import FINISHED

pytestmark = pytest.mark.asyncio(loop_scope="session")
LONG = f"#/rollout/{FINISHED}/{FINISHED}-long"


@pytest.mark.slow
async def test_the_first_failed_command_and_the_submission_are_a_click_away(
    reader: Reader, finished_url: str
) -> None:
    await reader.open(finished_url + LONG)
    turns = reader.page.locator("li.turn")
    await expect(turns).to_have_count(50)
    await reader.page.get_by_role("button", name="First failed command, turn 71").click()
    await expect(turns.first).to_contain_text("Turn 51")
    await expect(reader.page.locator("#turn-70")).to_be_in_viewport()
    await expect(reader.page.locator("#turn-70")).to_contain_text("1 failed")
    await reader.page.get_by_role("button", name="Submission, turn 120").click()
    await expect(turns).to_have_count(20)
    await expect(reader.page.locator("#turn-119")).to_be_in_viewport()


@pytest.mark.slow
async def test_a_turn_has_an_address_of_its_own(reader: Reader, finished_url: str) -> None:
    await reader.open(finished_url + LONG)
    await reader.page.get_by_label("Turn", exact=True).fill("60")
    await reader.page.keyboard.press("Enter")
    await expect(reader.page.locator("#turn-59")).to_be_in_viewport()
    assert reader.page.url.endswith("?turn=60")
    await reader.open(reader.page.url)
    await expect(reader.page.locator("#turn-59")).to_be_in_viewport()


@pytest.mark.slow
async def test_a_text_is_found_in_turns_that_are_not_shown(reader: Reader, finished_url: str) -> None:
    await reader.open(finished_url + LONG)
    await reader.page.get_by_label("Find in the turns").fill("step 11")
    status = reader.page.locator("form [role=status]")
    await expect(status).to_contain_text("in 11 turns: 11 110 111")
    await status.get_by_role("button", name="119").click()
    await expect(reader.page.locator("#turn-118")).to_be_in_viewport()


@pytest.mark.slow
async def test_turns_are_drawn_on_the_clock_of_the_worker(reader: Reader, finished_url: str) -> None:
    await reader.open(finished_url + LONG)
    await reader.page.get_by_text("120 turns on the clock").click()
    rows = reader.page.get_by_role("table", name="Turns on the clock").locator("tbody tr")
    await expect(rows).to_have_count(120)
    await expect(rows.nth(70)).to_contain_text("failed")


@pytest.mark.slow
async def test_from_the_table_the_next_rollout_is_a_click_away(reader: Reader, finished_url: str) -> None:
    await reader.open(f"{finished_url}#/rollouts/{FINISHED}?group={FINISHED}-g1&sort=member")
    await reader.page.locator("tbody a").first.click()
    await expect(reader.page.locator("main")).to_contain_text(f"{FINISHED}-1-0")
    await reader.page.get_by_text("In the table:").get_by_role("link", name="next").click()
    await expect(reader.page.locator(".facts").first).to_contain_text(f"{FINISHED}-1-1")
