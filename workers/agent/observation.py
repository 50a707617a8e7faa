"""Turns a command's output into the submission or into an observation.

A submission is mini-swe-agent's: exit status 0 and a sentinel as the first line of the output. All that follows it, byte
for byte, is the patch.
"""

from pipeline.trajectory import Observation
from workers.sandbox.protocol import CommandResult

SENTINELS = (b"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", b"MINI_SWE_AGENT_FINAL_OUTPUT")


def submission(result: CommandResult) -> bytes | None:
    """The patch that this output submits; None if it submits nothing."""
    first_line, _, rest = result.output.lstrip().partition(b"\n")
    return rest if result.exit_code == 0 and first_line.strip() in SENTINELS else None


def observe(result: CommandResult, *, limit_chars: int) -> Observation:
    """The output as text of at most `limit_chars` characters, including the note about the cut."""
    text = result.output.decode("utf-8", errors="replace")
    shown, dropped_chars = cut_middle(text, limit_chars=limit_chars, already_dropped=result.dropped_bytes)
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
