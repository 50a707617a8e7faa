"""Every page of a run that has ended, without Redis: it loads without a complaint, fits its window, and can be read by everybody."""

import pytest
from playwright.async_api import expect

from tests.infra.web.browser.reader import Reader, accessibility_findings, too_wide_by_px
from tests.infra.web.browser.shown_runs import FINISHED, OTHER

pytestmark = pytest.mark.asyncio(loop_scope="session")

FIRST = f"{FINISHED}-1-0"
PAGES = {
    "runs": ("#/", "Runs", "finished all 6 steps"),
    "run": (f"#/run/{FINISHED}", FINISHED, "entropy fell below 0.1"),
    "runs laid over one another": (f"#/run/{FINISHED}?with={OTHER}", FINISHED, OTHER),
    "step": (f"#/step/{FINISHED}/1", "Step 1", "The last one to arrive was"),
    "step without tokens": (f"#/step/{FINISHED}/2", "Step 2", "where the recipe has rollouts.tokens"),
    "fleet": (f"#/fleet/{FINISHED}", "Fleet", "does not answer"),
    "rollouts": (f"#/rollouts/{FINISHED}", "Rollouts", "26 of 26 rollouts"),
    "rollout": (f"#/rollout/{FINISHED}/{FIRST}", "demo:calc-8", "cat calc.py"),
    "a megabyte in one line": (
        f"#/rollout/{FINISHED}/{FINISHED}-tiring",
        "demo:calc-8",
        "characters between",
    ),
    "comparison": (
        f"#/compare/{FINISHED}?left={FIRST}&right={FINISHED}-1-1",
        "demo:calc-8",
        "ran the same commands",
    ),
    "tasks": (f"#/tasks/{FINISHED}", "Tasks", "its reference fails"),
    "who gets trained": (f"#/trained/{FINISHED}", "Who gets trained", "Of 25 training rollouts"),
    "where": (f"#/where/{FINISHED}", "Where the time went", "75 %"),
    "recipe": (f"#/recipe/{FINISHED}?with={OTHER}", "Recipe and logs", "num_steps = 6"),
    "no such page": ("#/nothing", "No such page", "Choose a run"),
}


@pytest.mark.slow_but_for("run")
@pytest.mark.parametrize(("place", "title", "says"), PAGES.values(), ids=PAGES)
async def test_a_page_of_a_finished_run_is_shown_whole_in_every_window(
    reader: Reader, finished_url: str, place: str, title: str, says: str
) -> None:
    await reader.look(width=1280, scheme="light")
    await reader.open(finished_url + place)
    assert await reader.title() == title
    assert says in await reader.text()
    assert await too_wide_by_px(reader.page) <= 0
    assert await accessibility_findings(reader.page) == []
    await reader.look(width=390, scheme="dark")
    assert await too_wide_by_px(reader.page) <= 0
    assert await accessibility_findings(reader.page) == []


async def test_texts_of_a_rollout_are_shown_as_text(reader: Reader, finished_url: str) -> None:
    await reader.open(f"{finished_url}#/rollout/{FINISHED}/{FIRST}")
    text = await reader.text()
    assert "</script><img src=x onerror=alert(1)>␛[2J\\u202egnp.exe␀" in text
    assert await reader.page.locator("main img, main script").count() == 0


@pytest.mark.slow
async def test_a_rollout_shows_where_its_time_went_and_how_its_task_went_before(
    reader: Reader, finished_url: str
) -> None:
    await reader.open(f"{finished_url}#/rollout/{FINISHED}/{FIRST}")
    figure = reader.page.locator("figure.lifeline")
    legend = await figure.locator(".legend li").all_inner_texts()
    assert "in the queue 1 min 40 s" in legend
    assert "played 6 min 40 s" in legend
    assert "generating 400 ms" in legend
    versions = reader.page.locator(".versions")
    assert "Version 3, 44 % of 9" in await versions.inner_text()
    await versions.get_by_role("link", name=f"Rollout {FINISHED}-4-1, reward 1").click()
    await expect(reader.page.locator(".facts").first).to_contain_text(f"{FINISHED}-4-1")


@pytest.mark.slow
async def test_a_long_text_is_shown_to_its_end_when_the_reader_wants_it(
    reader: Reader, finished_url: str
) -> None:
    await reader.open(f"{finished_url}#/rollout/{FINISHED}/{FINISHED}-tiring")
    shown = reader.page.locator("pre", has=reader.page.get_by_role("button", name="characters between"))
    assert len(await shown.inner_text()) < 10_000
    await reader.page.get_by_role("button", name="characters between").first.click()
    longest = "Math.max(...[...document.querySelectorAll('pre')].map((box) => box.textContent.length))"
    assert await reader.page.evaluate(longest) == 2**20
    assert await too_wide_by_px(reader.page) <= 0
