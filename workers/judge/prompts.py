"""The prompts of one rollout: issue, past steps, the step to be judged, and the question, cut by the judge's own tokenizer.

All prompts of a rollout have the same beginning. The past steps in a prompt begin at a multiple of half of `history_steps`, and the text of
each does not depend on the judged step. So several consecutive prompts differ only at their ends, and an engine computes the rest once. The
steps of an agent program's conversation are those of that conversation alone, numbered within it. A prompt that is too long is cut in this
order: the middle of the issue, of past steps and of results, each to its share; then the oldest past steps are removed. The reply that is
judged is never cut: a step that alone exceeds the prompt is not judged.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pipeline.errors import RequestError
from pipeline.judge import Judge
from pipeline.judge_templates import JudgeTemplates
from pipeline.trajectory import Action
from workers.judge.stage import FinishedRollout
from workers.policy.render import Renderer
from workers.policy.sglang import TokenizerSource


class JudgeTokenizers:
    """The judges' tokenizers by the content hash under which the trainer stored them."""

    def __init__(self, source: TokenizerSource) -> None:
        self._source = source
        self._renderers: dict[str, Renderer] = {}
        self._making = asyncio.Lock()

    async def renderer(self, name: str) -> Renderer:
        """The renderer of the tokenizer. Raises RequestError if the tokenizer is unknown or cannot be used."""
        async with self._making:
            if name not in self._renderers:
                bundle = await self._source(name)
                if bundle is None:
                    raise RequestError(f"judge.tokenizer: {name} was never announced")
                self._renderers[name] = await asyncio.to_thread(Renderer, bundle)
            return self._renderers[name]


ELSEWHERE = "\n\nThe step is in another conversation of the engineer's, which was asked to do this:\n"
# Characters per token, assumed where the judge's tokenizer is not known. Code has about as many. Prose has more, so its prompts become
# shorter than the limit; text with fewer, such as numbers or other scripts than Latin, makes prompts longer than the limit.
CHARS_PER_TOKEN = 3


class Cutter(Protocol):
    """Shortens texts."""

    def cut(self, text: str, limit_tokens: int) -> str:
        """`text` with at most `limit_tokens` tokens; a note replaces its middle."""
        ...


class CharacterCutter:
    """Cuts texts for a judge whose tokenizer is not known."""

    def cut(self, text: str, limit_tokens: int) -> str:
        limit_chars = limit_tokens * CHARS_PER_TOKEN
        if len(text) <= limit_chars:
            return text
        half = limit_chars // 2
        return text[:half] + _note(len(text) - 2 * half, "characters") + text[len(text) - half :]


class TokenCutter:
    """Shortens texts with the tokenizer of the judge."""

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
    opening: str = ""  # the judge's reply begins with this


class SizedPrompt(Protocol):
    """A rendered prompt in the form that a judge gets, with its size in tokens."""

    @property
    def num_tokens(self) -> int: ...


P = TypeVar("P", bound=SizedPrompt)


@dataclass(frozen=True, slots=True)
class CommandView:
    """A command and its result, as templates use them."""

    text: str
    output: str
    exit_code: int | None
    timed_out: bool
    was_run: bool
    in_reply: bool  # whether the reply's text contains the command


class RolloutPrompts(Generic[P]):
    """The prompts of one rollout, each made on request. `render` converts them to the form that the judge gets."""

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
        self._issues: dict[int, str] = {}  # keys are first turns of conversations
        self._past: dict[int, str] = {}

    def of(self, turn: int) -> P | None:
        """The prompt about one turn; None if the step alone is too long. It takes milliseconds for each thousand tokens."""
        numbers = self._rollout.conversation(turn)
        place = numbers.index(turn)
        issue, step = self._issue(numbers[0]), self._step(turn, place)
        for first in range(self._first_shown(place), place + 1):
            past = "".join(self._past_step(numbers[one], one) for one in range(first, place))
            prompt = self._render(
                StepText(
                    self._templates.system.render({}),
                    issue + past,
                    step,
                    self._templates.question.render({}),
                    self._templates.opening.render({}),
                )
            )
            if prompt.num_tokens <= self._judge.prompt_tokens:
                return prompt
        return None

    def _issue(self, first: int) -> str:
        """The beginning of the prompts about a conversation: the issue, and the instruction of its first turn, if that is another."""
        if first not in self._issues:
            limit_tokens = self._tokens(self._templates.shares.issue)
            issue = self._cutter.cut(self._rollout.issue, limit_tokens)
            if instruction := self._rollout.instruction(first):
                issue += f"{ELSEWHERE}{self._cutter.cut(instruction, limit_tokens)}"
            self._issues[first] = self._templates.issue.render({"issue": issue})
        return self._issues[first]

    def _first_shown(self, place: int) -> int:
        """The oldest past step that may be shown: at most `history_steps` ago."""
        first, stride = place - self._judge.history_steps, max(self._judge.history_steps // 2, 1)
        return min(-(-first // stride) * stride, place) if first > 0 else 0

    def _past_step(self, turn: int, place: int) -> str:
        if turn not in self._past:
            share = self._templates.shares.past_steps / max(self._judge.history_steps, 1)
            limit_tokens = self._tokens(share) // 2
            commands = self._commands(turn, text_tokens=limit_tokens, output_tokens=limit_tokens)
            self._past[turn] = self._templates.past_step.render({"number": place + 1, "commands": commands})
        return self._past[turn]

    def _step(self, turn: int, place: int) -> str:
        results = self._tokens(self._templates.shares.results)
        commands = self._commands(turn, text_tokens=self._judge.prompt_tokens, output_tokens=results)
        reply = self._rollout.turns[turn].text
        return self._templates.step.render({"number": place + 1, "reply": reply, "commands": commands})

    def _commands(self, turn: int, *, text_tokens: int, output_tokens: int) -> Sequence[CommandView]:
        """The turn's commands. All their texts together, and all their outputs together, have at most these numbers of tokens."""
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
