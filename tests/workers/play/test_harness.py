"""The command with an agent program: a whole episode with given replies, and what is refused."""

import io
import json
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import docker
import pytest
from docker.errors import APIError

from pipeline.harness import read_harness
from tests.conftest import free_ports
from tests.workers.foreign.test_program import AGENT, FILE
from tests.workers.grade.conftest import file, image
from tests.workers.policy.engines import Canned, completed, playing
from tests.workers.verify.spans import FIXED, TaskFile
from workers import play as command
from workers.docker.host import FILLER
from workers.harness import volumes
from workers.harness.building import build
from workers.play import EpisodeScreen, main, play_claim
from workers.sandbox.backend import command_sandboxes
from workers.sandbox.containers import ContainerApi
from workers.settings import docker_host

pytestmark = pytest.mark.docker
__all__ = ["file", "image"]


def called(command: str) -> dict[str, object]:
    return {"tool_calls": [{"id": "c1", "name": "bash", "arguments": {"command": command}}]}


FIX = called("sed -i 's/12/24/' spans.py")


@dataclass(frozen=True, slots=True)
class Given:
    """A task and a program, whose image is made by `built`."""

    tasks: Path
    harness: Path

    def play(self, *arguments: str) -> int:
        return main([str(self.tasks), "--only", "day", "--harness", str(self.harness), *arguments])

    def replies(self, *replies: object) -> tuple[str, str]:
        path = self.tasks.with_name("replies.json")
        path.write_text(json.dumps(replies))
        return "--replies", str(path)


@pytest.fixture
def given(file: TaskFile, tmp_path: Path) -> Given:
    file.add("day", FIXED)
    (tmp_path / "program").mkdir()
    program = tmp_path / "program" / "agent"
    program.write_text(AGENT)
    program.chmod(0o755)
    path = tmp_path / "agent.toml"
    path.write_text(FILE.format(name=f"agent-{secrets.token_hex(4)}"))
    return Given(file.path, path)


@pytest.fixture
async def built(
    given: Given, docker_client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Given]:
    harness = read_harness(given.harness)
    name = harness.harness.name
    monkeypatch.setattr(volumes, "PREFIX", f"swerve-{name}-")
    monkeypatch.setattr(volumes, "FILLER", f"{FILLER}.{name}")
    api = ContainerApi(docker_host())
    await build(api, harness)
    await api.close()
    yield given
    for container in docker_client.containers.list(all=True, filters={"label": f"{FILLER}.{name}"}):
        container.remove(force=True)
    for volume in docker_client.volumes.list(filters={"name": f"swerve-{name}-"}):
        volume.remove()
    with suppress(APIError):
        docker_client.images.remove(harness.harness.image, force=True)


# Quick: an agent program plays in the sandbox and is graded.
def test_a_program_plays_given_replies_which_are_shown_and_graded(
    built: Given, capsys: pytest.CaptureFixture[str]
) -> None:
    out = built.tasks.with_name("traj.json")
    assert built.play(*built.replies(called("cat spans.py"), FIX, "done"), "--out", str(out)) == 0
    shown = capsys.readouterr().out
    for place in (
        "Mend it.",
        "reply 1 ─",
        "def hours(text):",
        "reply 3 ─",
        '+    return number * {"h": 1, "d": 24}[unit]',
        "submitted after 3 turns",
        "reward 1: exit status 0",
    ):
        _, found, shown = shown.partition(place)
        assert found, place
    roles = [message["role"] for message in json.loads(out.read_text())["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant", "exit"]


async def test_a_program_plays_with_a_servers_model(built: Given, capsys: pytest.CaptureFixture[str]) -> None:
    function = {"name": "bash", "arguments": json.dumps({"command": "sed -i 's/12/24/' spans.py"})}
    calls = [{"id": "c1", "type": "function", "function": function}]
    answers = [Canned(completed(None, tool_calls=calls)), Canned(completed("done"))]
    async with playing(answers) as wire:
        server = ("--api-base", f"{wire.url}/v1", "--model", "some-model", "--max-tokens", "99")
        words = [str(built.tasks), "--only", "day", "--harness", str(built.harness), *server]
        episode = command._read(command._parser().parse_args(words))
        played = await play_claim(
            episode.claim,
            policies=episode.policies,
            sandboxes=command_sandboxes(fleet=f"test-{os.getpid()}"),
            watcher=EpisodeScreen(io.StringIO()),
        )
    assert played.reward is not None
    assert played.reward.value == 1.0
    assert [request["max_tokens"] for request in wire.requests] == [99, 99]
    assert [message["role"] for message in wire.requests[1]["messages"]] == ["user", "assistant", "tool"]


def test_a_program_that_is_not_built_is_one_line_that_names_the_command_which_builds_it(
    given: Given, capsys: pytest.CaptureFixture[str]
) -> None:
    assert given.play(*given.replies("x")) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: --harness: this Docker host has no image swerve/harness-agent-")
    assert "`swerve harness build " in printed.err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--exact"], "--exact: it is for the built-in loop"),
        (["--harness", "nosuch"], "--harness: nosuch: No such file"),
        (
            ["--harness", "codex", "--context-tokens", "8192"],
            "codex begins with 8700 tokens before the task, and a context of 8192 tokens with replies of 4096 has room for 4096",
        ),
    ],
)
def test_misuse_is_said_before_anything_is_played(
    given: Given, arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert given.play(*given.replies("x"), *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert error in printed.err


def test_a_model_whose_template_knows_no_tools_is_refused_for_a_program_that_calls_them(
    given: Given, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [port] = free_ports(1)
    assert given.play("--router", f"http://127.0.0.1:{port}", "--tokenizer", str(tiny_model)) == 2
    assert f"--tokenizer {tiny_model}: agent-" in capsys.readouterr().err
