"""Scores steps by votes of a model: several opinions about each step, whose mean is its score. The models are language models, behind
SGLang or behind an OpenAI-compatible server.

All votes of a step use the same prompt, so the first vote is awaited before the others are sent: the engine then has the prompt in its
cache. The first step is judged before the others for the same reason, because all prompts of a rollout have the same beginning. A vote that
fails or takes too long is stored with its error and does not count. If all votes of a rollout failed, or the engines are out afterwards,
the request fails and there is no judgement.

SGLang gets a prompt of token ids, and the vote is parsed from the sampled text; another server gets messages, and the vote is parsed from
its message.
"""

import asyncio
import hashlib
import math
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

import aiohttp
from msgspec.structs import replace

from pipeline.chat import ChatMessage
from pipeline.errors import EngineError, EngineRefused, RequestError
from pipeline.judge import JudgedStep, JudgeRequest, Vote
from pipeline.judge_templates import parse_templates
from pipeline.request import Claim, EpisodeStatus
from workers.judge.engines import RETRY_BUDGET_S, Call, Generated, JudgeEngines
from workers.judge.prompts import (
    CHARS_PER_TOKEN,
    CharacterCutter,
    Cutter,
    JudgeTokenizers,
    P,
    RolloutPrompts,
    StepText,
    TokenCutter,
)
from workers.judge.stage import FinishedRollout, Scored
from workers.policy.endpoint import EndpointServer, EndpointSettings, read_key, wire_message
from workers.policy.formats import ThoughtSplitter, taken_apart
from workers.policy.render import Renderer

SEED_BYTES = 4  # a positive int32, which every server accepts
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Opinion:
    """A model's opinion about one step."""

    value: float | None  # None: it abstains
    text: str


class Voter(Protocol[P]):
    """Asks one model about the steps of one claim's rollout."""

    @property
    def cutter(self) -> Cutter: ...

    @property
    def num_votes(self) -> int:
        """The number of votes about each step."""
        ...

    @property
    def judge(self) -> str:
        """The model and the weights that have replied so far, for display."""
        ...

    def render(self, text: StepText) -> P: ...

    async def vote(self, prompt: P, *, seed: int, name: str) -> Opinion:
        """One opinion; `name` is unique among those of the claim. Raises EngineError."""
        ...

    async def check(self) -> None:
        """Raises EngineError if no vote can succeed now."""
        ...


class Voters(Protocol):
    """Models that vote."""

    async def open(self, claim: Claim[JudgeRequest]) -> Voter[Any]:
        """Opens a voter. Raises RequestError, EngineError."""
        ...


class VoteJudge:
    """The method of judging by votes."""

    def __init__(self, voters: Voters, limit: asyncio.Semaphore) -> None:
        """`limit` bounds the concurrent votes of this process, over all rollouts."""
        self._voters = voters
        self._limit = limit

    async def score(
        self,
        claim: Claim[JudgeRequest],
        rollout: FinishedRollout,
        turns: Sequence[int],
        status: EpisodeStatus,
    ) -> Scored:
        """Scores the steps. Raises RequestError; EngineError if all votes failed."""
        judge = claim.request.judge
        voter = await self._voters.open(claim)
        templates = parse_templates(judge.templates)
        prompts = await asyncio.to_thread(
            RolloutPrompts, rollout, judge, templates, voter.cutter, voter.render
        )
        poll = _Poll(claim, voter, prompts, status, self._limit)
        steps = [await poll.step(turns[0])]
        steps += await _together(poll.step(turn) for turn in turns[1:])
        await poll.check()
        return Scored(steps, voter.judge)


@dataclass(slots=True)
class _Poll(Generic[P]):
    """The votes of one claim."""

    claim: Claim[JudgeRequest]
    voter: Voter[P]
    prompts: RolloutPrompts[P]
    status: EpisodeStatus
    limit: asyncio.Semaphore
    # One prompt is made at a time, in the order of turns
    one_prompt: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_votes: int = 0
    failures: list[EngineError] = field(default_factory=list[EngineError])

    async def step(self, turn: int) -> JudgedStep:
        """The model's result for one turn."""
        async with self.one_prompt:
            prompt = await asyncio.to_thread(self.prompts.of, turn)
        if prompt is None:
            return JudgedStep(turn=turn, score=None, unscored="too_long")
        votes = [await self._vote(prompt, turn, 0)]
        others = range(1, self.voter.num_votes)
        votes += await _together(self._vote(prompt, turn, number) for number in others)
        self.status.turn += 1
        values = [vote.value for vote in votes if vote.value is not None]
        return JudgedStep(
            turn=turn,
            score=sum(values) / len(values) if values else None,
            unscored=None if values else "no_valid_vote",
            votes=tuple(votes),
            prompt_tokens=prompt.num_tokens,
        )

    async def check(self) -> None:
        """Raises EngineError if the votes so far are not enough for a judgement."""
        if self.failures and len(self.failures) == self.num_votes:
            raise self.failures[-1]
        if self.failures:
            await self.voter.check()

    async def _vote(self, prompt: P, turn: int, number: int) -> Vote:
        """Asks for one vote. Its time limit begins when its turn comes among all votes of the process."""
        request = self.claim.request
        seed = vote_seed(request.judge.seed, request.rollout_id, turn, number)
        name = f"{request.id}.{self.claim.attempt}.{turn}.{number}"
        self.num_votes += 1
        async with self.limit:
            started_at = time.monotonic()
            try:
                opinion = await self._opinion(prompt, seed, name, request.judge.vote_s)
                vote = Vote(seed=seed, value=opinion.value, text=opinion.text)
            except EngineError as error:
                self.failures.append(error)
                vote = Vote(seed=seed, value=None, error=str(error))
            return replace(vote, generate_s=time.monotonic() - started_at)

    async def _opinion(self, prompt: P, seed: int, name: str, limit_s: float) -> Opinion:
        """Returns one opinion. Raises EngineError, also when the time is over."""
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                return await self.voter.vote(prompt, seed=seed, name=name)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise EngineError(f"no answer within {limit_s:g} s") from error


def vote_seed(seed: int, rollout_id: str, turn: int, number: int) -> int:
    """The seed of one vote: the same for every attempt, another for every vote, turn and rollout."""
    name = f"{seed}/{rollout_id}/{turn}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=SEED_BYTES).digest()) >> 1


async def _together(work: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    """All results, in order. The first error ends the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


BOX: Final = "\\boxed"
VALUES: Final = {"+1": 1.0, "1": 1.0, "-1": -1.0}


def vote_value(content: str) -> float | None:
    """The value of a reply without its thought; None: the vote abstains."""
    _, box, rest = content.rpartition(BOX)
    rest = rest.lstrip()
    inside, closed, _ = rest.removeprefix("{").partition("}")
    if not box or not rest.startswith("{") or not closed:
        return None
    return VALUES.get(inside.strip())


@dataclass(frozen=True, slots=True)
class RequestedVoters:
    """Opens the model that a claim's request names."""

    engines: Voters
    endpoints: Voters

    async def open(self, claim: Claim[JudgeRequest]) -> Voter[Any]:
        """Opens a voter. Raises RequestError, EngineError."""
        return await (self.endpoints if claim.request.judge.endpoint else self.engines).open(claim)


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    """A prompt as token ids."""

    ids: Sequence[int]
    opening: str = ""  # the beginning of the reply, with which `ids` end

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


class EngineVoters:
    """Language models behind the judge's router."""

    def __init__(self, engines: JudgeEngines, tokenizers: JudgeTokenizers) -> None:
        self._engines = engines
        self._tokenizers = tokenizers

    async def open(self, claim: Claim[JudgeRequest]) -> "EngineVoter":
        """Opens a voter. Raises RequestError if the judge's tokenizer is unknown or cannot be used."""
        renderer = await engine_renderer(self._tokenizers, claim)
        return EngineVoter(self._engines, claim, renderer, TokenCutter(renderer))


@dataclass(frozen=True, slots=True)
class EngineVoter:
    """Votes about the steps of one claim's rollout."""

    engines: JudgeEngines
    claim: Claim[JudgeRequest]
    renderer: Renderer
    cutter: TokenCutter
    versions: set[str] = field(default_factory=set[str])  # versions of weights that replied

    @property
    def num_votes(self) -> int:
        return self.claim.request.judge.num_votes

    @property
    def judge(self) -> str:
        return named(self.claim.request.judge.name, self.versions)

    def render(self, text: StepText) -> IdsPrompt:
        """Renders the prompt. Raises RequestError."""
        return opened_prompt(self.renderer, text, text.opening)

    async def vote(self, prompt: IdsPrompt, *, seed: int, name: str) -> Opinion:
        """Returns one vote. Raises EngineError."""
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
    """The renderer with the tokenizer that the request names. Raises RequestError."""
    name = claim.request.judge.tokenizer
    if not name:
        raise RequestError("judge.tokenizer: engines take token ids, so they need the judge's tokenizer")
    return await tokenizers.renderer(name)


def chat(text: StepText) -> list[ChatMessage]:
    """The prompt as messages, after which the judge replies."""
    system = [ChatMessage("system", text.system)] if text.system else []
    return [*system, ChatMessage("user", text.context + text.step + text.question)]


def opened_prompt(renderer: Renderer, text: StepText, opening: str) -> IdsPrompt:
    """The prompt with the beginning of the judge's reply. Raises RequestError if that begins a thought, because no verdict counts there."""
    ids = renderer.first_prompt(chat(text))
    if opening and renderer.opens_thought(ids):
        raise RequestError(
            f'judge: its chat template begins a thought, so its verdict cannot begin with {opening!r}: use judge.method = "votes", '
            "with templates that give no `opening`"
        )
    return IdsPrompt([*ids, *renderer.encode_text(opening)], opening)


def named(model: str, versions: set[str]) -> str:
    """The name of a model and of the versions of its weights that replied."""
    return "@".join(part for part in (model or "model", "+".join(sorted(versions))) if part)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt as messages."""

    messages: list[ChatMessage]
    num_tokens: int


class EndpointVoters:
    """Opens voters that ask the OpenAI-compatible server named in each request. One object serves all judges of a process."""

    def __init__(self, session: aiohttp.ClientSession, tokenizers: JudgeTokenizers) -> None:
        self._session = session
        self._tokenizers = tokenizers

    async def open(self, claim: Claim[JudgeRequest]) -> "EndpointVoter":
        """Opens a voter. Raises RequestError for a key that cannot be read, or a tokenizer that is unknown."""
        endpoint = claim.request.judge.endpoint
        if endpoint is None:
            raise RequestError("the request names no endpoint")
        settings = EndpointSettings(retry_budget_s=RETRY_BUDGET_S, first_reply_s=RETRY_BUDGET_S)
        server = EndpointServer(self._session, endpoint, read_key(endpoint), settings)
        name = claim.request.judge.tokenizer
        return EndpointVoter(server, claim, await self._tokenizers.renderer(name) if name else None)


@dataclass(frozen=True, slots=True)
class EndpointVoter:
    """Votes about the steps of one claim's rollout."""

    server: EndpointServer
    claim: Claim[JudgeRequest]
    renderer: Renderer | None  # None: the server's tokenizer is not known

    @property
    def cutter(self) -> Cutter:
        return TokenCutter(self.renderer) if self.renderer else CharacterCutter()

    @property
    def num_votes(self) -> int:
        return self.claim.request.judge.num_votes

    @property
    def judge(self) -> str:
        return self.server.endpoint.model

    def render(self, text: StepText) -> ChatPrompt:
        """Renders the prompt. Raises RequestError."""
        if text.opening:
            raise RequestError(
                "judge.templates: opening: the beginning of an endpoint's reply cannot be set; remove `opening`"
            )
        messages = chat(text)
        if self.renderer is not None:
            return ChatPrompt(messages, len(self.renderer.first_prompt(messages)))
        num_chars = sum(len(message.content) for message in messages)
        return ChatPrompt(messages, math.ceil(num_chars / CHARS_PER_TOKEN))

    async def vote(self, prompt: ChatPrompt, *, seed: int, name: str) -> Opinion:
        """Returns one vote. Raises EngineError."""
        judge, endpoint = self.claim.request.judge, self.server.endpoint
        body: dict[str, Any] = {
            "model": endpoint.model,
            "messages": [wire_message(message) for message in prompt.messages],
            "temperature": judge.temperature,
            "seed": seed,
        }
        if "max_completion_tokens" not in endpoint.options:  # newer servers' name of the same field
            body["max_tokens"] = judge.max_new_tokens
        answer = await self.server.ask(body | endpoint.options)
        if answer is None:
            raise EngineRefused(
                "prompt and reply exceed the server's context: lower judge.prompt_tokens or judge.max_new_tokens"
            )
        reply = ThoughtSplitter(exact=False)(answer.reply)
        text = f"<think>{reply.reasoning}</think>{reply.content}" if reply.reasoning else reply.content
        return Opinion(vote_value(reply.content), text)

    async def check(self) -> None:
        """Does nothing, because only a request shows whether an endpoint is out."""
