"""Whatever a policy does to its sandbox or its grader: the request is played once and paid 0. No try is repeated, no breaker opens and no
task goes into quarantine.
"""

import contextlib
import shlex
from pathlib import Path

import pytest
from arq.connections import ArqRedis
from msgspec.structs import replace

from pipeline import deadletters
from pipeline.request import Claim, EpisodeStatus
from pipeline.task import ExitCode, Resources, Task
from pipeline.tokenizer import read_bundle
from pipeline.trajectory import Trajectory, head_of
from tests.pipeline import samples
from tests.workers.agent.episode import AGENT, SUBMIT, bash
from tests.workers.claiming.worker import LIMITS, enqueued, life, published, until, worker
from tests.workers.claims import make_task
from tests.workers.conftest import RepoImage
from trainer.records.journal_writer import Journal
from trainer.rollouts.dispatch import Quarantine
from workers.breaker import SUSPECTS
from workers.claim import Stage
from workers.grading.grade import Grader
from workers.policy.scripted import ScriptedPolicies
from workers.rollout import run_rollout
from workers.sandbox import docker as docker_sandbox
from workers.sandbox import protocol
from workers.sandbox.docker import DockerSandboxes

pytestmark = [pytest.mark.docker, pytest.mark.alone]

SMALL = Resources(memory_bytes=96 * 1024**2, cpus=1.5, pids=48)
FILL_MEMORY = """python3 - <<'EOF'
import ctypes
open("/proc/1/oom_score_adj", "w").write("1000")
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for _ in range(100):
    at = libc.shmat(libc.shmget(0, 16 << 20, 0o1600), None, 0)
    ctypes.memset(at, 1, 16 << 20)
    libc.shmdt(ctypes.c_void_p(at))
EOF"""
SLOW_FILTER = (
    "git config filter.slow.clean 'sleep 1000'; echo '* filter=slow' >.gitattributes; echo >>calc.py"
)
WAIT = "printf '%s\\n' 'import time; time.sleep(1000)' >calc.py"
FLOOD = 'import os; open("/dev/swerve-notes", "w").write("x" * 10**6); os._exit(1)'
FORGE = f"printf '%s\\n' {shlex.quote(FLOOD)} >calc.py"

COMMANDS = {
    "the memory of the sandbox": (FILL_MEMORY, "true", SUBMIT),
    "a filter that never ends": (SLOW_FILTER,),
    "a patch that waits": (WAIT, SUBMIT),
    "a patch that floods the notes": (FORGE, SUBMIT),
}


@pytest.fixture
def task(repo_image: RepoImage) -> Task:
    script = "timeout 100 python3 -c 'from calc import add; assert add(3, 1) == 4'\n"
    verdict = ExitCode(eval_script=script)
    return make_task(repo_image.tag, base_commit=repo_image.commit, verdict=verdict, resources=SMALL)


# Quick: what a policy does to its grader is a zero and no infrastructure failure.
@pytest.mark.slow_but_for("a patch that floods the notes")
@pytest.mark.parametrize("name", COMMANDS)
async def test_a_policys_doing_is_a_zero_for_good(
    pool: ArqRedis,
    sandboxes: DockerSandboxes,
    task: Task,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """As many requests in a row as would open a breaker, or put a task into quarantine."""
    monkeypatch.setattr(docker_sandbox, "DIFF_S", 2.0)
    monkeypatch.setattr(protocol, "STARVED_SHARE", 2.0)  # however busy the machine of this test is
    replies = [bash(command) for command in COMMANDS[name]]
    policies, grader = ScriptedPolicies(read_bundle(tiny_model), replies), Grader(sandboxes)
    trajectories: list[Trajectory] = []

    async def play(claim: Claim, status: EpisodeStatus) -> Trajectory:
        played = await run_rollout(claim, status, policies=policies, sandboxes=sandboxes, grader=grader)
        trajectories.append(played)
        return played

    stage: Stage = play
    limits = replace(LIMITS, turns=len(replies), grade_wall_s=5.0)
    ids = [
        await enqueued(pool, id=f"request-{number}", task=task, agent_config=AGENT, limits=limits)
        for number in range(SUSPECTS)
    ]
    async with worker(pool, stage, slots=1, probe=sandboxes.check) as claimer:
        for request_id in ids:
            await until(lambda request_id=request_id: published(pool, request_id))

        async def settled() -> bool:
            return claimer.finished + claimer.failed == SUSPECTS

        await until(settled)  # a claim ends a moment after its trajectory is published
    assert (claimer.finished, claimer.failed) == (SUSPECTS, 0)
    assert (claimer.breakers["docker"].state, claimer.breakers["docker"].suspected) == ("closed", False)
    assert [played.reward and played.reward.value for played in trajectories] == [0.0] * SUSPECTS
    assert await deadletters.listed(pool, samples.RUN) == {}
    assert [await life(pool, request_id) for request_id in ids] == [
        ["enqueued", "claimed", "published"]
    ] * SUSPECTS
    with contextlib.closing(Journal(tmp_path)) as journal:
        quarantine = Quarantine(journal)
        assert [quarantine.notice(head_of(played, 0)) for played in trajectories] == [""] * SUSPECTS
