"""Somebody who reads the pages in a browser, and what is measured of a page that is shown."""

from pathlib import Path
from typing import Any, Literal

import axe_playwright_python
from playwright.async_api import ConsoleMessage, Page

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
SHOWN = "main:not([aria-busy]) > h1"
CONTROLS = "a[href], button:enabled, input:enabled, select:enabled, summary, [tabindex='0']"

# A name for each control that no other has, and that a chart keeps when it is drawn.
NAME = f"""(one) => [one.tagName, [...document.querySelectorAll("{CONTROLS}")].indexOf(one),
    (one.getAttribute('aria-label') ?? one.textContent).slice(0, 40)].join(' ')"""
FOCUSED = f"""() => {{
    const one = document.activeElement, look = getComputedStyle(one);
    if (one === document.body) return ['', 0];
    return [({NAME})(one), look.outlineStyle === 'none' ? 0 : parseFloat(look.outlineWidth)];
}}"""


class Reader:
    """One tab. `complaints` are errors, warnings and refusals that the browser wrote to its console."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    async def open(self, address: str) -> None:
        """Go to a page and wait until it is drawn. The page is loaded anew, not only its hash changed."""
        await self.leave()
        await self.page.goto(address)
        await self.page.wait_for_selector(SHOWN)

    async def leave(self) -> None:
        """Before a server ends: a page would complain that it is gone."""
        await self.page.goto("about:blank")

    async def look(self, *, width: int, scheme: Literal["light", "dark"]) -> None:
        """Change the window and the colours of the page that is open."""
        await self.page.set_viewport_size({"width": width, "height": 900})
        await self.page.emulate_media(color_scheme=scheme)

    async def title(self) -> str:
        return await self.page.inner_text(SHOWN)

    async def text(self) -> str:
        return await self.page.inner_text("main")

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


async def too_wide_by_px(page: Page) -> int:
    """How far the page is wider than its window. Tables may be wider: they scroll by themselves."""
    return await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


async def accessibility_findings(page: Page) -> list[str]:
    """What axe-core finds, minor things included."""
    # As the browser's debugger does it, so the Content-Security-Policy of the page stays as it is.
    await page.evaluate(AXE)
    found: dict[str, Any] = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{finding['id']}: {node['html'][:200]}"
        for finding in found["violations"]
        for node in finding["nodes"]
    ]


async def reached_by_tab(page: Page) -> list[str]:
    """The controls that Tab comes to, in its order, until it leaves the page. One without a visible focus is an AssertionError."""
    found: list[str] = []
    await page.evaluate("document.activeElement.blur()")
    while True:
        await page.keyboard.press("Tab")
        name, outline_px = await page.evaluate(FOCUSED)
        if not name or (found and name == found[0]):
            return found
        assert outline_px >= 1, f"nobody sees that {name} has the focus"
        found.append(name)


async def controls_of(page: Page) -> list[str]:
    """Everything that can be used, in the order of the document."""
    return await page.evaluate(
        f"[...document.querySelectorAll(`{CONTROLS}`)].filter((one) => one.checkVisibility()).map({NAME})"
    )
