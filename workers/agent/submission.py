"""What an agent submits, and what of it is graded.

A submission is defined as in mini-swe-agent: exit status 0 and a sentinel as the first line of the output. Everything after it, byte for
byte, is the printed patch. `exact` uses upstream's own reading instead: the output as text, in which all line ends become "\\n" and lines
end at any line end of Unicode; before 1.17, any exit status.

The printed patch is graded, except where it does not have the form of a complete patch. Then the difference of the tree to the start is
graded, as it is when a limit ends an episode. The choice is made before any test runs, so it does not depend on a verdict.
"""

import re
from dataclasses import dataclass
from typing import Protocol

from pipeline.agent.config import AgentConfig
from pipeline.agent.upstream import Version
from pipeline.errors import SandboxError
from pipeline.request import Claim
from pipeline.trajectory import Submitted
from workers.agent.commands import AgentSandbox, text_of
from workers.sandbox.protocol import CommandResult, PatchCheck

SENTINEL = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SENTINEL_OF_1 = "MINI_SWE_AGENT_FINAL_OUTPUT"  # 1.x accepts this one too
SENTINELS = (SENTINEL.encode(), SENTINEL_OF_1.encode())
FIRST_LINE_CHARS = 4096

_HUNK = re.compile(rb"@@ -\d{1,9}(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@")
_BINARY = re.compile(rb"Binary files .* differ\r?")

# Why a printed patch is not graded.
DROPPED = "what was printed is too long to be kept"
BINARY = "what was printed has no bytes of a binary file"
COMMITTED = "nothing was printed, and the work was committed"
UNREADABLE = "what was printed cannot be applied in any way"
_DOUBTS: dict[PatchCheck, str] = {"": "", "moved": COMMITTED, "unreadable": UNREADABLE}


class ReadsPatches(Protocol):
    """A grader that tells whether a patch can be applied. Raises GraderError."""

    async def can_apply(self, claim: Claim, patch: bytes) -> bool: ...


@dataclass(frozen=True, slots=True)
class Submission:
    """What was printed, and the tree's own difference to the start, if that may be graded instead because of `doubt`."""

    printed: bytes
    tree: bytes = b""
    doubt: str = ""  # one of the reasons above

    async def chosen(self, claim: Claim, grader: ReadsPatches) -> Submitted:
        """What is graded. Raises GraderError."""
        if not self.tree.strip():
            return Submitted(patch=self.printed)
        if self.doubt == UNREADABLE and await grader.can_apply(claim, self.printed):
            return Submitted(patch=self.printed)
        return Submitted(patch=self.tree, from_tree=self.doubt)


async def submitted(result: CommandResult, config: AgentConfig, sandbox: AgentSandbox) -> Submission | None:
    """What an agent submits with this output; None if it submits nothing. Raises SandboxError."""
    printed = exact_submission(result, config.upstream) if config.exact else submission(result)
    if printed is None:
        return None
    if result.dropped_bytes:
        return Submission(b"", await sandbox.diff(), DROPPED)
    if config.exact:
        return Submission(printed)
    try:
        doubt = BINARY if lacks_bytes(printed) else _DOUBTS[await sandbox.check(printed)]
        return Submission(printed, await sandbox.diff(), doubt) if doubt else Submission(printed)
    except SandboxError:
        if not printed.strip():
            raise
        return Submission(printed)  # which needs its sandbox no longer


def submission(result: CommandResult) -> bytes | None:
    """The patch that this output prints; None if it submits nothing."""
    first_line, _, rest = result.output.lstrip().partition(b"\n")
    return rest if result.exit_code == 0 and first_line.strip() in SENTINELS else None


def exact_submission(result: CommandResult, version: Version) -> bytes | None:
    """The patch that this output prints under mini-swe-agent's own rules."""
    if result.exit_code is None or (result.exit_code != 0 and version != "1.12"):
        return None
    text = text_of(result, exact=True).lstrip()
    first_line = next(iter(text[:FIRST_LINE_CHARS].splitlines(keepends=True)), "")
    sentinels = (SENTINEL,) if version == "2.4" else (SENTINEL, SENTINEL_OF_1)
    return text[len(first_line) :].encode() if first_line.strip() in sentinels else None


def lacks_bytes(patch: bytes) -> bool:
    """Whether a patch says that a binary file differs instead of how. A line of a hunk is content, whatever it says."""
    old = new = 0  # lines that the hunk still has of each side
    for line in patch.split(b"\n"):
        if old > 0 or new > 0:
            old -= line[:1] != b"+" and line[:1] != b"\\"
            new -= line[:1] != b"-" and line[:1] != b"\\"
        elif hunk := _HUNK.match(line):
            old, new = (int(count or 1) for count in hunk.groups())
        elif _BINARY.fullmatch(line):
            return True
    return False
