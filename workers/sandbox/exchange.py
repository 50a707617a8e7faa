"""The exchange of one command and its answer with a container's first process, whatever protocol that speaks."""

from abc import ABC, abstractmethod
from typing import Literal

from workers.sandbox.output import Capped

# Exit status of a first process whose stream or time ended. It is not 0, which would be the success of a last script.
LOST = 121

# run: `bash -c`. plain: the same without environment files and programs of the workdir. clear: kill every other process. last: run a script
# and end with its status.
Kind = Literal["run", "plain", "clear", "last"]


class Exchange(ABC):
    """`output` is what the command printed, and `notes` what came over the side channel meanwhile. `status` is None until the answer is
    complete. `survivors` counts the processes that killing all of them left alive. `starved_s` is how long the machine had no CPU
    for the command's processes.
    """

    def __init__(self, keep_bytes: int, notes: Capped | None = None) -> None:
        self.output = Capped(keep_bytes)
        self.notes = notes or Capped(0)
        self.status: int | None = None
        self.survivors = 0
        self.starved_s = 0.0

    @abstractmethod
    def message(self, kind: Kind, text: bytes) -> bytes:
        """The bytes to write to the first process's stdin. `text` holds no NUL."""

    @abstractmethod
    def feed(self, piece: bytes) -> None:
        """Take a piece of its stdout; pieces may be cut anywhere."""

    @abstractmethod
    def flush(self) -> None:
        """Take the end of the stream."""
