"""Whole scripted episodes of the shipped agent programs, each in a container of its own, graded at the end.

A program plays six turns on one small bug with the scripted policy of scripted_programs.py. Then some episodes end at a limit of two turns,
and in some the engine fails for good at the third turn. Images of programs are built if they are missing. What is wrong with an episode
is printed on stderr, and the exit status is then 1.

`python -m benchmarks.harnesses [--programs NAME ...] [--episodes N] [--jobs N]`
"""

import argparse
import asyncio
import contextlib
import secrets
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from benchmarks import bug, chat_tokenizer
from benchmarks.cpu_meter import cgroup
from benchmarks.report import machine_load
from benchmarks.scripted_programs import ProgramScripts, faults, token_counts
from pipeline.chat import recognised
from pipeline.harness import HARNESS_DIR, Harness, read_harness, shipped
from pipeline.request import Claim, EpisodeStatus
from pipeline.tokenizer import TokenizerBundle
from pipeline.trajectory import Exhausted, Failed, Submitted, Trajectory
from workers.grading.grade import Grader
from workers.harness.building import build
from workers.rollout import run_rollout
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.protocol import Role, Sandbox

# One that knows tools, as it comes with a model.
TEMPLATE = Path(__file__).parents[1] / "tests" / "chat_templates" / "Qwen-Qwen3-0.6B.jinja"
CONTEXT_TOKENS = 400_000  # of one byte each
MEMORY_BYTES = 2 * 1024**3
FEW_TURNS = 2
LOOK_EVERY_S = 0.2  # at the memory of a container
# mini-swe-agent's package has a vocabulary of 100,000 tokens, and Python to count with.
VOCABULARY_DIR = f"{HARNESS_DIR}/python/lib/python3/dist-packages/litellm/litellm_core_utils/tokenizers"
COUNT = """import sys, tiktoken
print(len(tiktoken.get_encoding("cl100k_base").encode(sys.stdin.read(), disallowed_special=())))
"""

Scene = Literal["whole", "limit", "engine"]


@dataclass(slots=True)
class Container:
    """What an agent's container used."""

    memory_bytes: int = 0  # anonymous memory, without files of the volume: the most that was seen
    cpu_s: float = 0.0
    # On the clock of `time.monotonic`: when the program had ended and its changes were read.
    ended_at: float = 0.0


@dataclass(frozen=True, slots=True)
class PlayedProgram:
    trajectory: Trajectory
    container: Container
    wall_s: float  # from the claim to the grade
    # From the last reply until the program had ended and its changes were read; after a failure, until the container was gone.
    ending_s: float
    opening: str  # the longest first prompt of a conversation
    faults: tuple[str, ...]


@dataclass(slots=True)
class Measured:
    """Sandboxes whose agents' containers are measured; a `Sandboxes`."""

    sandboxes: DockerSandboxes
    containers: dict[str, Container] = field(default_factory=dict[str, Container])  # by request

    @contextlib.asynccontextmanager
    async def open(self, claim: Claim, *, role: Role) -> AsyncGenerator[Sandbox]:
        async with self.sandboxes.open(claim, role=role) as sandbox:
            if role != "agent":
                yield sandbox
                return
            container = self.containers[claim.request.id] = Container()
            watch = asyncio.create_task(self._watch(sandbox.id, container), name=f"watch {sandbox.id}")
            try:
                yield sandbox
                container.cpu_s = await sandbox.cpu_s()
            finally:
                container.ended_at = time.monotonic()
                watch.cancel()
                await asyncio.wait({watch})

    async def _watch(self, name: str, container: Container) -> None:
        state = await self.sandboxes.api.call(
            "inspecting", lambda client: client.inspect_container(name)["State"]
        )
        place = cgroup(state["Pid"], "memory") / "memory.stat"
        while True:
            values = dict(line.split() for line in place.read_text().splitlines())
            own_bytes = int(values.get("total_rss", values.get("anon", 0)))  # version 1 or 2 of cgroups
            container.memory_bytes = max(container.memory_bytes, own_bytes)
            await asyncio.sleep(LOOK_EVERY_S)

    async def check(self) -> None:
        await self.sandboxes.check()

    async def close(self) -> None:
        await self.sandboxes.close()


@dataclass(frozen=True, slots=True)
class ProgramStage:
    """Plays episodes of one program."""

    harness: Harness
    sandboxes: Measured
    bundle: TokenizerBundle

    async def play_all(self, scene: Scene, num_episodes: int, jobs: int) -> list[PlayedProgram]:
        numbers, found = iter(range(num_episodes)), list[PlayedProgram]()

        async def slot() -> None:
            for number in numbers:
                found.append(await self.play(scene, number))
                for fault in found[-1].faults:
                    print(f"{self.harness.name}, {scene} {number}: {fault}", file=sys.stderr)

        async with asyncio.TaskGroup() as group:
            for _ in range(jobs):
                group.create_task(slot())
        return found

    async def play(self, scene: Scene, number: int) -> PlayedProgram:
        claim = self._claim(scene, number)
        scripts = ProgramScripts(self.bundle, fails_at=FEW_TURNS if scene == "engine" else None)
        began_at = time.monotonic()
        played = await run_rollout(
            claim, EpisodeStatus(), policies=scripts, sandboxes=self.sandboxes, grader=Grader(self.sandboxes)
        )
        over_at = time.monotonic()
        script = scripts.by_request[claim.request.id]
        container = self.sandboxes.containers.get(claim.request.id, Container())
        return PlayedProgram(
            played,
            container,
            over_at - began_at,
            (over_at if played.reward is None else container.ended_at) - script.last_at,
            max(map(script.renderer.decode, script.prompts[:2]), key=len, default=""),
            (*ending_faults(scene, played), *faults(played, script)),
        )

    def _claim(self, scene: Scene, number: int) -> Claim:
        claim = bug.claim(number, control_share=0.0)
        request = claim.request
        limits = replace(request.limits, context_tokens=CONTEXT_TOKENS)
        if scene == "limit":
            limits = replace(limits, turns=FEW_TURNS)
        resources = replace(request.task.resources, memory_bytes=MEMORY_BYTES)
        changed = replace(
            request,
            id=f"{self.harness.name}-{scene}-{number}",
            task=replace(request.task, resources=resources),
            limits=limits,
            harness=self.harness,
        )
        return replace(claim, request=changed)


def ending_faults(scene: Scene, played: Trajectory) -> Iterator[str]:
    outcome, reward = played.outcome, played.reward
    said = f"{outcome}, {reward}, {played.program}"
    match scene:
        case "whole":
            if not isinstance(outcome, Submitted) or reward is None or reward.value != 1.0:
                yield f"it did not finish: {said}"
            if played.program is not None and played.program.refused:
                yield f"requests were refused: {played.program.refused}"
        case "limit":
            if not isinstance(outcome, Exhausted) or outcome.limit != "turns" or reward is None:
                yield f"it did not end at the limit: {said}"
        case "engine":
            if not isinstance(outcome, Failed) or outcome.boundary != "engine" or reward is not None:
                yield f"an engine's failure is graded or is another failure: {said}"


def opening_tokens(text: str) -> int:
    """The length of a prompt in tokens of cl100k."""
    mini = read_harness("mini").harness
    python = [word.replace("{harness}", HARNESS_DIR) for word in mini.command[: mini.command.index("-m")]]
    in_container = ["docker", "run", "-i", "--rm", "--network=none", f"-eTIKTOKEN_CACHE_DIR={VOCABULARY_DIR}"]
    done = subprocess.run(
        [*in_container, mini.image, *python, "-c", COUNT],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def figures_of(scenes: dict[Scene, list[PlayedProgram]]) -> dict[str, str | int | float]:
    whole, limit, engine = scenes["whole"], scenes["limit"], scenes["engine"]
    programs = [one.trajectory.program for one in whole if one.trajectory.program is not None]
    num_turns = sum(len(one.trajectory.turns) for one in whole)
    copies = sum((Counter(program.copies) for program in programs), Counter[str]())
    counts = [token_counts(one.trajectory) for one in whole if not one.faults]
    killed = sum(one.trajectory.program is None or one.trajectory.program.exit_code is None for one in limit)
    return {
        "finished with nothing wrong": _share(whole),
        "s an episode, p50": round(statistics.median(one.wall_s for one in whole), 1),
        "s an episode, longest": round(max(one.wall_s for one in whole), 1),
        "CPU s of its container, p50": round(statistics.median(one.container.cpu_s for one in whole), 1),
        "MB of memory, largest": round(max(one.container.memory_bytes for one in whole) / 1e6),
        "tokens of the opening": opening_tokens(whole[0].opening),
        "turns / replies taken or not": f"{num_turns}/{num_turns + sum(one.not_taken for one in programs)}",
        "trained / sampled tokens": f"{sum(one.trained for one in counts)}/{sum(one.sampled for one in counts)}",
        "asides": sum(one.asides for one in programs),
        "branches": sum(one.branches for one in programs),
        "copies": ", ".join(f"{count} {kind}" for kind, count in copies.items()),
        "limit of turns: as it should be": _share(limit),
        "limit of turns: killed": killed,
        "limit of turns: s to the end, longest": round(max(one.ending_s for one in limit), 1),
        "engine fails: as it should be": _share(engine),
        "engine fails: s to the end, longest": round(max(one.ending_s for one in engine), 1),
    }


def _share(played: Sequence[PlayedProgram]) -> str:
    return f"{sum(not one.faults for one in played)}/{len(played)}"


async def measure(programs: Sequence[str], num_episodes: int, jobs: int) -> bool:
    """Print the figures of each program. True if nothing was wrong."""
    template = TEMPLATE.read_text()
    bundle = replace(chat_tokenizer.bundle(), chat_template=template, reply_format=recognised(template))
    sandboxes = DockerSandboxes(fleet=f"bench-{secrets.token_hex(4)}")
    all_right = True
    numbers: dict[Scene, int] = {"whole": num_episodes}
    numbers["limit"] = numbers["engine"] = min(num_episodes, jobs)
    try:
        for name in {*programs, "mini"}:
            await build(sandboxes.api, read_harness(name))
        with bug.image():
            for name in programs:
                stage = ProgramStage(read_harness(name).harness, Measured(sandboxes), bundle)
                scenes = {
                    scene: await stage.play_all(scene, number, jobs) for scene, number in numbers.items()
                }
                print(f"\n{name} {stage.harness.version}")
                for what, figure in figures_of(scenes).items():
                    print(f"{what:<40}{figure}", flush=True)
                all_right &= not any(one.faults for played in scenes.values() for one in played)
    finally:
        await sandboxes.close()
    return all_right


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.harnesses",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--programs", nargs="+", choices=shipped(), default=shipped(), metavar="NAME")
    parser.add_argument("--episodes", type=int, default=50, help="of each program (%(default)s)")
    parser.add_argument("--jobs", type=int, default=8, help="episodes at once (%(default)s)")
    options = parser.parse_args(argv)
    print(f"before: {machine_load()}", file=sys.stderr)
    all_right = asyncio.run(measure(options.programs, options.episodes, options.jobs))
    print(f"after: {machine_load()}", file=sys.stderr)
    return int(not all_right)


if __name__ == "__main__":
    sys.exit(main())
