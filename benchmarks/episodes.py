"""Whole episodes per second: 20 scripted turns in a container, then the patch judged in a fresh one.

Ours is the worker's own stage with its scripted policy and its grader; the rival is mini-swe-agent's agent, its Docker
environment and its model that replays, with the least that can be called grading in a second environment of its own.
Same commands, image, cores, and number at once. Ours ends with both containers gone. The rival only asks for
their end, and what is left of them after a block is removed before anybody else is measured.
`python -m benchmarks.episodes [--json] [--short]`
"""

import asyncio
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import resources

from benchmarks import bug, chat_tokenizer, mini_swe_agent
from benchmarks.engine_api import EngineApi
from benchmarks.mini_swe_agent import RIVAL
from benchmarks.report import Comparison, compared, main, p50, shuffled
from workers.claim import Progress
from workers.grading.grade import Grader
from workers.policy.scripted import ScriptedPolicies
from workers.rollout import run_rollout
from workers.sandbox.docker import DockerSandboxes

OURS = "ours"

Episode = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Plan:
    at_once: int
    num_rounds: int
    num_episodes: int  # of a block


LONG = Plan(at_once=8, num_rounds=4, num_episodes=32)
SHORT = Plan(at_once=2, num_rounds=1, num_episodes=2)


@dataclass(slots=True)
class Blocks:
    """An entry per round."""

    per_s: list[list[float]] = field(default_factory=list[list[float]])
    latencies: list[list[float]] = field(default_factory=list[list[float]])  # seconds


async def episodes(short: bool) -> list[Comparison]:
    plan = SHORT if short else LONG
    loop = asyncio.get_running_loop()
    agent_config = resources.files("workers.agent").joinpath("prompts/default.yaml").read_text()
    policies = ScriptedPolicies(chat_tokenizer.bundle(), bug.REPLIES)
    fleet = DockerSandboxes(fleet=f"bench-{secrets.token_hex(4)}")

    async def ours(number: int) -> None:
        claim = bug.claim(number, agent_config=agent_config)
        told = await run_rollout(claim, Progress(), policies=policies, sandboxes=fleet, grader=Grader(fleet))
        assert told.reward is not None, told.outcome
        assert told.reward.resolved, told.reward
        assert len(told.turns) == len(bug.COMMANDS)

    with bug.image() as image, ThreadPoolExecutor(plan.at_once) as threads:
        mini_swe_agent.parts()

        async def rival(_: int) -> None:
            play = partial(mini_swe_agent.play_and_grade, image, bug.COMMANDS)
            assert await loop.run_in_executor(threads, play)

        try:
            await ours(0)  # looks through the image, once per process
            blocks = await measured({OURS: ours, RIVAL: rival}, plan)
        finally:
            await fleet.close()
    return comparisons(blocks, plan)


async def measured(sides: dict[str, Episode], plan: Plan) -> dict[str, Blocks]:
    found = {name: Blocks() for name in sides}
    for _ in range(plan.num_rounds):
        for name in shuffled(sides):
            await _block(found[name], sides[name], plan)
            await _remove_leftovers()
    return found


async def _block(into: Blocks, episode: Episode, plan: Plan) -> None:
    remaining, latencies = iter(range(plan.num_episodes)), list[float]()

    async def slot() -> None:
        for number in remaining:
            began = time.perf_counter()
            await episode(number)
            latencies.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(slot() for _ in range(plan.at_once)))
    into.per_s.append([plan.num_episodes / (time.perf_counter() - began)])
    into.latencies.append(latencies)


async def _remove_leftovers() -> None:
    """So that nobody is measured while the rival's containers are being stopped, for ten seconds each."""
    async with EngineApi() as api:
        for container in await api.labelled(f"{bug.LABEL}=1"):
            await api.remove(container)


def comparisons(blocks: dict[str, Blocks], plan: Plan) -> list[Comparison]:
    ours, theirs = blocks[OURS], blocks[RIVAL]
    against = partial(compared, "episodes", rival_name=RIVAL)
    what = f"{len(bug.COMMANDS)} steps and a fresh grading container, {plan.at_once} at once"
    return [
        against(ours.per_s, theirs.per_s, p50, unit=f"episodes per second, {what}"),
        against(ours.latencies, theirs.latencies, p50, unit=f"s per episode, p50, {what}"),
    ]


if __name__ == "__main__":
    sys.exit(main("episodes", __doc__, episodes))
