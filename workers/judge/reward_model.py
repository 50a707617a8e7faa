"""Scores by a model with one scalar output, instead of votes.

The kind of model decides the request; a router passes both paths on:

- a reward model (SGLang with --is-embedding; its head has one output, or two for bad and good) gets the conversation: issue and past steps
as the user's message, the step as the assistant's. /v1/embeddings returns the head's output r, or r = good - bad; - a language model gets
the prompt of a vote and the beginning of its box, and returns the log-probs of + and - as the next token: r is their difference. This costs
only one token.

The score is tanh(r / 2) = 2 sigmoid(r) - 1: the probability that the step is good, by the Bradley-Terry model that reward models are
trained with, mapped from 0..1 to -1..1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.chat import ChatMessage
from pipeline.errors import EngineError, EngineRefused, RequestError
from pipeline.judge import JudgeRequest
from pipeline.request import Claim
from workers.judge.engines import Call, Embedded, Generated, JudgeEngines, ModelInfo
from workers.judge.prompts import JudgeTokenizers, StepText, TokenCutter
from workers.judge.votes import IdsPrompt, Opinion, Voter, engine_renderer, named, opened_prompt
from workers.policy.render import Renderer

BOX_OPENING = "\\boxed{"


class RewardVoters:
    """Models with one scalar output, behind the judge's router."""

    def __init__(self, engines: JudgeEngines, tokenizers: JudgeTokenizers) -> None:
        self._engines = engines
        self._tokenizers = tokenizers

    async def open(self, claim: Claim[JudgeRequest]) -> Voter[Any]:
        """Opens a voter. Raises RequestError, EngineError."""
        renderer = await engine_renderer(self._tokenizers, claim)
        info = await self._engines.info()
        if info.is_generation:
            return LabelVoter(self._engines, claim, renderer, TokenCutter(renderer), labels(renderer))
        return HeadVoter(self._engines, claim, renderer, TokenCutter(renderer), info)


@dataclass(frozen=True, slots=True)
class HeadVoter:
    """The output of a reward model's head."""

    engines: JudgeEngines
    claim: Claim[JudgeRequest]
    renderer: Renderer
    cutter: TokenCutter
    info: ModelInfo
    num_votes: int = 1

    @property
    def judge(self) -> str:
        version = self.info.weight_version
        return named(self.claim.request.judge.name, set() if version is None else {str(version)})

    def render(self, text: StepText) -> IdsPrompt:
        asked = ChatMessage("user", f"{text.system}\n\n{text.context}".lstrip())
        return IdsPrompt(self.renderer.conversation([asked, ChatMessage("assistant", text.step)]))

    async def vote(self, prompt: IdsPrompt, *, seed: int, name: str) -> Opinion:
        """Returns one score. Raises EngineError."""
        body = {"model": self.info.served_model_name, "input": prompt.ids, "encoding_format": "float"}
        call = Call("/v1/embeddings", body, self.claim.request.rollout_id)
        answer = await self.engines.ask(call, Embedded)
        output = answer.data[0].embedding if answer.data else []
        match output:
            case [reward]:
                return _opinion(reward, f"reward {reward:.6g}")
            case [bad, good]:
                return _opinion(good - bad, f"bad {bad:.6g}, good {good:.6g}")
            case _:
                raise EngineRefused(
                    f"the model has {len(output)} outputs; a judge of steps has one, or two for bad and good"
                )

    async def check(self) -> None:
        """Raises EngineError if the engines are out."""
        await self.engines.check()


@dataclass(frozen=True, slots=True)
class LabelVoter:
    """The log-probs with which a language model begins its verdict."""

    engines: JudgeEngines
    claim: Claim[JudgeRequest]
    renderer: Renderer
    cutter: TokenCutter
    labels: tuple[int, int]  # tokens of "+" and "-"
    num_votes: int = 1
    versions: set[str] = field(default_factory=set[str])

    @property
    def judge(self) -> str:
        return named(self.claim.request.judge.name, self.versions)

    def render(self, text: StepText) -> IdsPrompt:
        """Renders the prompt. Raises RequestError."""
        return opened_prompt(self.renderer, text, BOX_OPENING)

    async def vote(self, prompt: IdsPrompt, *, seed: int, name: str) -> Opinion:
        """Returns one score. Raises EngineError."""
        body = {
            "rid": name,
            "input_ids": prompt.ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": -1,  # log-probs of the output only, so that a cached prefix remains usable
            "token_ids_logprob": list(self.labels),
            "stream": False,
        }
        answer = await self.engines.ask(Call("/generate", body, self.claim.request.rollout_id), Generated)
        if answer.meta_info.weight_version is not None:
            self.versions.add(str(answer.meta_info.weight_version))
        rows = answer.meta_info.output_token_ids_logprobs
        found = {token: logprob for logprob, token, _ in rows[0]} if rows else {}
        if set(self.labels) - found.keys():
            raise EngineError("engine response: no log-probs of the labels that were asked about")
        good, bad = (found[token] for token in self.labels)
        return _opinion(good - bad, f"log-prob of + {good:.6g}, of - {bad:.6g}")

    async def check(self) -> None:
        """Raises EngineError if the engines are out."""
        await self.engines.check()


def labels(renderer: Renderer) -> tuple[int, int]:
    """The tokens with which +1 and -1 begin. Raises RequestError if they begin with the same."""
    good, bad = (first_id(renderer.encode_text(text)) for text in ("+1", "-1"))
    if good == bad:
        raise RequestError("judge.tokenizer: +1 and -1 begin with the same token, so they cannot be compared")
    return good, bad


def first_id(ids: Sequence[int]) -> int:
    return ids[0] if ids else -1


def _opinion(reward: float, text: str) -> Opinion:
    """The opinion from a reward. Raises EngineError if the reward is not a number, which is a failure of the engine."""
    if not math.isfinite(reward):
        raise EngineError(f"engine response: {text}")
    return Opinion(math.tanh(reward / 2), text)
