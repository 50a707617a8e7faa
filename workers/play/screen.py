"""Shows an episode as it happens: every message that the policy is shown, every reply, and how it ended."""

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from pipeline.chat import ChatMessage
from pipeline.trajectory import Cut, Exhausted, Failed, Submitted, Trajectory, Turn, outcome_tag
from pipeline.visible import visible, visible_line

TOLD, SAID, ENDED, BROKEN = "cyan", "green", "bold", "red"  # colours on a terminal


class Screen:
    """Prints an episode; implements `workers.agent.loop.Watcher`. Control characters are made visible."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._num_replies = 0
        # The newest turn whose commands have run, until the policy is shown what they printed.
        self._untold: Turn | None = None

    def told(self, messages: Sequence[ChatMessage]) -> None:
        self._untold = None
        for message in messages:
            of_call = f" (result of {message.tool_call_id})" if message.tool_call_id else ""
            self._section(f"{message.role}{of_call}", message.content, TOLD)

    def replied(self, turn: Turn) -> None:
        self._num_replies += 1
        if turn.cut is not None:
            self._section("context cut", _cut(turn.cut), TOLD)
        self._section(f"reply {self._num_replies}{_facts(turn)}", _spoken(turn.said), SAID)

    def acted(self, turn: Turn) -> None:
        self._untold = turn

    def ended(self, played: Trajectory) -> None:
        """The episode is over, and graded unless something broke."""
        if self._untold is not None and not isinstance(played.outcome, Submitted):
            for action in self._untold.actions:
                if action.observation is not None:
                    self._section("output that the policy was not shown", action.observation.output, TOLD)
        if not isinstance(played.outcome, Failed):
            self._section("patch", played.outcome.patch.decode("utf-8", "replace"), ENDED)
        self._section("end", _ending(played), BROKEN if played.reward is None else ENDED)

    def _section(self, title: str, text: str, colour: str) -> None:
        self._console.print(Rule(Text(visible_line(title), style=colour), align="left", style=colour))
        self._console.print(Text(visible(text)), soft_wrap=True)


def _cut(cut: Cut) -> str:
    parts = ["the last reply is taken out, a format error"] if cut.forgot_reply else []
    parts += [f"{cut.num_omitted} turns omitted so far"] if cut.num_omitted else []
    parts += [f"thoughts of {cut.num_thoughts} replies taken out"] if cut.num_thoughts else []
    parts += [f"{cut.dropped_chars} characters of the newest output did not fit"] if cut.dropped_chars else []
    return "; ".join(parts)


def _facts(turn: Turn) -> str:
    """What is worth knowing of a reply beside its text."""
    num_tokens = turn.usage.completion_tokens if turn.usage is not None else len(turn.sampled) // 4
    facts = [f"{num_tokens} tokens"] if num_tokens else []
    facts += [f"{turn.generate_s:.1f} s"] if turn.generate_s else []
    facts += ["cut short by its limit of tokens"] if turn.stop != "stop" else []
    return f" ({', '.join(facts)})" if facts else ""


def _spoken(said: ChatMessage) -> str:
    thoughts = [f"<thoughts>\n{said.reasoning}\n</thoughts>"] if said.reasoning else []
    calls = [f"{call.name}{f' [{call.id}]' if call.id else ''} {call.arguments}" for call in said.tool_calls]
    return "\n".join([*thoughts, *([said.content] if said.content else []), *calls])


def _ending(played: Trajectory) -> str:
    num_turns = len(played.turns)
    head = f"{outcome_tag(played.outcome)} after {num_turns} {'turn' if num_turns == 1 else 'turns'}"
    if isinstance(played.outcome, Failed):
        return f"{head}: {played.outcome.message}\nno reward: an infrastructure failure is no verdict"
    reached = " (the repository's diff is graded)" if isinstance(played.outcome, Exhausted) else ""
    reward = played.reward
    assert reward is not None
    control = f", control {reward.control}" if reward.control else ""
    seconds = played.finished_at - played.started_at
    return f"{head}{reached}\nreward {reward.value:g}: {reward.decided_by}{control}\n{seconds:.1f} s in all"
