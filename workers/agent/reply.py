"""Finds the commands in a policy's reply. A reply that does not follow its dialect is a format error.

The rules are mini-swe-agent's. Text: every match of the action's regular expression counts, each is stripped, and there must be
exactly one. Tool calls: at least one, each of them of the one tool, with its argument. Submission is recognised in a command's
output, see commands.py.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from pipeline.agent.config import AgentConfig
from pipeline.agent.upstream import BASH_TOOL
from pipeline.chat import ToolCall, storable
from pipeline.trajectory import Turn
from workers.isolation import calls as isolation
from workers.isolation.calls import LimitExceeded

SEARCH_CPU_S = 2  # limit for one reply; milliseconds are usual
TOOL: str = BASH_TOOL["function"]["name"]
NO_CALL = "No tool calls found in the response. Every response MUST include at least one tool call."


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
