"""An agent's commands: found in a reply of the policy, run as the agent's file specifies, and their outputs read as observations or as the
submission.

The rules are mini-swe-agent's. Text: every match of the action's regular expression counts, each is stripped, and there must be exactly
one. Tool calls: at least one, each of them of the one tool, with its argument. A reply that does not follow its dialect is a format error.

A submission has exit status 0 and a sentinel as the first line of the output. Everything after it, byte for byte, is the printed patch.
`exact` uses upstream's own reading instead: the output as text, in which all line ends become "\n" and lines end at any line end of
Unicode; before 1.17, any exit status.

The printed patch is graded, except where it does not have the form of a complete patch. Then the difference of the tree to the start is
graded, as it is when a limit ends an episode. The choice is made before any test runs, so it does not depend on a verdict.
"""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

from pipeline.agent.config import OUR_INTERPRETER, AgentConfig
from pipeline.agent.upstream import BASH_TOOL, Version
from pipeline.chat import ToolCall, storable
from pipeline.errors import SandboxError
from pipeline.request import Claim
from pipeline.trajectory import Observation, Submitted, Turn
from workers.isolation import calls as isolation
from workers.isolation.calls import LimitExceeded
from workers.sandbox.protocol import OUTPUT_KEEP_BYTES, CommandResult, PatchCheck

SEARCH_CPU_S = 2  # limit for one reply; milliseconds are usual
TOOL: str = BASH_TOOL["function"]["name"]
NO_CALL = "No tool calls found in the response. Every response MUST include at least one tool call."

# Bytes kept of each end of an output in exact mode; upstream keeps all of it.
EXACT_KEEP_BYTES = 16 * 1024 * 1024

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


@dataclass(frozen=True, slots=True)
class BashCommand:
    text: str
    tool_call_id: str = ""  # the id of the call that asks for it; "" where commands are text


@dataclass(frozen=True, slots=True)
class FormatError:
    """`actions` are the commands found in a text: none, more than one, or one that cannot be passed to a shell."""

    reason: str
    actions: tuple[str, ...] = ()


async def read_reply(turn: Turn, config: AgentConfig) -> tuple[BashCommand, ...] | FormatError:
    """The commands of a reply, in order."""
    if config.dialect == "tool_calls":
        return called(turn.said.tool_calls)
    found = await search(_searchable(turn, config), config.action)
    if isinstance(found, FormatError):
        return found
    actions = tuple(one.strip() for one in found)
    if len(actions) != 1:
        if not config.exact:
            return FormatError(f"expected exactly 1 command, found {len(actions)}", actions)
        reason = f"Expected exactly 1 action, found {len(actions)}."
        return FormatError(reason, actions if config.upstream == "2.4" else found)
    if "\0" in actions[0]:
        return FormatError("the command contains a NUL character", actions)
    return (BashCommand(actions[0]),)


def _searchable(turn: Turn, config: AgentConfig) -> str:
    """The reply without its thoughts. If exact, it is all sampled text, because upstream searches everything that a server sends."""
    if config.exact and turn.sampled:
        return turn.text
    return turn.said.content


async def search(text: str, action: re.Pattern[str]) -> tuple[str, ...] | FormatError:
    """The matches of the expression. The search runs in a process of its own, because it backtracks: a policy can write a reply for which
    it takes hours.
    """
    try:
        return await isolation.call(actions_in, text, action.pattern, action.flags, cpu_s=SEARCH_CPU_S)
    except LimitExceeded as error:
        return FormatError(f"the reply could not be searched for commands {error}")


def actions_in(text: str, pattern: str, flags: int) -> tuple[str, ...]:
    """Every match of the action's regular expression."""
    return tuple(re.compile(pattern, flags).findall(text))


def called(calls: Sequence[ToolCall]) -> tuple[BashCommand, ...] | FormatError:
    """The commands of tool calls. One wrong call makes the whole reply a format error, with mini-swe-agent's words for it."""
    if not calls:
        return FormatError(NO_CALL)
    commands: list[BashCommand] = []
    for call in calls:
        arguments, wrong = _arguments(call.arguments)
        if call.name != TOOL:
            wrong += f"Unknown tool '{call.name}'."
        command = arguments.get("command")
        if "command" not in arguments:
            wrong += "Missing 'command' argument in bash tool call."
        elif not isinstance(command, str):
            wrong += "The 'command' argument in bash tool call is not a text."
        elif "\0" in command:
            wrong += "The command contains a NUL character."
        if wrong:
            return FormatError(wrong.strip())
        commands.append(BashCommand(storable(cast(str, command)), call.id))
    return tuple(commands)


def _arguments(text: str) -> tuple[dict[str, Any], str]:
    """The arguments of a call, and the error in their text, if any."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return {}, f"Error parsing tool call arguments: {error}."
    return (cast(dict[str, Any], found) if isinstance(found, dict) else {}), ""


class AgentSandbox(Protocol):
    """The part of the task's container that an episode uses. Raises SandboxError."""

    @property
    def workdir(self) -> str:
        """The directory that commands start in: the repository's root."""
        ...

    async def run(self, command: str, *, timeout_s: float, keep_bytes: int) -> CommandResult:
        """Run `bash -c command` in the repository. After `timeout_s` it is killed, which also gives a result. The result has at most
        `keep_bytes` of each end of the output.
        """
        ...

    async def diff(self) -> bytes:
        """All changes against the base commit, new files included, as a git patch."""
        ...

    async def check(self, printed: bytes) -> PatchCheck:
        """Whether git can apply the printed patch to the base commit. It kills all running processes of the sandbox."""
        ...


@dataclass(frozen=True, slots=True)
class CommandRunner:
    """Runs the commands of one agent."""

    sandbox: AgentSandbox
    interpreter: tuple[str, ...]  # argv before the command
    cwd: str  # where commands start; "" is the sandbox's own directory
    keep_bytes: int

    @classmethod
    def of(cls, config: AgentConfig, sandbox: AgentSandbox) -> Self:
        """Makes the runner of an agent. Commands start in the repository, unless an exact agent's file names another directory."""
        cwd = config.cwd if config.exact and config.cwd else ""
        return cls(
            sandbox=sandbox,
            interpreter=config.interpreter,
            cwd="" if cwd == sandbox.workdir else cwd,
            keep_bytes=EXACT_KEEP_BYTES if config.exact else OUTPUT_KEEP_BYTES,
        )

    async def run(self, command: str, *, timeout_s: float) -> CommandResult:
        """Run one command in a new process of the interpreter."""
        return await self.sandbox.run(self._line(command), timeout_s=timeout_s, keep_bytes=self.keep_bytes)

    def _line(self, command: str) -> str:
        """Returns the command line for the sandbox's own bash."""
        if self.interpreter == OUR_INTERPRETER and not self.cwd:
            return command
        there = f"cd -- {shlex.quote(self.cwd)} && " if self.cwd else ""
        return f"{there}exec {shlex.join([*self.interpreter, command])}"


class ElidedText(str):
    """A text without its middle. Its length is that of the whole text, so that templates print the right number of omitted characters."""

    dropped_chars: int

    def __new__(cls, kept: str, *, dropped_chars: int) -> Self:
        made = super().__new__(cls, kept)
        made.dropped_chars = dropped_chars
        return made

    def __len__(self) -> int:
        return super().__len__() + self.dropped_chars


def text_of(result: CommandResult, *, exact: bool) -> str:
    """The output as text, invalid UTF-8 replaced. `exact`: every line end becomes "\\n", as in Python's text mode."""
    text = result.output.decode("utf-8", errors="replace")
    if exact:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    # The number of dropped bytes counts as a number of characters.
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
    """`text` within the limit, and the number of missing characters. The beginning and the end stay; a note contains the number.

    `already_dropped` is the number of bytes that the sandbox left out of the middle; they count as characters.
    """
    if len(text) <= limit_chars and not already_dropped:
        return text, 0
    longest_note = _elision(len(text) + already_dropped)
    half = min(max(limit_chars - len(longest_note), 0), len(text)) // 2
    dropped_chars = len(text) - 2 * half + already_dropped
    return text[:half] + _elision(dropped_chars) + text[len(text) - half :], dropped_chars


def _elision(num_chars: int) -> str:
    return f"\n[... {num_chars} characters elided ...]\n"


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
