"""Whole episodes per second: 20 scripted turns in a container, then the patch is graded in a fresh one. Every other patch is wrong.

Ours is the worker's own stage with its scripted policy and its grader, which runs a control after each pass; the same
without controls shows what they cost. The rival is mini-swe-agent's agent with its Docker
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
from pipeline.request import EpisodeStatus
from pipeline.task import Calibration, pack
from workers.grading.defence.survey import Surveys
from workers.grading.grade import Grader
from workers.policy.scripted import ScriptedPolicies
from workers.rollout import run_rollout
from workers.sandbox.docker import DockerSandboxes
from workers.verify.calibrating import Calibrator

OURS = "ours"
UNCONTROLLED = "ours without controls"

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
    agent_config = resources.files("workers.agent").joinpath("prompts/default.yaml").read_text()
    fleet = DockerSandboxes(fleet=f"bench-{secrets.token_hex(4)}")

    with bug.image() as image, ThreadPoolExecutor(plan.at_once) as threads:
        mini_swe_agent.parts()
        try:
            ours = Ours(fleet, agent_config, pack(await calibrated(fleet)), Surveys())
            sides = {
                OURS: partial(ours.play, control_share=1.0),
                UNCONTROLLED: partial(ours.play, control_share=0.0),
                RIVAL: partial(rival, image, threads),
            }
            for episode in (sides[OURS], sides[UNCONTROLLED]):
                await episode(0)  # inspects the image, once per process
            blocks = await measured(sides, plan)
        finally:
            await fleet.close()
    return comparisons(blocks, plan)


def is_right(number: int) -> bool:
    """Whether the policy of this episode finds the fix: a success rate of one half."""
    return number % 2 == 0


async def calibrated(fleet: DockerSandboxes) -> Calibration:
    """The calibration of the task, as verification makes it."""
    calibration = await Calibrator(Grader(fleet), fleet, num_controls=3).calibrate(bug.claim(), bug.KNOWN_FIX)
    assert calibration.contradictions, "no test of the benchmark's task can be made to fail"
    return calibration


@dataclass(frozen=True, slots=True)
class Ours:
    """Episodes by the worker's own stage."""

    fleet: DockerSandboxes
    agent_config: str
    calibration: bytes
    surveys: Surveys

    async def play(self, number: int, *, control_share: float) -> None:
        commands = bug.COMMANDS if is_right(number) else bug.WRONG_COMMANDS
        trajectory = await run_rollout(
            bug.claim(
                number,
                agent_config=self.agent_config,
                calibration=self.calibration,
                control_share=control_share,
            ),
            EpisodeStatus(),
            policies=ScriptedPolicies(chat_tokenizer.bundle(), bug.replies(commands)),
            sandboxes=self.fleet,
            grader=Grader(self.fleet, surveys=self.surveys),
        )
        reward = trajectory.reward
        assert reward is not None, trajectory.outcome
        assert reward.resolved == is_right(number), reward
        assert reward.control == (("confirmed" if control_share else "off") if reward.resolved else ""), (
            reward
        )
        assert len(trajectory.turns) == len(commands)


async def rival(image: str, threads: ThreadPoolExecutor, number: int) -> None:
    """The same episode by the rival."""
    commands = bug.COMMANDS if is_right(number) else bug.WRONG_COMMANDS
    play = partial(mini_swe_agent.play_and_grade, image, commands)
    assert await asyncio.get_running_loop().run_in_executor(threads, play) == is_right(number)


async def measured(sides: dict[str, Episode], plan: EpisodesPlan) -> dict[str, Measurements]:
    found = {name: Measurements() for name in sides}
    for _ in range(plan.num_rounds):
        for name in shuffled(sides):
            await _block(found[name], sides[name], plan)
            await _remove_leftovers()
    return found


async def _block(into: Measurements, episode: Episode, plan: EpisodesPlan) -> None:
    remaining, passed_s = iter(range(plan.num_episodes)), list[float]()

    async def slot() -> None:
        for number in remaining:
            began = time.perf_counter()
            await episode(number)
            if is_right(number):
                passed_s.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(slot() for _ in range(plan.at_once)))
    into.per_s.append([plan.num_episodes / (time.perf_counter() - began)])
    into.latencies_s.append(passed_s)


async def _remove_leftovers() -> None:
    """Stopping the rival's containers takes ten seconds each, and would disturb the next measurement."""
    async with DockerApi() as api:
        for container in await api.labelled(f"{bug.LABEL}={bug.OWNER}"):
            await api.remove(container)


def comparisons(blocks: dict[str, Measurements], plan: EpisodesPlan) -> list[Comparison]:
    ours = blocks[OURS]
    what = f"{len(bug.COMMANDS)} steps and a fresh grading container, half of the patches right, {plan.at_once} at once"
    found: list[Comparison] = []
    for name in (RIVAL, UNCONTROLLED):
        other, against = blocks[name], partial(compared, "episodes", rival_name=name)
        found += [
            against(ours.per_s, other.per_s, p50, unit=f"episodes per second, {what}"),
            against(ours.latencies_s, other.latencies_s, p50, unit=f"s per passed episode, p50, {what}"),
        ]
    return found


if __name__ == "__main__":
    sys.exit(main("episodes", __doc__, episodes))
