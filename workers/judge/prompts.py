"""The prompts of one rollout: issue, past steps, the step to be judged, and the question, cut by the judge's own tokenizer.

All prompts of a rollout begin alike. The past steps that one shows begin at a multiple of half of `history_steps`, and each is shown in the
same words whichever later step is judged, so that several prompts in a row differ only at their ends and an engine computes the rest once.
What does not fit is cut in this order: the middle of the issue, of past steps and of results, each to its share; then the oldest past
steps go. The reply that is judged is never cut: a step that alone exceeds the prompt is not judged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pipeline.judge import Judge
from pipeline.judge_templates import JudgeTemplates
from pipeline.trajectory import Action
from workers.judge.rollouts import FinishedRollout
from workers.policy.render import Renderer

CHARS_PER_TOKEN = 3  # without a tokenizer; code has more characters a token, so that a prompt is rather too short than too long


class Cutter(Protocol):
    """Makes text short."""

    def cut(self, text: str, limit_tokens: int) -> str:
        """`text` with at most so many tokens; a note stands in place of its middle."""
        ...


class CharacterCutter:
    """For a judge whose tokenizer is not known."""

    def cut(self, text: str, limit_tokens: int) -> str:
        limit_chars = limit_tokens * CHARS_PER_TOKEN
        if len(text) <= limit_chars:
            return text
        half = limit_chars // 2
        return text[:half] + _note(len(text) - 2 * half, "characters") + text[len(text) - half :]


class TokenCutter:
    """By the tokenizer of the judge."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def cut(self, text: str, limit_tokens: int) -> str:
        ids = self._renderer.encode_text(text)
        if len(ids) <= limit_tokens:
            return text
        half = limit_tokens // 2
        head, tail = self._renderer.decode(ids[:half]), self._renderer.decode(ids[len(ids) - half :])
        # A character of several tokens may have been cut in two.
        return head.rstrip("\ufffd") + _note(len(ids) - 2 * half, "tokens") + tail.lstrip("\ufffd")


def _note(number: int, unit: str) -> str:
    return f"\n[... {number} {unit} left out ...]\n"


@dataclass(frozen=True, slots=True)
class StepText:
    """A prompt as text."""

    system: str
    context: str  # the issue and past steps
    step: str
    question: str
    opening: str = ""  # of the vote: the judge's reply begins so


class SizedPrompt(Protocol):
    """A prompt in the form that a judge is sent."""

    @property
    def num_tokens(self) -> int: ...


P = TypeVar("P", bound=SizedPrompt)


@dataclass(frozen=True, slots=True)
class CommandView:
    """A command and its result, as templates see them."""

    text: str
    output: str
    exit_code: int | None
    timed_out: bool
    was_run: bool
    in_reply: bool  # the reply's text holds the command


class RolloutPrompts(Generic[P]):
    """The prompts of one rollout, each made when it is asked for. `render` forms them as the judge is sent them."""

    def __init__(
        self,
        rollout: FinishedRollout,
        judge: Judge,
        templates: JudgeTemplates,
        cutter: Cutter,
        render: Callable[[StepText], P],
    ) -> None:
        self._rollout = rollout
        self._judge = judge
        self._templates = templates
        self._cutter = cutter
        self._render = render
        issue = cutter.cut(rollout.issue, self._tokens(templates.shares.issue))
        self._issue = templates.issue.render({"issue": issue})
        self._past: dict[int, str] = {}

    def of(self, turn: int) -> P | None:
        """The prompt about one turn; None if the step alone is too long. Takes milliseconds for each thousand tokens."""
        step = self._step(turn)
        for first in range(self._first_shown(turn), turn + 1):
            past = "".join(self._past_step(one) for one in range(first, turn))
            prompt = self._render(
                StepText(
                    self._templates.system.render({}),
                    self._issue + past,
                    step,
                    self._templates.question.render({}),
                    self._templates.opening.render({}),
                )
            )
            if prompt.num_tokens <= self._judge.prompt_tokens:
                return prompt
        return None

    def _first_shown(self, turn: int) -> int:
        """The oldest past step that may be shown: at most `history_steps` ago."""
        first, stride = turn - self._judge.history_steps, max(self._judge.history_steps // 2, 1)
        return min(-(-first // stride) * stride, turn) if first > 0 else 0

    def _past_step(self, turn: int) -> str:
        if turn not in self._past:
            share = self._templates.shares.past_steps / max(self._judge.history_steps, 1)
            limit_tokens = self._tokens(share) // 2
            commands = self._commands(turn, text_tokens=limit_tokens, output_tokens=limit_tokens)
            self._past[turn] = self._templates.past_step.render({"number": turn + 1, "commands": commands})
        return self._past[turn]

    def _step(self, turn: int) -> str:
        results = self._tokens(self._templates.shares.results)
        commands = self._commands(turn, text_tokens=self._judge.prompt_tokens, output_tokens=results)
        reply = self._rollout.turns[turn].text
        return self._templates.step.render({"number": turn + 1, "reply": reply, "commands": commands})

    def _commands(self, turn: int, *, text_tokens: int, output_tokens: int) -> Sequence[CommandView]:
        """The turn's commands, of which all texts together, and all outputs, have at most so many tokens."""
        shown = self._rollout.turns[turn]
        share = max(len(shown.actions), 1)
        return [
            self._command(action, shown.text, max(text_tokens // share, 1), max(output_tokens // share, 1))
            for action in shown.actions
        ]

    def _command(self, action: Action, reply: str, text_tokens: int, output_tokens: int) -> CommandView:
        seen = action.observation
        return CommandView(
            text=self._cutter.cut(action.command, text_tokens),
            output="" if seen is None else self._cutter.cut(seen.output, output_tokens),
            exit_code=None if seen is None else seen.exit_code,
            timed_out=seen is not None and seen.exit_code is None,
            was_run=seen is not None,
            in_reply=action.command in reply,
        )

    def _tokens(self, share: float) -> int:
        return max(int(share * self._judge.prompt_tokens), 1)
