"""Commands that are out to harm the worker, its host or the next episode: each ends in one of the ways an episode may end, the worker's
memory stays as it was, and the next episode on the same Docker host is honest work, paid in full. workers/README.md has the list.
"""

import asyncio
import gc
import resource
import shlex
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from pipeline.request import EpisodeStatus
from pipeline.task import ExitCode, Resources, Task
from pipeline.tokenizer import TokenizerBundle, read_bundle
from pipeline.trajectory import Exhausted, Submitted, Trajectory
from tests.workers.agent.episode import AGENT, SUBMIT, bash
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from workers.grading import container
from workers.grading.grade import Grader
from workers.policy.scripted import ScriptedPolicies
from workers.rollout import run_rollout
from workers.sandbox import disk
from workers.sandbox.disk import DiskWatch
from workers.sandbox.docker import DockerSandbox, DockerSandboxes
from workers.settings import DiskSettings

pytestmark = [pytest.mark.docker, pytest.mark.alone]

SMALL = Resources(memory_bytes=96 * 1024**2, cpus=1.5, pids=48)
MAX_WRITTEN_BYTES = 16_000_000
WORKER_GROWTH_KB = 64 * 1024
ENOUGH_S, SOON_S = 240.0, 1.0
KILLED_ALL = (0, 1)  # 1: nobody else was left to kill, and process 1 has not answered USR1 yet
KILLED = (137, 138, 140)  # by signal 9, or by what it makes the holder do
LITTLE_CPU_S = 0.15  # whose output nobody takes uses hardly any
SHARES = 5
# What is left after an attack: a shell; no process for one, because a fork bomb goes on until a command times out; nothing at all.
SHELL, FULL, NOTHING = "shell", "full", "nothing"
FIX = "sed -i 's/a - b/a + b/' calc.py"


@dataclass(frozen=True, slots=True)
class Attack:
    command: str
    statuses: tuple[int | None, ...]  # None: killed at its deadline
    timeout_s: float = ENOUGH_S
    leaves: tuple[str, ...] = (SHELL,)


def endless(command: str) -> Attack:
    return Attack(command, (None,), SOON_S)


ATTACKS = {
    "fork bomb": Attack("bomb() { bomb | bomb & }; bomb", (0, 254, None), SOON_S, leaves=(SHELL, FULL)),
    "fork bomb that stays": endless("while :; do setsid sleep 1000 & done 2>/dev/null"),
    "fork bomb left behind": Attack(
        "(while :; do setsid sleep 1000 & done) >/dev/null 2>&1 &", (0, None), SOON_S, leaves=(SHELL, FULL)
    ),
    "memory hog": Attack("python3 -c 'x = bytearray(2 * 1024**3)'", (137,)),
    "memory hogs": endless("for i in {1..8}; do tail /dev/zero & done; sleep 1000"),
    "large file": Attack("head -c 10G /dev/zero >big", (153,)),
    # Slowly from the limit on, because the container is removed at twice the limit.
    "many files": Attack("while :; do i=$((i + 1)); head -c 1000000 /dev/zero >$i; sleep $((i > 16)).1; done", KILLED),
    "deleted files": Attack("for i in {1..4}; do exec {fd}>f; rm f; head -c 10G /dev/zero >&$fd; done", (153,)),
    "/dev/shm": Attack("head -c 10G /dev/zero >/dev/shm/big", (1, 137, 153)),
    "/dev": Attack("head -c 10G /dev/zero >/dev/big", (1, 137, 153)),
    "kill everything": Attack("for s in TERM STOP SEGV INT USR1 USR2 KILL; do kill -$s 1; done; kill -9 -1", (*KILLED_ALL, *KILLED)),
    "10 GB of output": endless("head -c 10G /dev/zero"),
    "line without an end": endless("yes | tr -d '\\n'"),
    "NUL in a command": Attack("echo a\0b", (126,)),
    "NULs in the output": Attack("head -c 1000000 /dev/zero; printf 'a\\0b'; exit 3", (3,)),
    "daemons that print": Attack(
        "for i in {1..8}; do setsid bash -c 'trap \"\" HUP TERM; while :; do echo noise; done' & done; sleep 0.2", (0,)
    ),
    "closed descriptors": Attack("for fd in {0..20}; do eval \"exec $fd>&- $fd<&-\"; done; exit 3", (3,)),
    "exec": endless("exec sleep 1000"),
    "exec into the holder's streams": Attack("exec >/proc/1/fd/1 2>/proc/1/fd/2; echo forged; exit 3", (3,)),
    "exec into nothing": Attack("exec /nonexistent", (127,)),
    "limits raised": Attack("ulimit -Hf unlimited || ulimit -u 100000; ulimit -c unlimited || exit 3", (3,)),
    "stopped for ever": endless("kill -STOP $$"),
    "rm -rf /": Attack("rm -rf --no-preserve-root / 2>/dev/null; exit 3", (3, 127), leaves=(NOTHING,)),
}  # fmt: skip


@pytest.fixture
async def limited(
    sandboxes: DockerSandboxes, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[DockerSandboxes]:
    """Where a container may write 16 MB, watched as a worker watches it."""
    monkeypatch.setattr(disk, "LOOK_S", 0.1)
    small = DiskSettings(min_free_bytes=0, max_written_bytes=MAX_WRITTEN_BYTES)
    limited = DockerSandboxes(fleet=sandboxes.fleet, disk=small)
    watching = asyncio.create_task(DiskWatch(limited).watch())
    yield limited
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await limited.close()


@pytest.fixture(scope="module")
def bundle(tiny_model: Path) -> TokenizerBundle:
    return read_bundle(tiny_model)


@pytest.fixture
def task(repo_image: RepoImage) -> Task:
    """Solved by FIX."""
    script = "python3 -c 'from calc import add; assert add(3, 1) == 4'\n"
    return make_task(
        repo_image.tag, base_commit=repo_image.commit, verdict=ExitCode(eval_script=script), resources=SMALL
    )


def peak_kb() -> int:
    gc.collect()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


async def played(
    limited: DockerSandboxes,
    bundle: TokenizerBundle,
    task: Task,
    *commands: str,
    grade_cpu_s: float = ENOUGH_S,
) -> Trajectory:
    """A whole episode that says `commands`, as a worker plays and grades it."""
    claim = make_claim(task, turns=len(commands), command_s=ENOUGH_S, grade_cpu_s=grade_cpu_s)
    claim = replace(claim, request=replace(claim.request, agent_config=AGENT))
    policies = ScriptedPolicies(bundle, [bash(command) for command in commands])
    return await run_rollout(
        claim, EpisodeStatus(), policies=policies, sandboxes=limited, grader=Grader(limited)
    )


async def is_honest(limited: DockerSandboxes, bundle: TokenizerBundle, task: Task) -> bool:
    """Whether an episode that does its work is played and paid."""
    trajectory = await played(limited, bundle, task, FIX, SUBMIT)
    assert isinstance(trajectory.outcome, Submitted), trajectory.outcome
    assert trajectory.reward is not None
    return trajectory.reward.value == 1.0


async def attacked(attack: Attack, limited: DockerSandboxes, task: Task) -> None:
    async with limited.open(make_claim(task), role="agent") as sandbox:
        result = await sandbox.run(attack.command, timeout_s=attack.timeout_s)
        assert result.exit_code in attack.statuses
        assert await left_in(sandbox) in attack.leaves
        assert len(await sandbox.diff()) <= 2 * MAX_WRITTEN_BYTES


async def left_in(sandbox: DockerSandbox) -> str:
    """A memory that is full of a file's pages kills commands until the disk has taken them."""
    for _ in range(480):
        after = await sandbox.run("echo alive", timeout_s=ENOUGH_S)
        if after.exit_code == 254 and b"bash: fork: " in after.output:
            return FULL
        if after.exit_code != 137:
            return SHELL if after.exit_code == 0 and b"alive\n" in after.output else NOTHING
        await asyncio.sleep(0.5)
    return NOTHING


# Quick: hostile commands are observations, and honest work beside them is worth 1.
@pytest.mark.slow_but_for("4")
@pytest.mark.parametrize("share", range(SHARES))
async def test_a_hostile_command_is_an_observation_and_harms_nobody(
    share: int, limited: DockerSandboxes, bundle: TokenizerBundle, task: Task
) -> None:
    """Several attacks at once beside honest work, and honest work after them."""
    names, before_kb = sorted(ATTACKS)[share::SHARES], peak_kb()
    ended = await asyncio.gather(
        is_honest(limited, bundle, task),
        *(attacked(ATTACKS[name], limited, task) for name in names),
        return_exceptions=True,
    )
    assert dict(zip(["honest", *names], ended, strict=True)) == {"honest": True} | dict.fromkeys(names)
    assert peak_kb() - before_kb < WORKER_GROWTH_KB
    assert await is_honest(limited, bundle, task)


@pytest.mark.slow
async def test_who_prints_while_nobody_listens_is_removed_all_the_same(
    limited: DockerSandboxes, bundle: TokenizerBundle, task: Task
) -> None:
    async with asyncio.timeout(ENOUGH_S), limited.open(make_claim(task), role="agent") as sandbox:
        running = asyncio.create_task(sandbox.run("cat /dev/zero", timeout_s=ENOUGH_S))
        await asyncio.sleep(SOON_S)
        running.cancel()
        await asyncio.wait({running})
        await asyncio.sleep(SOON_S)  # until every buffer on the way is full
    assert await is_honest(limited, bundle, task)


async def test_after_an_attack_an_episode_may_still_do_its_work(
    limited: DockerSandboxes, bundle: TokenizerBundle, task: Task
) -> None:
    attacks = [
        ATTACKS[name].command for name in ("kill everything", "large file", "/dev/shm", "daemons that print")
    ]
    trajectory = await played(limited, bundle, task, *attacks, "rm -f big", FIX, SUBMIT)
    assert trajectory.reward is not None
    assert (len(trajectory.turns), trajectory.reward.value) == (7, 1.0)


@pytest.mark.slow
async def test_who_removes_everything_has_nothing_to_submit(
    limited: DockerSandboxes, bundle: TokenizerBundle, task: Task
) -> None:
    trajectory = await played(limited, bundle, task, FIX, ATTACKS["rm -rf /"].command, SUBMIT)
    assert trajectory.outcome == Exhausted(limit="turns", patch=b"")
    assert trajectory.reward is not None
    assert (trajectory.reward.value, trajectory.reward.decided_by) == (0.0, "empty patch")
    assert await is_honest(limited, bundle, task)


@pytest.mark.slow
async def test_who_fills_the_disk_faster_than_it_is_looked_at_loses_the_container(
    sandboxes: DockerSandboxes, bundle: TokenizerBundle, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "LOOK_S", 0.1)
    sandboxes.disk = DiskSettings(min_free_bytes=0, max_written_bytes=MAX_WRITTEN_BYTES)

    class Late(DiskWatch):
        async def look(self) -> None:
            written = await sandboxes.api.written_bytes(sandboxes.open_names() or ["none"])
            if max(written.values(), default=0) > 2 * MAX_WRITTEN_BYTES:
                await super().look()

    monkeypatch.setattr(disk, "MEASURE_S", 1.0)
    watching = asyncio.create_task(Late(sandboxes).watch())
    fill = "for i in 1 2 3 4; do head -c 15000000 /dev/zero >$i; done; sleep 1000"
    trajectory = await played(sandboxes, bundle, task, fill, SUBMIT)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert trajectory.outcome == Exhausted(limit="sandbox", patch=b"")
    assert trajectory.reward is not None
    assert (trajectory.reward.value, trajectory.reward.decided_by) == (0.0, "empty patch")
    assert await is_honest(sandboxes, bundle, task)


@pytest.mark.slow_but_for("os.kill(-1, 9)-exit status 13-240.0")
@pytest.mark.parametrize(
    ("code", "decided_by", "cpu_s"),
    [
        ("while True: os.write(1, bytes(65536))", "cpu time used up", LITTLE_CPU_S),
        (
            "for i in itertools.count(): open(str(i), 'wb').write(bytes(10**6)), time.sleep(1 if i > 16 else 0.15)",
            "exit status 13",
            ENOUGH_S,
        ),
        ("x = bytearray(2 * 1024**3)", "exit status 13", ENOUGH_S),
        ("os.kill(-1, 9)", "exit status 13", ENOUGH_S),
    ],
)
async def test_hostile_code_in_a_patch_earns_nothing(
    code: str,
    decided_by: str,
    cpu_s: float,
    limited: DockerSandboxes,
    bundle: TokenizerBundle,
    task: Task,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(container, "WATCH_S", 0.5)
    before_kb = peak_kb()
    write = f"printf '%s\\n' 'import os, itertools, time' {shlex.quote(code)} >calc.py"
    trajectory = await played(limited, bundle, task, write, SUBMIT, grade_cpu_s=cpu_s)
    assert isinstance(trajectory.outcome, Submitted), trajectory.outcome
    assert trajectory.reward is not None
    assert trajectory.reward.value == 0.0
    assert trajectory.reward.decided_by.startswith(decided_by)
    assert peak_kb() - before_kb < WORKER_GROWTH_KB
    assert await is_honest(limited, bundle, task)
