"""What a reader does with the pages of a run: filters, addresses to send to others, comparisons, and all of it from the keyboard."""

import pytest
from playwright.async_api import expect

from tests.infra.web.browser.reader import Reader, controls_of, reached_by_tab
from tests.infra.web.browser.shown_runs import FINISHED, OTHER

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.slow
async def test_a_filter_narrows_the_table_and_is_part_of_the_address(
    reader: Reader, finished_url: str
) -> None:
    await reader.open(f"{finished_url}#/rollouts/{FINISHED}")
    await reader.page.get_by_role("textbox", name="Task").fill("django*")
    await reader.page.get_by_role("textbox", name="Reward").fill("1")
    await expect(reader.page.locator("main")).to_contain_text("0 of 26 rollouts")
    await reader.page.get_by_role("textbox", name="Task").fill("*django*")
    await expect(reader.page.locator("main")).to_contain_text("4 of 26 rollouts")
    assert await reader.page.locator("tbody tr").count() == 4
    address = reader.page.url
    await reader.open(address)
    assert "4 of 26 rollouts" in await reader.text()
    assert await reader.page.get_by_role("textbox", name="Task").input_value() == "*django*"


@pytest.mark.slow
async def test_a_mistake_in_a_filter_is_said_and_can_be_mended(reader: Reader, finished_url: str) -> None:
    await reader.open(f"{finished_url}#/rollouts/{FINISHED}")
    await reader.page.get_by_role("textbox", name="Version").fill("new")
    await expect(reader.page.locator("main")).to_contain_text("'new' is not a number")
    await reader.page.get_by_role("textbox", name="Version").fill("")
    await expect(reader.page.locator("main")).to_contain_text("26 of 26 rollouts")
    # The browser itself says that a request was refused.
    assert [text for text in reader.complaints if "400" not in text] == []
    reader.complaints.clear()


@pytest.mark.slow
async def test_a_column_sorts_one_way_and_then_the_other(reader: Reader, finished_url: str) -> None:
    await reader.open(f"{finished_url}#/rollouts/{FINISHED}")
    first = reader.page.locator("tbody tr").first
    sort = reader.page.get_by_role("button", name="Sort by Reward")
    await sort.click()
    await expect(sort).to_have_text("Reward ▾")
    await expect(first.locator(".badge")).to_have_text("1")
    await sort.click()
    await expect(sort).to_have_text("Reward ▴")
    await expect(first.locator(".badge")).to_have_text("0")


@pytest.mark.slow
async def test_two_of_a_group_are_read_side_by_side_and_the_way_back_is_the_browsers(
    reader: Reader, finished_url: str
) -> None:
    await reader.open(f"{finished_url}#/rollout/{FINISHED}/{FINISHED}-1-0")
    await reader.page.get_by_role("link", name="compare").first.click()
    await expect(reader.page.locator("main .pair > section")).to_have_count(2)
    await expect(reader.page.locator("main")).to_contain_text("Both ran the same commands in every turn.")
    await reader.page.go_back()
    await expect(reader.page.locator("main h2", has_text="Conversation")).to_be_visible()


@pytest.mark.slow
async def test_another_run_is_laid_over_and_stays_in_the_address(reader: Reader, finished_url: str) -> None:
    await reader.open(f"{finished_url}#/run/{FINISHED}")
    reward = reader.page.locator("figure", has_text="Training reward")
    assert await reward.locator("polyline").count() == 1
    await reader.page.get_by_label(OTHER).check()
    await expect(reward.locator("polyline")).to_have_count(2)
    await reader.open(reader.page.url)
    await expect(reader.page.get_by_label(OTHER)).to_be_checked()
    await expect(reward.locator("polyline")).to_have_count(2)


# Quick: a page can be used with the keyboard.
@pytest.mark.slow_but_for("#/fleet/finished-run")
@pytest.mark.parametrize(
    "place",
    [
        f"#/run/{FINISHED}",
        f"#/step/{FINISHED}/1",
        f"#/fleet/{FINISHED}",
        f"#/rollouts/{FINISHED}",
        f"#/rollout/{FINISHED}/{FINISHED}-1-0",
        f"#/compare/{FINISHED}?left={FINISHED}-1-0&right={FINISHED}-1-1",
        f"#/tasks/{FINISHED}",
        f"#/trained/{FINISHED}",
        f"#/where/{FINISHED}",
        f"#/recipe/{FINISHED}",
        "#/",
    ],
)
async def test_tab_reaches_everything_that_can_be_used_and_shows_where_it_is(
    reader: Reader, finished_url: str, place: str
) -> None:
    await reader.look(width=1280, scheme="light")
    await reader.open(finished_url + place)
    assert await reached_by_tab(reader.page) == await controls_of(reader.page)


@pytest.mark.slow
async def test_a_row_opens_with_enter_and_a_curve_is_read_with_the_arrow_keys(
    reader: Reader, finished_url: str
) -> None:
    await reader.open(f"{finished_url}#/rollouts/{FINISHED}?task=calc-8")
    await reader.page.locator("tbody a").first.focus()
    await reader.page.keyboard.press("Enter")
    await expect(reader.page.locator("main h2", has_text="Conversation")).to_be_visible()
    await reader.open(f"{finished_url}#/run/{FINISHED}")
    entropy = reader.page.get_by_role("img", name="Entropy")
    await entropy.focus()
    await reader.page.keyboard.press("ArrowRight")
    figure = reader.page.locator("figure", has=entropy)
    await expect(figure.locator("output")).to_contain_text("step 1 · 0.4")
