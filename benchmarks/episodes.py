"""Whole episodes per second: 20 scripted turns in a container, then the patch is graded in a fresh one.

Ours is the worker's own stage with its scripted policy and its grader. The rival is mini-swe-agent's agent with its Docker
environment and its replaying model, and the simplest possible grading in a second environment. Both have the same
commands, image, cores and concurrency. Ours ends when both containers are removed. The rival only requests their removal;
what is left of them after a block is removed before the next measurement.
`python -m benchmarks.episodes [--json] [--short]`
"""

import asyncio
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import resources

from benchmarks import bug, chat_tokenizer, mini_swe_agent
from benchmarks.docker_api import DockerApi
from benchmarks.mini_swe_agent import RIVAL
from benchmarks.report import Comparison, Measurements, compared, main, p50, shuffled
from workers.grading.grade import Grader
from workers.policy.scripted import ScriptedPolicies
from workers.rollout import run_rollout
from workers.sandbox.docker import DockerSandboxes
from workers.status import EpisodeStatus

OURS = "ours"

Episode = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class EpisodesPlan:
    at_once: int
    num_rounds: int
    num_episodes: int  # of a block


LONG = EpisodesPlan(at_once=8, num_rounds=4, num_episodes=32)
SHORT = EpisodesPlan(at_once=2, num_rounds=1, num_episodes=2)


async def episodes(short: bool) -> list[Comparison]:
    plan = SHORT if short else LONG
    loop = asyncio.get_running_loop()
    agent_config = resources.files("workers.agent").joinpath("prompts/default.yaml").read_text()
    policies = ScriptedPolicies(chat_tokenizer.bundle(), bug.REPLIES)
    fleet = DockerSandboxes(fleet=f"bench-{secrets.token_hex(4)}")

    async def ours(number: int) -> None:
        claim = bug.claim(number, agent_config=agent_config)
        trajectory = await run_rollout(
            claim, EpisodeStatus(), policies=policies, sandboxes=fleet, grader=Grader(fleet)
        )
        assert trajectory.reward is not None, trajectory.outcome
        assert trajectory.reward.resolved, trajectory.reward
        assert len(trajectory.turns) == len(bug.COMMANDS)

    with bug.image() as image, ThreadPoolExecutor(plan.at_once) as threads:
        mini_swe_agent.parts()

        async def rival(_: int) -> None:
            play = partial(mini_swe_agent.play_and_grade, image, bug.COMMANDS)
            assert await loop.run_in_executor(threads, play)

        try:
            await ours(0)  # inspects the image, once per process
            blocks = await measured({OURS: ours, RIVAL: rival}, plan)
        finally:
            await fleet.close()
    return comparisons(blocks, plan)


async def measured(sides: dict[str, Episode], plan: EpisodesPlan) -> dict[str, Measurements]:
    found = {name: Measurements() for name in sides}
    for _ in range(plan.num_rounds):
        for name in shuffled(sides):
            await _block(found[name], sides[name], plan)
            await _remove_leftovers()
    return found


async def _block(into: Measurements, episode: Episode, plan: EpisodesPlan) -> None:
    remaining, latencies = iter(range(plan.num_episodes)), list[float]()

    async def slot() -> None:
        for number in remaining:
            began = time.perf_counter()
            await episode(number)
            latencies.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(slot() for _ in range(plan.at_once)))
    into.per_s.append([plan.num_episodes / (time.perf_counter() - began)])
    into.latencies_s.append(latencies)


async def _remove_leftovers() -> None:
    """Stopping the rival's containers takes ten seconds each, and would disturb the next measurement."""
    async with DockerApi() as api:
        for container in await api.labelled(f"{bug.LABEL}=1"):
            await api.remove(container)


def comparisons(blocks: dict[str, Measurements], plan: EpisodesPlan) -> list[Comparison]:
    ours, theirs = blocks[OURS], blocks[RIVAL]
    against = partial(compared, "episodes", rival_name=RIVAL)
    what = f"{len(bug.COMMANDS)} steps and a fresh grading container, {plan.at_once} at once"
    return [
        against(ours.per_s, theirs.per_s, p50, unit=f"episodes per second, {what}"),
        against(ours.latencies_s, theirs.latencies_s, p50, unit=f"s per episode, p50, {what}"),
    ]


if __name__ == "__main__":
    sys.exit(main("episodes", __doc__, episodes))
