"""From a curve to its cause: the page of a step, and the controls of the curves."""

import re
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.infra.web.browser.conftest import pages_of
from tests.infra.web.browser.reader import Reader
from tests.infra.web.browser.shown_runs import FINISHED, begin_run
from tests.infra.web.example_run import NO_REDIS, append, step

pytestmark = pytest.mark.asyncio(loop_scope="session")

PEAK = re.compile(r",1\d\d\.\d [\d.]+,10\.0 [\d.]+,1\d\d\.\d")  # one point at the top between two far below


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
async def test_a_curve_of_thousands_of_steps_has_as_many_points_as_can_be_seen_and_keeps_a_single_peak(
    reader: Reader, tmp_path: Path
) -> None:
    begin_run(tmp_path, "long")
    rows = (step(number, []) | {"entropy": 100.0 if number == 2718 else 0.4} for number in range(1, 5001))
    append(tmp_path, "steps", *rows)
    async with pages_of(tmp_path, NO_REDIS) as url:
        await reader.open(f"{url}#/run/long?match=entropy")
        curve = reader.page.get_by_role("img", name="Entropy").locator("polyline")
        await expect(curve).to_have_attribute("points", PEAK)
        heights = [one.split(",")[1] for one in (await curve.get_attribute("points") or "").split()]
        width = await reader.page.evaluate("document.querySelector('.chart svg').clientWidth")
        assert width / 2 < len(heights) < 2 * width
        assert len(set(heights)) == 2
        await reader.leave()


@pytest.mark.slow
async def test_charts_below_what_is_seen_are_drawn_when_they_come_near_and_when_the_page_is_printed(
    reader: Reader, finished_url: str
) -> None:
    await reader.look(width=390, scheme="light")
    await reader.open(f"{finished_url}#/run/{FINISHED}")
    charts = reader.page.locator("figure.chart svg")
    empty = reader.page.locator("figure.chart svg:empty")
    num_undrawn = await empty.count()
    assert 0 < num_undrawn < await charts.count()
    await reader.page.emulate_media(media="print")
    await reader.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    await expect(empty).to_have_count(0)
    await reader.open(f"{finished_url}#/run/{FINISHED}")
    await charts.last.scroll_into_view_if_needed()
    await expect(charts.last.locator("text").first).to_be_attached()
    assert 0 < await empty.count() < num_undrawn


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
