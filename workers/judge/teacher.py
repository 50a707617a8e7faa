"""Log-probs that a teacher gives the tokens that the policy sampled, for on-policy distillation: docs/distillation.md.

One request is made for each unbroken run of the rollout's tokens (`runs_of` in pipeline/trajectory.py): it holds exactly the ids that the
policy's engine held, the teacher's engine returns the log-prob of each id given all ids before it, and nothing is sampled. Requests of one
rollout follow one another, so that a run which begins as an earlier one does finds these tokens in the engine's cache.

SGLang computes log-probs of a prompt at temperature 1, whatever temperature the request names, so the trainer refuses a teacher for a
policy that samples at another one. Every sampled token gets a log-prob that is a number and not above 0, from an answer about the ids that
were sent; otherwise the judgement fails. No token gets a default.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from pipeline.errors import EngineError, RequestError
from pipeline.judge import JudgedStep, JudgeRequest
from pipeline.message import Float32s, pack_float32s, unpack_int32s
from pipeline.request import Claim, EpisodeStatus
from pipeline.tokenizer import TokenizerBundle, vocabulary_difference
from pipeline.trajectory import Turn, logprob_fault, runs_of
from workers.judge.engines import Call, Generated, JudgeEngines
from workers.judge.stage import FinishedRollout, Scored
from workers.judge.votes import named
from workers.policy.requested import NoEngines
from workers.policy.sglang import TokenizerSource

log = logging.getLogger("swerve.worker")

TEMPERATURE: Final = 1.0
"""The temperature at which an engine computes log-probs of a prompt."""


@dataclass(frozen=True, slots=True)
class SampledSpan:
    """The tokens of a run that the policy sampled in one turn, from start (inclusive) to end (exclusive)."""

    turn: int
    start: int
    end: int


@dataclass(slots=True)
class TaughtRun:
    """A run of tokens, and the replies in it that are trained."""

    ids: list[int] = field(default_factory=list[int])
    replies: list[SampledSpan] = field(default_factory=list[SampledSpan])

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def prefix(self, num_tokens: int) -> "TaughtRun":
        """A run that starts with the first tokens of this one; their replies stay with this one."""
        return TaughtRun(self.ids[:num_tokens])

    def extend(self, number: int, turn: Turn) -> None:
        self.ids += unpack_int32s(turn.fed)
        start = len(self.ids)
        self.ids += unpack_int32s(turn.sampled)
        if turn.sampled and not turn.aside:
            self.replies.append(SampledSpan(number, start, len(self.ids)))


def taught_runs(turns: Sequence[Turn], *, vocab_size: int) -> list[TaughtRun]:
    """The runs that hold a trained reply. Raises RequestError for turns that no engine can have held, and for an id outside of the
    vocabulary.
    """
    try:
        runs = [run for run in runs_of(turns, TaughtRun) if run.replies]
    except ValueError as error:
        raise RequestError(f"the rollout's tokens: {error}") from error
    for run in runs:
        if run.replies[0].start == 0:
            raise RequestError(
                f"turn {run.replies[0].turn} begins with a sampled token: nothing was fed before it"
            )
        if not 0 <= min(run.ids) <= max(run.ids) < vocab_size:
            outside = next(token for token in run.ids if not 0 <= token < vocab_size)
            raise RequestError(
                f"token id {outside} is outside of the teacher's vocabulary of {vocab_size}: the teacher has to be a model with the "
                "policy's tokenizer"
            )
    return runs


class TeacherJudge:
    """The method of judging by a teacher's log-probs. It gives no scores."""

    def __init__(
        self,
        engines: JudgeEngines | NoEngines,
        tokenizers: TokenizerSource,
        limit: asyncio.Semaphore,
    ) -> None:
        """`limit` bounds the concurrent requests of this process, over all rollouts."""
        self._engines = engines
        self._tokenizers = tokenizers
        self._limit = limit
        self._compared: set[str] = set()  # tokenizers that the engines' model has been compared with

    async def score(
        self,
        claim: Claim[JudgeRequest],
        rollout: FinishedRollout,
        turns: Sequence[int],
        status: EpisodeStatus,
    ) -> Scored:
        """The log-probs of these turns. Raises RequestError; EngineError if the engines serve a model with another vocabulary, or if one
        answer cannot be used, because a rollout is taught as a whole or not at all.
        """
        if isinstance(self._engines, NoEngines):
            await self._engines.open(claim)
        judge = claim.request.judge
        bundle = await self._tokenizers(judge.tokenizer)
        if bundle is None:
            raise RequestError(f"judge.tokenizer: tokenizer {judge.tokenizer!r} was never announced")
        if judge.tokenizer not in self._compared and await _compare(self._engines, bundle):
            self._compared.add(judge.tokenizer)
        runs = await asyncio.to_thread(taught_runs, rollout.turns, vocab_size=bundle.vocab_size)
        requests = _TeacherRequests(self._engines, claim, versions=set())
        found: dict[int, Float32s] = {}
        for number, run in enumerate(runs):
            async with self._limit:
                found |= await requests.logprobs(run, number)
            status.turn += len(run.replies)
        return Scored([_step(turn, found.get(turn)) for turn in turns], named(judge.name, requests.versions))


async def _compare(engines: JudgeEngines, bundle: TokenizerBundle) -> bool:
    """Compares the vocabulary of the model that the engines serve with that of `bundle`, by the tokenizer in the directory that they name;
    they load no tokenizer. Nothing is compared where this process cannot read that directory. Returns False if no engine names its
    directory at the moment. Raises EngineError.
    """
    try:
        info = await engines.info()
    except EngineError:  # the request about the rollout says what is wrong, if anything is
        return False
    path = Path(info.model_path) / "tokenizer.json"
    try:
        served = replace(bundle, tokenizer_json=await asyncio.to_thread(path.read_bytes))
        difference = vocabulary_difference(bundle, served, whose="judge.tokenizer")
    except (OSError, msgspec.DecodeError) as error:
        log.info("the vocabulary of the teacher's engines is not compared with judge.tokenizer: %s", error)
        return True
    if difference:
        raise EngineError(
            f"judge.tokenizer: the teacher's engines serve {info.model_path}, which has another vocabulary: {difference}; start them with "
            "the model whose directory judge.tokenizer names"
        )
    return True


def _step(turn: int, logprobs: Float32s | None) -> JudgedStep:
    if logprobs is None:
        return JudgedStep(turn=turn, score=None, unscored="aside")
    return JudgedStep(turn=turn, score=None, logprobs=logprobs)


@dataclass(frozen=True, slots=True)
class _TeacherRequests:
    """The requests about one claim's rollout."""

    engines: JudgeEngines
    claim: Claim[JudgeRequest]
    versions: set[str]  # versions of the teacher's weights that replied

    async def logprobs(self, run: TaughtRun, number: int) -> dict[int, Float32s]:
        """The log-probs of each trained reply of a run, by turn. Raises EngineError, also when the time is over."""
        limit_s = self.claim.request.judge.vote_s
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                answer = await self._ask(run, number)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise EngineError(f"no answer within {limit_s:g} s") from error
        if answer.meta_info.weight_version is not None:
            self.versions.add(str(answer.meta_info.weight_version))
        return dict(_packed(run, answer))

    async def _ask(self, run: TaughtRun, number: int) -> Generated:
        request = self.claim.request
        body = {
            "rid": f"{request.id}.{self.claim.attempt}.{number}",
            "input_ids": run.ids,
            "sampling_params": {"temperature": TEMPERATURE, "max_new_tokens": 0},
            "return_logprob": True,
            # The first token from here on has no log-prob in the answer, and what is before it may come from the cache.
            "logprob_start_len": run.replies[0].start - 1,
            "stream": False,
        }
        return await self.engines.ask(Call("/generate", body, request.rollout_id), Generated)


def _packed(run: TaughtRun, answer: Generated) -> Iterator[tuple[int, Float32s]]:
    """The log-probs of each reply, by turn. Raises EngineError if the answer is not about these ids, or has no usable log-prob of one."""
    first = run.replies[0].start - 1
    rows = answer.meta_info.input_token_logprobs or []
    if [token for _, token, _ in rows] != run.ids[first:]:
        raise EngineError(
            f"engine response: input_token_logprobs are not those of the {len(run.ids) - first} ids that were asked about"
        )
    for reply in run.replies:
        span = rows[reply.start - first : reply.end - first]
        logprobs = [logprob for logprob, _, _ in span if logprob is not None]
        if fault := logprob_fault(logprobs, reply.end - reply.start):
            raise EngineError(f"engine response: turn {reply.turn}: {fault}")
        yield reply.turn, pack_float32s(logprobs)
