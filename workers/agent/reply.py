"""Finds the one command in a policy's reply; a reply without exactly one is a format error.

The rule is mini-swe-agent's: every match of the action's regular expression counts, each is stripped, and there must be
exactly one. Submission is recognised in the command's output, see observation.py.
"""

import re
from dataclasses import dataclass

from workers.isolation import calls as isolation
from workers.isolation.calls import LimitExceeded

SEARCH_CPU_S = 2  # for one reply; milliseconds are usual

_REASONING = re.compile(
    r"\A\s*<think>.*?(?:</think>|\Z)|\A.*?^[ \t]*</think>[ \t]*$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class BashCommand:
    text: str


@dataclass(frozen=True, slots=True)
class FormatError:
    """`actions` are the commands found: none, or more than one, or one that no shell can be given."""

    reason: str
    actions: tuple[str, ...]


async def parse_reply(text: str, action: re.Pattern[str]) -> BashCommand | FormatError:
    """The one command in `text`. `action` has one group, the command. A reasoning model's thoughts are not searched.

    The search runs in a process of its own: it backtracks, so a policy can write a reply for which it takes hours.
    """
    try:
        actions = await isolation.call(actions_in, text, action.pattern, action.flags, cpu_s=SEARCH_CPU_S)
    except LimitExceeded as error:
        return FormatError(f"the reply could not be searched for commands {error}", ())
    return _only(actions)


def actions_in(text: str, pattern: str, flags: int) -> tuple[str, ...]:
    """Every match of the action's regular expression."""
    action = re.compile(pattern, flags)
    return tuple(found.strip() for found in action.findall(_REASONING.sub("", text, count=1)))


def _only(actions: tuple[str, ...]) -> BashCommand | FormatError:
    if len(actions) != 1:
        return FormatError(f"expected exactly 1 command, found {len(actions)}", actions)
    if "\0" in actions[0]:
        return FormatError("the command contains a NUL character", actions)
    return BashCommand(actions[0])
