"""From a curve to its cause: the page of a step, and the controls of the curves."""

from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.infra.web.browser.reader import Reader
from tests.infra.web.browser.shown_runs import FINISHED

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.slow
async def test_three_clicks_lead_from_a_curve_to_the_command_of_a_rollout_that_failed(
    reader: Reader, finished_url: str
) -> None:
    await reader.look(width=1280, scheme="light")
    await reader.open(f"{finished_url}#/run/{FINISHED}")
    curve = reader.page.get_by_role("img", name="Training reward")
    box = await curve.bounding_box()
    assert box is not None
    await curve.click(position={"x": box["width"] - 14, "y": 60})
    await expect(reader.page.locator("h1")).to_have_text("Step 6")
    await expect(reader.page.locator("main")).to_contain_text("The last one to arrive was")
    await reader.page.locator("a.lane", has_text="✗").first.click()
    await reader.page.get_by_role("button", name="First failed command").click()
    await expect(reader.page.get_by_text("make test").first).to_be_in_viewport()


@pytest.mark.slow
async def test_a_step_opens_from_the_keyboard_and_leads_to_its_neighbours(
    reader: Reader, finished_url: str
) -> None:
    await reader.open(f"{finished_url}#/run/{FINISHED}")
    await reader.page.get_by_role("img", name="Entropy").focus()
    await reader.page.keyboard.press("ArrowRight")
    await reader.page.keyboard.press("Enter")
    await expect(reader.page.locator("h1")).to_have_text("Step 1")
    await expect(reader.page.locator("tbody").first).to_contain_text("demo:calc-8")
    await reader.page.get_by_role("link", name="Step 2").first.click()
    await expect(reader.page.locator("h1")).to_have_text("Step 2")


@pytest.mark.slow
async def test_rollouts_of_a_step_are_ordered_as_the_address_says(reader: Reader, finished_url: str) -> None:
    await reader.open(f"{finished_url}#/step/{FINISHED}/1")
    await reader.page.get_by_label("Ordered by").select_option("reward")
    rewards = reader.page.locator(".lanes a.lane .badge")
    assert await rewards.all_inner_texts() == ["1", "1", "0", "0"]
    await reader.open(reader.page.url)
    assert await rewards.all_inner_texts() == ["1", "1", "0", "0"]


@pytest.mark.slow
async def test_a_part_of_a_curve_is_enlarged_in_all_charts_by_drawing_across_one(
    reader: Reader, finished_url: str
) -> None:
    await reader.look(width=1280, scheme="light")
    await reader.open(f"{finished_url}#/run/{FINISHED}")
    curve = reader.page.get_by_role("img", name="Training reward")
    box = await curve.bounding_box()
    assert box is not None
    middle, bottom = box["x"] + box["width"] / 2, box["y"] + 80
    await reader.page.mouse.move(middle, bottom)
    await reader.page.mouse.down()
    await reader.page.mouse.move(box["x"] + box["width"] - 20, bottom, steps=4)
    await reader.page.mouse.up()
    from_box = reader.page.get_by_label("From")
    assert 3 < float(await from_box.input_value()) < 5
    entropy = reader.page.get_by_role("img", name="Entropy").locator("polyline")
    assert len((await entropy.get_attribute("points") or "").split()) < 6
    await reader.page.get_by_role("button", name="Show all").click()
    assert await from_box.input_value() == ""
    assert len((await entropy.get_attribute("points") or "").split()) == 6


@pytest.mark.slow
async def test_curves_are_smoothed_searched_and_saved_as_the_reader_wants(
    reader: Reader, finished_url: str, tmp_path: Path
) -> None:
    await reader.open(f"{finished_url}#/run/{FINISHED}?smooth=0.8&axis=time&log=1")
    reward = reader.page.get_by_role("img", name="Entropy")
    await expect(reward.locator("polyline")).to_have_count(2)
    await expect(reward).to_contain_text("time")
    await reader.page.get_by_label("Find a number").fill("checkpoint s")
    await expect(reader.page.locator(".charts figure")).to_have_count(0)
    await expect(reader.page.locator("main")).to_contain_text("No number has checkpoint s")
    await reader.page.get_by_label("Find a number").fill("entropy")
    await expect(reader.page.locator(".charts figure")).to_have_count(1)
    async with reader.page.expect_download() as saved:
        await reader.page.get_by_role("button", name="Save the steps as CSV").click()
    await (await saved.value).save_as(tmp_path / "steps.csv")
    lines = (tmp_path / "steps.csv").read_text().splitlines()
    assert len(lines) == 7
    assert lines[0].startswith("step,")


@pytest.mark.slow
async def test_a_table_is_saved_with_texts_that_no_spreadsheet_calculates(
    reader: Reader, finished_url: str, tmp_path: Path
) -> None:
    await reader.open(f"{finished_url}#/rollouts/{FINISHED}")
    await reader.page.evaluate("document.querySelector('tbody td').textContent = '=1+1'")
    async with reader.page.expect_download() as saved:
        await reader.page.get_by_role("button", name="Save as CSV: Rollouts").click()
    await (await saved.value).save_as(tmp_path / "rollouts.csv")
    lines = (tmp_path / "rollouts.csv").read_text().splitlines()
    assert lines[1].startswith('"\'=1+1","')
    assert len(lines) == 27


@pytest.mark.slow
async def test_what_happened_is_listed_by_kind_with_a_way_to_the_step(
    reader: Reader, finished_url: str
) -> None:
    await reader.open(f"{finished_url}#/run/{FINISHED}")
    await reader.page.get_by_label("Kind").select_option("alarm")
    rows = reader.page.locator("section", has_text="What happened").locator("tbody tr")
    await expect(rows).to_have_count(1)
    await rows.get_by_role("link", name="5").click()
    await expect(reader.page.locator("h1")).to_have_text("Step 5")
