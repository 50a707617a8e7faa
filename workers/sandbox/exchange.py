"""One command's way to a container's first process and its answer's way back."""

from abc import ABC, abstractmethod
from typing import Literal

from workers.sandbox.output import Capped

# run: `bash -c`. plain: the same, deaf to environment files and to programs of the workdir. clear: kill every other
# process. last: run a script and end with its status.
Kind = Literal["run", "plain", "clear", "last"]


class Exchange(ABC):
    """`output` is what the command printed, `notes` what came over the side channel meanwhile. `status` is None until
    the answer is complete; `survivors` are processes that a kill of all left.
    """

    def __init__(self, keep_bytes: int, notes: Capped | None = None) -> None:
        self.output = Capped(keep_bytes)
        self.notes = notes or Capped(0)
        self.status: int | None = None
        self.survivors = 0

    @abstractmethod
    def question(self, kind: Kind, text: bytes) -> bytes:
        """What to write to the first process's stdin. `text` holds no NUL."""

    @abstractmethod
    def feed(self, piece: bytes) -> None:
        """Takes what came from its stdout, in whatever pieces."""

    @abstractmethod
    def flush(self) -> None:
        """The stream has ended."""
