"""Votes of a language model behind SGLang: a prompt of token ids, a sampled verdict."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.chat import ChatMessage
from pipeline.errors import EngineError, RequestError
from pipeline.judge import JudgeRequest
from pipeline.request import Claim
from workers.judge.engines import Call, Generated, JudgeEngines
from workers.judge.prompts import StepText, TokenCutter
from workers.judge.tokenizers import JudgeTokenizers
from workers.judge.verdicts import vote_value
from workers.judge.votes import Opinion
from workers.policy.formats.replies import taken_apart
from workers.policy.render import Renderer


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    """A prompt as token ids."""

    ids: Sequence[int]
    opening: str = ""  # of the reply, with which `ids` end

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


class EngineVoters:
    """Language models behind the judge's router."""

    def __init__(self, engines: JudgeEngines, tokenizers: JudgeTokenizers) -> None:
        self._engines = engines
        self._tokenizers = tokenizers

    async def open(self, claim: Claim[JudgeRequest]) -> "EngineVoter":
        """Raises RequestError if the judge's tokenizer is unknown or cannot be used."""
        renderer = await engine_renderer(self._tokenizers, claim)
        return EngineVoter(self._engines, claim, renderer, TokenCutter(renderer))


@dataclass(frozen=True, slots=True)
class EngineVoter:
    """Votes about the steps of one claim's rollout."""

    engines: JudgeEngines
    claim: Claim[JudgeRequest]
    renderer: Renderer
    cutter: TokenCutter
    versions: set[str] = field(default_factory=set[str])  # of weights that replied

    @property
    def num_votes(self) -> int:
        return self.claim.request.judge.num_votes

    @property
    def judge(self) -> str:
        return named(self.claim.request.judge.name, self.versions)

    def render(self, text: StepText) -> IdsPrompt:
        """Raises RequestError."""
        return opened_prompt(self.renderer, text, text.opening)

    async def vote(self, prompt: IdsPrompt, *, seed: int, name: str) -> Opinion:
        """Raises EngineError."""
        judge = self.claim.request.judge
        body = {
            "rid": name,
            "input_ids": prompt.ids,
            "sampling_params": {
                "temperature": judge.temperature,
                "max_new_tokens": judge.max_new_tokens,
                "stop_token_ids": self.renderer.stop_token_ids,
                "sampling_seed": seed,
                "skip_special_tokens": False,
            },
            "stream": False,
        }
        answer = await self.engines.ask(Call("/generate", body, self.claim.request.rollout_id), Generated)
        if answer.meta_info.weight_version is not None:
            self.versions.add(str(answer.meta_info.weight_version))
        text = prompt.opening + self._text(answer)
        opened = self.renderer.opens_thought(prompt.ids)
        reply = taken_apart(text, self.renderer.reply_format, opened, with_calls=False)
        return Opinion(vote_value(reply.content), text)

    async def check(self) -> None:
        """Raises EngineError if the engines are out."""
        await self.engines.check()

    def _text(self, answer: Generated) -> str:
        ids = answer.output_ids
        if ids is None:
            if answer.text is None:
                raise EngineError("engine response: neither output_ids nor text")
            return answer.text
        if ids and not 0 <= min(ids) <= max(ids) < self.renderer.vocab_size:
            raise EngineError(
                f"engine response: an id outside the {self.renderer.vocab_size} of the judge's tokenizer"
            )
        return self.renderer.decode(ids)


async def engine_renderer(tokenizers: JudgeTokenizers, claim: Claim[JudgeRequest]) -> Renderer:
    """The tokenizer that the request names. Raises RequestError."""
    name = claim.request.judge.tokenizer
    if not name:
        raise RequestError("judge.tokenizer: engines take token ids, so they need the judge's tokenizer")
    return await tokenizers.renderer(name)


def chat(text: StepText) -> list[ChatMessage]:
    """The prompt as messages, at whose end the judge replies."""
    system = [ChatMessage("system", text.system)] if text.system else []
    return [*system, ChatMessage("user", text.context + text.step + text.question)]


def opened_prompt(renderer: Renderer, text: StepText, opening: str) -> IdsPrompt:
    """The prompt with the beginning of the judge's reply. Raises RequestError if that begins with a thought, in which no verdict counts."""
    ids = renderer.first_prompt(chat(text))
    if opening and renderer.opens_thought(ids):
        raise RequestError(
            f'judge: its chat template begins a thought, so its verdict cannot begin with {opening!r}: use judge.method = "votes", '
            "with templates that give no `opening`"
        )
    return IdsPrompt([*ids, *renderer.encode_text(opening)], opening)


def named(model: str, versions: set[str]) -> str:
    """A model and the versions of its weights that replied."""
    return "@".join(part for part in (model or "model", "+".join(sorted(versions))) if part)
