"""Turns a command's output into the submission or into an observation.

A submission is mini-swe-agent's: exit status 0 and a sentinel as the first line of the output. All that follows it, byte
for byte, is the patch. `exact` is upstream's own reading instead: the output as text, whose line ends all become "\\n" and which
any line end of Unicode ends a line of; and before 1.17, any exit status.
"""

from typing import Self

from pipeline.agent.upstream import Version
from pipeline.trajectory import Observation
from workers.sandbox.protocol import CommandResult

SENTINEL = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SENTINEL_OF_1 = "MINI_SWE_AGENT_FINAL_OUTPUT"  # which 1.x takes too
SENTINELS = (SENTINEL.encode(), SENTINEL_OF_1.encode())
FIRST_LINE_CHARS = 4096


class ElidedText(str):
    """A text without its middle, whose length is that of the whole, so that templates count right what they leave out."""

    dropped_chars: int

    def __new__(cls, kept: str, *, dropped_chars: int) -> Self:
        made = super().__new__(cls, kept)
        made.dropped_chars = dropped_chars
        return made

    def __len__(self) -> int:
        return super().__len__() + self.dropped_chars


def submission(result: CommandResult) -> bytes | None:
    """The patch that this output submits; None if it submits nothing."""
    first_line, _, rest = result.output.lstrip().partition(b"\n")
    return rest if result.exit_code == 0 and first_line.strip() in SENTINELS else None


def exact_submission(result: CommandResult, version: Version) -> bytes | None:
    """The patch that this output submits under mini-swe-agent's own rules."""
    if result.exit_code is None or (result.exit_code != 0 and version != "1.12"):
        return None
    text = text_of(result, exact=True).lstrip()
    first_line = next(iter(text[:FIRST_LINE_CHARS].splitlines(keepends=True)), "")
    sentinels = (SENTINEL,) if version == "2.4" else (SENTINEL, SENTINEL_OF_1)
    return text[len(first_line) :].encode() if first_line.strip() in sentinels else None


def text_of(result: CommandResult, *, exact: bool) -> str:
    """The output as text, invalid UTF-8 replaced. `exact`: every line end becomes "\\n", as in Python's text mode."""
    text = result.output.decode("utf-8", errors="replace")
    if exact:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    # Bytes count as characters there.
    return ElidedText(text, dropped_chars=result.dropped_bytes) if result.dropped_bytes else text


def observe(result: CommandResult, *, limit_chars: int, exact: bool = False) -> Observation:
    """The output as text of at most `limit_chars` characters, including the note about the cut."""
    shown, dropped_chars = cut_middle(
        str(text_of(result, exact=exact)), limit_chars=limit_chars, already_dropped=result.dropped_bytes
    )
    return Observation(
        exit_code=result.exit_code, output=shown, dropped_chars=dropped_chars, wall_s=result.wall_s
    )


def cut_middle(text: str, *, limit_chars: int, already_dropped: int = 0) -> tuple[str, int]:
    """`text` within the limit, and how many characters are missing. The beginning and the end stay; a note says how much was
    cut.

    `already_dropped` counts what the sandbox left out of the middle; bytes count as characters there.
    """
    if len(text) <= limit_chars and not already_dropped:
        return text, 0
    longest_note = _elision(len(text) + already_dropped)
    half = min(max(limit_chars - len(longest_note), 0), len(text)) // 2
    dropped_chars = len(text) - 2 * half + already_dropped
    return text[:half] + _elision(dropped_chars) + text[len(text) - half :], dropped_chars


def _elision(num_chars: int) -> str:
    return f"\n[... {num_chars} characters elided ...]\n"
