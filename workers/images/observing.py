"""Puts the progress of pulls and builds on a display."""

from rich.text import Text

from workers.display import Display
from workers.images.result import ImageResult
from workers.images.sizes import show_bytes


class Displayed:
    """An ImageObserver."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def began(self, image: str) -> None:
        self._display.begin(image)

    def progress(self, image: str, done_bytes: int, total_bytes: int) -> None:
        note = f"{show_bytes(done_bytes)} of {show_bytes(total_bytes)}"
        self._display.advance(image, note, done=done_bytes, total=total_bytes)

    def remark(self, image: str, text: str) -> None:
        self._display.remark(image, text)

    def ended(self, result: ImageResult) -> None:
        self._display.finish(result.image, [Text(str(result))], ok=result.state != "failed")
