"""`python -m workers.judge`: one judge process, which takes judge requests from the queue and scores the steps of finished rollouts,
or has a teacher give log-probs of their tokens.

Judges are interchangeable: each needs Redis, and for judges that are models a router of their own (SWERVE_JUDGE_ROUTER_URL) or the endpoint
that a request names. It needs no Docker and no recipe. After SIGTERM, running requests get a grace time; then unfinished ones return to the
queue, where the next judge takes them at once.

Exit status: 0 after SIGTERM or SIGINT; 1 if Redis is absent at the start; 2 if a setting is wrong. If a service fails later, that is an
outage: the judge waits and reports it in its heartbeat. Variables: SWERVE_REDIS_URL, SWERVE_JUDGE_ROUTER_URL, SWERVE_JUDGE_SLOTS (8),
SWERVE_JUDGE_MAX_VOTES (64), SWERVE_JUDGE_FUNCTIONS, SWERVE_JUDGE_NAME, SWERVE_DRAIN_S (5); workers/judge/README.md has each in full.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from arq.connections import ArqRedis
from redis.exceptions import RedisError

from pipeline import census, connection
from pipeline.commandline import program
from pipeline.judge import Judgement, JudgementHead, JudgeMethod, JudgeRequest
from pipeline.kinds import JUDGE
from pipeline.request import Claim, EpisodeStatus
from pipeline.settings import check_variables, redis_settings
from workers.breaker import Breaker, Breakers, Gate
from workers.claim import Claimer
from workers.judge.engines import JudgeEngines, http_session
from workers.judge.functions import RULES, FunctionJudge, StepFunction, load_functions
from workers.judge.prompts import JudgeTokenizers
from workers.judge.reward_model import RewardVoters
from workers.judge.stage import StepJudge, StoredRollouts, judge_rollout
from workers.judge.teacher import TeacherJudge
from workers.judge.votes import EndpointVoters, EngineVoters, RequestedVoters, VoteJudge
from workers.policy.requested import NoEngines
from workers.policy.sglang import TokenizerSource, announced_tokenizers
from workers.process import REDIS_PATIENCE_S, background, beat, run_process, work
from workers.settings import positive

FUNCTIONS_VARIABLE = "SWERVE_JUDGE_FUNCTIONS"
ROUTER_VARIABLE = "SWERVE_JUDGE_ROUTER_URL"


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    name: str  # unique in the fleet
    slots: int  # rollouts judged at once
    router_url: str  # "": no engines, only requests that need none are judged
    max_votes: int  # most requests to engines and endpoints at once, for all rollouts together
    functions: Mapping[str, StepFunction]  # functions that requests may name
    drain_s: float  # grace after SIGTERM, before unfinished requests return to the queue


def judge_settings() -> JudgeSettings:
    check_variables()
    try:
        functions = load_functions(os.environ.get(FUNCTIONS_VARIABLE, "").split())
    except ValueError as error:
        raise ValueError(f"{FUNCTIONS_VARIABLE}: {error}") from error
    return JudgeSettings(
        name=os.environ.get("SWERVE_JUDGE_NAME") or f"judge/{socket.gethostname()}/{os.getpid()}",
        slots=positive("SWERVE_JUDGE_SLOTS", 8),
        router_url=os.environ.get(ROUTER_VARIABLE, "").rstrip("/"),
        max_votes=positive("SWERVE_JUDGE_MAX_VOTES", 64),
        functions=functions,
        drain_s=float(positive("SWERVE_DRAIN_S", 5)),
    )


async def serve(settings: JudgeSettings) -> None:
    """Judges until a signal arrives. Raises RedisUnavailable."""
    async with contextlib.AsyncExitStack() as cleanup:
        redis = await connection.connect(redis_settings().url, patience_s=REDIS_PATIENCE_S)
        cleanup.push_async_callback(redis.aclose)
        session = await cleanup.enter_async_context(http_session())
        url = settings.router_url
        engines = JudgeEngines(session, url) if url else NoEngines(ROUTER_VARIABLE)
        gate: Gate = engines if isinstance(engines, NoEngines) else Breaker("engine", engines.check)
        methods = _methods(settings, session, engines, announced_tokenizers(redis))
        claimer = judge_claimer(redis, settings.name, methods, {"engine": gate})
        async with background(beat(redis, claimer, slots=settings.slots), claimer.breakers.watch()):
            await work(claimer, slots=settings.slots, drain_s=settings.drain_s)
        with contextlib.suppress(RedisError):
            await census.forget_worker(redis, settings.name)


def _methods(
    settings: JudgeSettings,
    session: aiohttp.ClientSession,
    engines: JudgeEngines | NoEngines,
    announced: TokenizerSource,
) -> dict[JudgeMethod, StepJudge]:
    limit, tokenizers = asyncio.Semaphore(settings.max_votes), JudgeTokenizers(announced)
    is_absent = isinstance(engines, NoEngines)
    votes = engines if is_absent else EngineVoters(engines, tokenizers)
    rewards = engines if is_absent else RewardVoters(engines, tokenizers)
    return {
        "votes": VoteJudge(RequestedVoters(votes, EndpointVoters(session, tokenizers)), limit),
        "reward_model": VoteJudge(rewards, limit),
        "rule": FunctionJudge(RULES, "rule", fix="choose one of them"),
        "function": FunctionJudge(
            settings.functions, "function", fix=f"add it to {FUNCTIONS_VARIABLE} of the judges"
        ),
        "teacher": TeacherJudge(engines, announced, limit),
    }


def judge_claimer(
    redis: ArqRedis, name: str, methods: dict[JudgeMethod, StepJudge], gates: dict[str, Gate]
) -> Claimer[JudgeRequest, Judgement, JudgementHead]:
    """A claimer that judges rollouts whose bodies are in `redis`, guarded by a breaker for Redis and by `gates`."""
    rollouts = StoredRollouts(redis)

    async def stage(claim: Claim[JudgeRequest], status: EpisodeStatus) -> Judgement:
        return await judge_rollout(claim, status, rollouts=rollouts, methods=methods)

    breakers = Breakers({"redis": lambda: connection.check(redis)}, gates=gates)
    return Claimer(kind=JUDGE, redis=redis, worker=name, stage=stage, breakers=breakers)


def main() -> int:
    argparse.ArgumentParser(
        prog=program("workers.judge"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    try:
        settings = judge_settings()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return run_process("judge", lambda: serve(settings))


if __name__ == "__main__":
    sys.exit(main())
