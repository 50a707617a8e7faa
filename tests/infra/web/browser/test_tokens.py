"""The tokens of a rollout as colours: by what engine and learner thought of them, and by what a step did with them."""

import pytest
from playwright.async_api import Page, expect

from tests.infra.web.browser.reader import Reader, accessibility_findings, too_wide_by_px
from tests.infra.web.browser.shown_runs import FINISHED

pytestmark = pytest.mark.asyncio(loop_scope="session")

CLASSES = "(box) => [...box.querySelectorAll('.token-text > span')].map((one) => [...one.classList])"


async def colours(page: Page) -> list[str]:
    """Of each token, its classes but that of the weight version."""
    found: list[list[str]] = await page.locator("details.tokens").first.evaluate(CLASSES)
    return [" ".join(name for name in names if not name.startswith("band")) for names in found]


async def opened(reader: Reader, url: str, name: str) -> None:
    await reader.open(f"{url}#/rollout/{FINISHED}/{FINISHED}-{name}")
    await reader.page.locator("details.tokens > summary").first.click()
    await expect(reader.page.locator(".token-text")).to_be_visible()


@pytest.mark.slow
async def test_tokens_are_coloured_by_what_the_reader_chooses(reader: Reader, finished_url: str) -> None:
    await opened(reader, finished_url, "1-0")
    assert "1 without a gradient" in await reader.page.locator("details.tokens > summary").inner_text()
    # Probabilities 0.61, 0.78, 0.37 of the engine, and 0.61, 0.47, 0.05 of the learner.
    assert await colours(reader.page) == ["rare4", "rare4 off", "rare3"]
    select = reader.page.get_by_label("Colour by")
    await select.select_option("learner")
    assert await colours(reader.page) == ["rare4", "rare3 off", "rare1"]
    await select.select_option("difference")
    assert await colours(reader.page) == ["", "less2 off", "less3"]
    await select.select_option("advantage")
    assert await colours(reader.page) == ["more3", "more3 off", "more3"]
    titles = reader.page.locator(".token-text > span")
    await expect(titles.nth(1)).to_have_attribute(
        "title",
        r"id 6 · log-prob -0.25 · probability 0.7788 · version 3 · "
        "learner's log-prob -0.75 · difference -0.5 · advantage 0.5 · weight 0.5 · no gradient: masked or clipped",
    )


@pytest.mark.slow
async def test_tokens_that_no_step_trained_are_pale(reader: Reader, finished_url: str) -> None:
    await opened(reader, finished_url, "tiring")
    assert await colours(reader.page) == ["rare4 pale", "rare4 pale", "rare3 pale"]
    await expect(reader.page.locator(".legend-line")).to_contain_text("Pale: not trained")
    await expect(reader.page.get_by_label("Colour by")).to_have_count(0)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_opened_tokens_fit_a_phone_and_can_be_read_by_everybody(
    reader: Reader, finished_url: str, scheme: str
) -> None:
    await reader.look(width=390, scheme="dark" if scheme == "dark" else "light")
    await opened(reader, finished_url, "1-0")
    for colour in ("engine", "difference", "advantage"):
        await reader.page.get_by_label("Colour by").select_option(colour)
        assert await too_wide_by_px(reader.page) <= 0
    assert await accessibility_findings(reader.page) == []
