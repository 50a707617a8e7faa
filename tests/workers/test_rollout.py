"""What the rollout stage keeps from the agent and from the trajectory: what the grader knows of the hidden tests."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import astuple, replace

from pipeline.message import encode
from pipeline.request import Claim, EpisodeStatus
from pipeline.task import Calibration, ExitCode, pack
from pipeline.tokenizer import read_bundle
from pipeline.trajectory import head_of
from tests.workers.agent.episode import AGENT, SUBMIT, bash
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from workers.grading.grade import Grader
from workers.policy.scripted import ScriptedPolicies
from workers.rollout import run_rollout
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.protocol import Sandbox

pytestmark = pytest.mark.docker

CALIBRATION = pack(Calibration(witnessed=True))
FIX = "sed -i 's/a - b/a + b/' calc.py"
SCRIPT = "python3 -c 'from calc import add; assert add(3, 1) == 4'\n"


@dataclass(slots=True)
class Recording:
    """The calibrations that the containers of each role were opened with."""

    sandboxes: DockerSandboxes
    seen: dict[str, set[bytes]] = field(default_factory=dict[str, set[bytes]])

    @asynccontextmanager
    async def open(self, claim: Claim, *, role: Literal["agent", "grade"]) -> AsyncIterator[Sandbox]:
        self.seen.setdefault(role, set()).add(claim.request.task.calibration)
        async with self.sandboxes.open(claim, role=role) as sandbox:
            yield sandbox

    async def check(self) -> None:
        await self.sandboxes.check()

    async def close(self) -> None:
        await self.sandboxes.close()


async def test_the_calibration_reaches_the_grader_and_nobody_else(
    sandboxes: DockerSandboxes, repo_image: RepoImage, tiny_model: Path
) -> None:
    task = make_task(repo_image.tag, base_commit=repo_image.commit, verdict=ExitCode(eval_script=SCRIPT))
    claim = make_claim(replace(task, calibration=CALIBRATION), turns=2)
    claim = replace(claim, request=replace(claim.request, agent_config=AGENT))
    policies = ScriptedPolicies(read_bundle(tiny_model), [bash(FIX), bash(SUBMIT)])
    recording = Recording(sandboxes)
    played = await run_rollout(
        claim, EpisodeStatus(), policies=policies, sandboxes=recording, grader=Grader(recording)
    )
    assert played.reward is not None
    assert recording.seen == {"agent": {b""}, "grade": {CALIBRATION}}
    assert CALIBRATION not in encode(played)
    assert played.claim.request.task == task, "all else is kept"


async def test_the_parts_of_a_rollouts_time_sum_up_to_all_of_it(
    sandboxes: DockerSandboxes, repo_image: RepoImage, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch_s = time.time() - time.monotonic()
    monkeypatch.setattr(time, "time", lambda: epoch_s + time.monotonic())  # which nobody sets meanwhile
    task = make_task(repo_image.tag, base_commit=repo_image.commit, verdict=ExitCode(eval_script=SCRIPT))
    claim = make_claim(task, turns=2)
    claim = replace(claim, request=replace(claim.request, agent_config=AGENT))
    policies = ScriptedPolicies(read_bundle(tiny_model), [bash(FIX), bash(SUBMIT)])
    played = await run_rollout(
        claim, EpisodeStatus(), policies=policies, sandboxes=sandboxes, grader=Grader(sandboxes)
    )
    assert played.seconds is not None
    assert played.reward is not None
    parts = astuple(played.seconds)
    assert sum(parts) == pytest.approx(played.finished_at - played.started_at, rel=0.01, abs=0.05)
    assert min(parts) >= 0
    assert min(played.seconds.open_s, played.seconds.command_s, played.seconds.close_s) > 0
    assert played.seconds.grade_s >= played.reward.grade_s
    assert head_of(played, body_bytes=1).seconds == played.seconds
