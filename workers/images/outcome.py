"""What came of one image that was pulled or built, and who is told while it happens."""

from dataclasses import dataclass
from typing import Literal, Protocol

State = Literal["pulled", "built", "present", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`via` is the name it was pulled by. `seconds` is how long it took, pauses included."""

    image: str
    state: State
    reason: str = ""  # why it failed
    via: str = ""
    size_bytes: int = 0
    seconds: float = 0.0


class Watch(Protocol):
    """Is told how it goes, from several threads."""

    def began(self, image: str) -> None: ...
    def progress(self, image: str, done_bytes: int, total_bytes: int) -> None: ...
    def says(self, image: str, text: str) -> None: ...
    def ended(self, outcome: Outcome) -> None: ...


class Unwatched:
    """Nobody looks."""

    def began(self, image: str) -> None: ...
    def progress(self, image: str, done_bytes: int, total_bytes: int) -> None: ...
    def says(self, image: str, text: str) -> None: ...
    def ended(self, outcome: Outcome) -> None: ...
