"""`python -m workers.judge`: one judge process. Takes judge requests from the queue and scores the steps of finished rollouts.

Judges are interchangeable: each needs Redis, and for judges that are models a router of their own (SWERVE_JUDGE_ROUTER_URL) or the
endpoint that a request names. No Docker, and no recipe. After SIGTERM, requests under way get a grace time; then unfinished ones return
to the queue, where the next judge takes them at once.

Exit status: 0 after SIGTERM or SIGINT; 2 if a setting is wrong, or if Redis is absent at the start. What goes away later is an outage:
the judge waits and says so in its heartbeat.
"""

import argparse
import asyncio
import contextlib
import sys

import aiohttp
from arq.connections import ArqRedis
from redis.exceptions import RedisError

from pipeline import census, connection
from pipeline.judge import Judgement, JudgementHead, JudgeMethod, JudgeRequest
from pipeline.kinds import JUDGE
from pipeline.request import Claim
from pipeline.settings import redis_settings
from workers.breaker import Breaker, Breakers, Gate
from workers.claim import Claimer
from workers.judge.endpoint_votes import EndpointVoters
from workers.judge.engine_votes import EngineVoters
from workers.judge.engines import JudgeEngines
from workers.judge.functions import FunctionJudge
from workers.judge.requested import RequestedVoters
from workers.judge.reward_model import RewardVoters
from workers.judge.rollouts import StoredRollouts
from workers.judge.rules import RULES
from workers.judge.session import http_session
from workers.judge.settings import FUNCTIONS_VARIABLE, ROUTER_VARIABLE, JudgeSettings, judge_settings
from workers.judge.stage import StepJudge, judge_rollout
from workers.judge.tokenizers import JudgeTokenizers
from workers.judge.votes import VoteJudge, Voters
from workers.policy.no_engines import NoEngines
from workers.policy.sglang import announced_tokenizers
from workers.process import REDIS_PATIENCE_S, background, beat, run_process, work
from workers.status import EpisodeStatus


async def serve(settings: JudgeSettings) -> None:
    """Judge until told to stop. Raises RedisUnavailable."""
    async with contextlib.AsyncExitStack() as cleanup:
        redis = await connection.connect(redis_settings().url, patience_s=REDIS_PATIENCE_S)
        cleanup.push_async_callback(redis.aclose)
        limit = asyncio.Semaphore(settings.max_votes)
        tokenizers = JudgeTokenizers(announced_tokenizers(redis))
        session = await cleanup.enter_async_context(http_session())
        endpoints = EndpointVoters(session, tokenizers)
        votes, rewards, gate = _engines(session, settings.router_url, tokenizers)
        methods: dict[JudgeMethod, StepJudge] = {
            "votes": VoteJudge(RequestedVoters(votes, endpoints), limit),
            "reward_model": VoteJudge(rewards, limit),
            "rule": FunctionJudge(RULES, "rule", fix="choose one of them"),
            "function": FunctionJudge(
                settings.functions, "function", fix=f"add it to {FUNCTIONS_VARIABLE} of the judges"
            ),
        }
        claimer = judge_claimer(redis, settings.name, methods, {"engine": gate})
        async with background(beat(redis, claimer, slots=settings.slots), claimer.breakers.watch()):
            await work(claimer, slots=settings.slots, drain_s=settings.drain_s)
        with contextlib.suppress(RedisError):
            await census.forget_worker(redis, settings.name)


def _engines(
    session: aiohttp.ClientSession, router_url: str, tokenizers: JudgeTokenizers
) -> tuple[Voters, Voters, Gate]:
    """Models that vote, models with a scalar output, and what holds claims back while their engines are out."""
    if not router_url:
        absent = NoEngines(ROUTER_VARIABLE)
        return absent, absent, absent
    engines = JudgeEngines(session, router_url)
    gate = Breaker("engine", engines.check)
    return EngineVoters(engines, tokenizers), RewardVoters(engines, tokenizers), gate


def judge_claimer(
    redis: ArqRedis, name: str, methods: dict[JudgeMethod, StepJudge], gates: dict[str, Gate]
) -> Claimer[JudgeRequest, Judgement, JudgementHead]:
    """Judges rollouts whose bodies are in `redis`, guarded by a breaker for Redis and by `gates`."""
    rollouts = StoredRollouts(redis)

    async def stage(claim: Claim[JudgeRequest], status: EpisodeStatus) -> Judgement:
        return await judge_rollout(claim, status, rollouts=rollouts, methods=methods)

    breakers = Breakers({"redis": lambda: connection.check(redis)}, gates=gates)
    return Claimer(kind=JUDGE, redis=redis, worker=name, stage=stage, breakers=breakers)


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m workers.judge",
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
