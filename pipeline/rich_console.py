"""A console of the package `rich` for our screens. Only its own control sequences reach the terminal, and none from printed texts."""

from collections.abc import Iterable
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from pipeline.screen import Screen, obeyed, visible


class VisibleConsole(Console):
    """A console with the arguments of `rich.console.Console`, after the stream."""

    def __init__(self, stream: TextIO, **settings: Any) -> None:
        file = cast(TextIO, _Marked(stream)) if isinstance(stream, Screen) else stream
        super().__init__(file=file, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Makes all text visible: the text of every renderable passes through here, apart from its styles and cursor movements."""
        for segment in super().render(renderable, options):
            style = segment.style
            # Rich makes links of URLs that somebody prints while bars are shown.
            style = style.update_link(None) if style is not None and style.link else style
            yield segment if segment.control else Segment(visible(segment.text), style)


class _Marked:
    """A stream that passes everything on: `VisibleConsole` has already made the text of others visible."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def write(self, text: str) -> int:
        return self._screen.write("\n".join(map(obeyed, text.split("\n"))))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._screen, name)
