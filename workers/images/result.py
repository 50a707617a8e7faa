"""The result of pulling or building one image, and who is told while it happens."""

from dataclasses import dataclass
from typing import Literal, Protocol

from workers.images.sizes import show_bytes

State = Literal["pulled", "built", "present", "failed"]


@dataclass(frozen=True, slots=True)
class ImageResult:
    """`via` is the name it was pulled by. `seconds` is how long it took, pauses included."""

    image: str
    state: State
    reason: str = ""  # why it failed
    via: str = ""
    size_bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """`pulled   NAME  1.2 GB  34 s  by MIRROR/NAME`"""
        words = [f"{self.state:<8}", self.image]
        if self.size_bytes:
            words.append(show_bytes(self.size_bytes))
        if self.state != "present":
            words.append(f"{self.seconds:.1f} s")
        if self.via and self.via != self.image:
            words.append(f"by {self.via}")
        if self.reason:
            words.append(f"({self.reason})")
        return "  ".join(words)


class ImageObserver(Protocol):
    """Is told of the progress, from several threads."""

    def began(self, image: str) -> None: ...
    def progress(self, image: str, done_bytes: int, total_bytes: int) -> None: ...
    def remark(self, image: str, text: str) -> None: ...
    def ended(self, result: ImageResult) -> None: ...


class Unobserved:
    """An observer that ignores everything."""

    def began(self, image: str) -> None: ...
    def progress(self, image: str, done_bytes: int, total_bytes: int) -> None: ...
    def remark(self, image: str, text: str) -> None: ...
    def ended(self, result: ImageResult) -> None: ...
