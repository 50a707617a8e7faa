"""Scores steps by votes of a model: several opinions about each step, whose mean is its score.

All votes of a step use the same prompt, so the first vote is awaited before the others are sent: the engine then has the prompt in its
cache. The first step is judged before the others for the same reason, because all prompts of a rollout have the same beginning. A vote that
fails or takes too long is stored with its error and does not count. If all votes of a rollout failed, or the engines are out afterwards,
the request fails and there is no judgement.
"""

import asyncio
import hashlib
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

from msgspec.structs import replace

from pipeline.errors import EngineError
from pipeline.judge import JudgedStep, JudgeRequest, Vote
from pipeline.judge_templates import parse_templates
from pipeline.request import Claim, EpisodeStatus
from workers.judge.prompts import Cutter, P, RolloutPrompts, StepText
from workers.judge.stage import FinishedRollout, Scored

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
