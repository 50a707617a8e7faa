"""An agent program plays whole episodes in a container without a network: its replies are turns, and its changes are graded."""

import dataclasses
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import APIError
from msgspec.structs import replace

from pipeline.harness import Harness, read_harness
from pipeline.request import Claim, EpisodeStatus
from pipeline.task import ExitCode
from pipeline.trajectory import Exhausted, Failed, Submitted, Trajectory
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from tests.workers.foreign.program import bundle, call
from tests.workers.leaks.giveaways import built
from trainer.batching.samples import samples_of
from workers.docker.host import FILLER
from workers.grading.grade import Grader
from workers.harness import volumes
from workers.harness.building import build
from workers.policy.scripted import ScriptedPolicies
from workers.rollout import run_rollout
from workers.sandbox.containers import ContainerApi
from workers.sandbox.docker import DockerSandboxes
from workers.settings import docker_host

pytestmark = pytest.mark.docker

FILE = """
name = "{name}"
version = "1.0"
licence = "MIT"
dialect = "chat"
command = ["{{harness}}/agent", "{{port}}", "{{problem_file}}"]
version_command = ["{{harness}}/agent", "--version"]
leftovers = [".agent*"]

[env]
AGENT_MODE = "{{model}}"

[files]
"settings" = "{{context_tokens}}"

[build]
directory = "program"
"""
# Asks until a reply has no call, runs what is called, and ends with a status of its own.
AGENT = """#!/usr/bin/python3
import json, os, subprocess, sys, urllib.error, urllib.request
port, problem = sys.argv[1], open(sys.argv[2]).read()
assert os.environ["AGENT_MODE"] == "policy" and int(open(os.path.expanduser("~/settings")).read()) > 0
open(".agent.log", "w").write("mine")
if problem == "does not start": sys.exit("no such model")
tool = {"type": "function", "function": {"name": "bash", "description": "a shell",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}
messages = [{"role": "user", "content": problem}]
while True:
    body = json.dumps({"model": "m", "messages": messages, "tools": [tool]}).encode()
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, {"Content-Type": "application/json"})
    try: said = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        if problem == "stays": 
            import time
            time.sleep(600)
        sys.exit(f"refused: {error.read().decode()}")
    messages.append(said)
    if not said.get("tool_calls"): sys.exit(3)
    for one in said["tool_calls"]:
        ran = subprocess.run(json.loads(one["function"]["arguments"])["command"], shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": one["id"], "content": ran.stdout + ran.stderr})
"""
SCRIPT = "python3 -c 'from calc import add; assert add(3, 1) == 4'\n"
FIX = call("bash", command="sed -i 's/a - b/a + b/' calc.py")
LOOK = call("bash", command="cat calc.py; ls -a")


@dataclass(frozen=True, slots=True)
class Stage:
    """Plays and grades episodes of the program."""

    sandboxes: DockerSandboxes
    harness: Harness
    image: RepoImage

    def claim(self, problem: str = "mend it", **limits: Any) -> Claim:
        task = make_task(self.image.tag, base_commit=self.image.commit, verdict=ExitCode(eval_script=SCRIPT))
        claim = make_claim(replace(task, problem=problem), **limits)
        return replace(claim, request=replace(claim.request, harness=self.harness))

    async def play(self, claim: Claim, policies: ScriptedPolicies) -> Trajectory:
        return await run_rollout(
            claim,
            EpisodeStatus(),
            policies=policies,
            sandboxes=self.sandboxes,
            grader=Grader(self.sandboxes),
        )


@pytest.fixture
async def stage(
    docker_client: docker.DockerClient,
    sandboxes: DockerSandboxes,
    repo_image: RepoImage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Stage]:
    name = f"agent-{secrets.token_hex(4)}"
    (tmp_path / "program").mkdir()
    program = tmp_path / "program" / "agent"
    program.write_text(AGENT)
    program.chmod(0o755)
    (tmp_path / "agent.toml").write_text(FILE.format(name=name))
    file = read_harness(tmp_path / "agent.toml")
    monkeypatch.setattr(volumes, "PREFIX", f"swerve-{name}-")
    monkeypatch.setattr(volumes, "FILLER", f"{FILLER}.{name}")
    api = ContainerApi(docker_host())
    await build(api, file)
    yield Stage(sandboxes, file.harness, repo_image)
    await api.close()
    for container in docker_client.containers.list(all=True, filters={"label": f"{FILLER}.{name}"}):
        container.remove(force=True)
    for volume in docker_client.volumes.list(filters={"name": f"swerve-{name}-"}):
        volume.remove()
    with suppress(APIError):
        docker_client.images.remove(file.harness.image, force=True)


def scripted(*replies: str) -> ScriptedPolicies:
    return ScriptedPolicies(bundle(), replies)


async def test_a_program_plays_and_its_changes_are_graded_without_its_leftovers(stage: Stage) -> None:
    played = await stage.play(stage.claim(), scripted(LOOK, FIX, "done"))
    assert isinstance(played.outcome, Submitted)
    assert b"a + b" in played.outcome.patch
    assert b".agent" not in played.outcome.patch
    assert played.reward is not None
    assert played.reward.value == 1.0
    assert played.program is not None
    assert (played.program.exit_code, played.program.roots, played.program.not_taken) == (3, 1, 0)
    looked, mended, said = played.turns
    assert [action.command for action in looked.actions]
    assert looked.actions[0].observation is not None
    assert "a - b" in looked.actions[0].observation.output
    assert (mended.after, said.after, said.actions) == (0, 1, ())
    (sample,) = samples_of(played, vocab_size=200_000, max_tokens=100_000)
    assert sample.num_trained_tokens == sum(len(turn.sampled) // 4 for turn in played.turns)
    assert played.seconds is not None
    parts = played.seconds
    assert parts.command_s > 0


async def test_a_program_plays_as_the_images_user_in_a_home_of_that_user(
    stage: Stage, docker_client: docker.DockerClient
) -> None:
    owned = "RUN chown -R 1000:1000 /workspace && mkdir -p /home/dev && echo tool >/home/dev/.tool && chown -R 1000 /home/dev\n"
    owned += "ENV HOME=/home/dev\nUSER 1000:1000"
    look = call("bash", command="id -u; cat ~/.tool; touch ~/settings ~/made && echo written")
    with built(docker_client, stage.image.tag, {}, owned) as image:
        of_user = dataclasses.replace(stage, image=RepoImage(image, stage.image.commit))
        played = await of_user.play(of_user.claim(), scripted(look, FIX, "done"))
    assert isinstance(played.outcome, Submitted)
    seen = played.turns[0].actions[0].observation
    assert seen is not None
    assert seen.output == "1000\ntool\nwritten\n"
    assert played.reward is not None
    assert played.reward.value == 1.0


@pytest.mark.slow_but_for("mend it")
@pytest.mark.parametrize("problem", ["mend it", "stays"])
async def test_a_limit_of_turns_ends_the_program_and_what_it_changed_is_graded(
    stage: Stage, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.foreign.program.GRACE_S", 1.0 if problem == "stays" else 240.0)
    played = await stage.play(stage.claim(problem, turns=2), scripted(FIX, LOOK))
    assert isinstance(played.outcome, Exhausted)
    assert played.outcome.limit == "turns"
    assert len(played.turns) == 2
    assert played.reward is not None
    assert played.reward.value == 1.0
    assert played.program is not None
    assert (played.program.exit_code is None) == (problem == "stays")


async def test_a_program_that_takes_no_reply_is_a_failure_without_a_reward(stage: Stage) -> None:
    played = await stage.play(stage.claim("does not start"), scripted(FIX))
    assert isinstance(played.outcome, Failed)
    assert played.outcome.boundary == "harness"
    assert "no such model" in played.outcome.message
    assert played.reward is None


async def test_an_engine_that_fails_is_a_failure_and_never_the_programs_end(stage: Stage) -> None:
    played = await stage.play(stage.claim(), scripted(FIX))
    assert isinstance(played.outcome, Failed)
    assert (played.outcome.boundary, played.reward) == ("engine", None)
    assert len(played.turns) == 1, "what was sampled is kept"
