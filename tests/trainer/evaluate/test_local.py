"""Any model, on this machine alone: real containers, a real grader, servers that are well and servers that break."""

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import msgspec
import pytest
from docker.errors import APIError
from msgspec.structs import replace

from benchmarks import bug
from pipeline.harness import read_harness
from pipeline.taskfile import write_tasks
from tests.conftest import free_ports
from tests.trainer.evaluate.chat_server import ChatServer, chat_server
from tests.workers.foreign.test_program import AGENT as PROGRAM
from tests.workers.foreign.test_program import FILE
from trainer.evaluate.results import EpisodeResult
from workers.docker.host import FLEET
from workers.harness.building import build
from workers.harness.volumes import PREFIX
from workers.sandbox.containers import ContainerApi
from workers.settings import docker_host

pytestmark = pytest.mark.docker

RIGHT = bug.replies((bug.FIX, "git diff", bug.SUBMIT))
WRONG = bug.replies((bug.FIX.replace("100", "10"), bug.SUBMIT))
AGENT = Path("workers/agent/prompts/default.yaml")


def script(task: str) -> Sequence[str]:
    return WRONG if "wrongly" in task else RIGHT


@pytest.fixture(scope="module", autouse=True)
def image(task_image: str) -> Iterator[None]:
    with bug.image():
        yield


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    one = bug.task()
    names = {"right-1": "", "wrong-1": " Do it wrongly.", "right-2": " Again."}
    write_tasks(
        path,
        [replace(one, id=f"bench:{name}", problem=one.problem + more) for name, more in names.items()],
    )
    return path


@pytest.fixture
async def server() -> AsyncIterator[ChatServer]:
    async with chat_server(script) as server:
        yield server


@dataclass(slots=True)
class Evaluation:
    """The command as a process."""

    process: asyncio.subprocess.Process
    out: Path

    async def ended(self) -> tuple[int, str, str]:
        out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode()

    @property
    def rows(self) -> list[EpisodeResult]:
        """Whole lines only: the process may be in the middle of one, or have been killed there."""
        record = self.out / "results.jsonl"
        lines = record.read_bytes().rpartition(b"\n")[0].splitlines() if record.exists() else []
        return [msgspec.json.decode(line, type=EpisodeResult) for line in lines]


def predicted(evaluation: Evaluation) -> set[str]:
    """The tasks of preds.json that have a patch there."""
    file = evaluation.out / "preds.json"
    rows = json.loads(file.read_text()) if file.exists() else {}
    return {name for name, row in rows.items() if row["model_patch"]}


async def evaluate(
    tasks: Path,
    server: ChatServer,
    *options: str,
    agent: Path = AGENT,
    harness: Path | None = None,
    environment: Any = None,
) -> Evaluation:
    out = tasks.with_name("out")
    player = ("--agent", str(agent)) if harness is None else ("--harness", str(harness))
    where = ("--api-base", server.url, "--model", "m", *player, "--out", str(out), "--local")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trainer.evaluate", str(tasks), *where, *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | (environment or {}),
    )
    return Evaluation(process, out)


def containers_left() -> list[str]:
    """Those of the image that this process built: other tests evaluate beside these."""
    client = docker.from_env()
    mine = {"label": f"{bug.LABEL}={bug.OWNER}"}
    found = client.containers.list(all=True, ignore_removed=True, filters=mine)
    return [one.labels[FLEET] for one in found if one.labels.get(FLEET, "").startswith("episodes-")]


# Quick: an evaluation plays, grades and keeps every episode.
async def test_every_episode_is_played_graded_and_written_down(tasks: Path, server: ChatServer) -> None:
    evaluation = await evaluate(tasks, server, "--samples", "2", "--max-concurrent", "3")
    status, told, _ = await evaluation.ended()
    assert status == 0
    assert {row.key: row.resolved for row in evaluation.rows} == {
        (f"bench:{name}", sample): name != "wrong-1"
        for name in ("right-1", "wrong-1", "right-2")
        for sample in range(2)
    }
    first = next(row for row in evaluation.rows if row.key == ("bench:right-1", 0))
    assert (first.exit_status, first.patch_source, first.n_steps) == ("Submitted", "submission", 3)
    assert (first.prompt_tokens, first.completion_tokens) == (30, 6)
    summary = json.loads((evaluation.out / "summary.json").read_text())
    assert (summary["total"], summary["resolved"], summary["resolve_rate"]) == (3, 2, 0.6667)
    assert summary["pass@2"]["value"] == pytest.approx(2 / 3)
    predictions = json.loads((evaluation.out / "preds.json").read_text())
    assert set(predictions) == {"right-1", "wrong-1", "right-2"}
    assert "percent / 100" in predictions["right-1"]["model_patch"]
    (statuses,) = evaluation.out.glob("exit_statuses_*.yaml")
    assert (
        msgspec.yaml.decode(statuses.read_bytes())["instances_by_exit_status"]["Submitted"].count("right-1")
        == 1
    )
    saved = json.loads((evaluation.out / "right-1/sample-1/right-1.traj.json").read_text())
    assert [message["role"] for message in saved["messages"]][:3] == ["system", "user", "assistant"]
    assert "percent / 100" in (evaluation.out / "right-1/patch.diff").read_text()
    assert "2 of 3 tasks resolved" in told
    assert containers_left() == []


@pytest.mark.slow
async def test_a_server_that_breaks_again_and_again_costs_no_result(tasks: Path) -> None:
    async with chat_server(script, ("429", "", "500", "cut", "", "no JSON", "slow")) as server:
        evaluation = await evaluate(tasks, server)
        status, _, _ = await evaluation.ended()
    assert status == 0
    assert {row.instance_id: row.resolved for row in evaluation.rows} == {
        "right-1": True,
        "wrong-1": False,
        "right-2": True,
    }


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
async def test_a_killed_evaluation_goes_on_and_redoes_nothing(
    tasks: Path, server: ChatServer, number: signal.Signals
) -> None:
    first = await evaluate(tasks, server, "--samples", "2", "--max-concurrent", "1")
    while len(first.rows) < 2:  # noqa: ASYNC110 - another process writes them
        await asyncio.sleep(0.05)
    first.process.send_signal(number)
    status, _, _ = await first.ended()
    assert status == (1 if number != signal.SIGKILL else -signal.SIGKILL)
    done = {row.key for row in first.rows if row.resolved is not None}
    told = {task.removeprefix("bench:") for task, sample in done if sample == 0}
    assert predicted(first) >= told - {first.rows[-1].instance_id}, "each is written before the next begins"
    before = server.begun.copy()
    second = await evaluate(tasks, server, "--samples", "2")
    status, _, told = await second.ended()
    assert status == 0
    assert f"{len(done)} of them are in" in told
    assert sorted(row.key for row in second.rows) == sorted({row.key for row in second.rows}), "none twice"
    assert predicted(second) == {"right-1", "wrong-1", "right-2"}
    assert (server.begun - before).total() == 6 - len(done)
    while containers_left():  # noqa: ASYNC110 - a container sets no Event
        await asyncio.sleep(0.2)


@pytest.mark.slow
async def test_an_evaluation_ends_soon_and_says_why_where_nothing_answers(tasks: Path) -> None:
    [port] = free_ports(1)
    nowhere = ChatServer(script, url=f"http://127.0.0.1:{port}/v1")
    evaluation = await evaluate(tasks, nowhere, "--samples", "9", "--max-concurrent", "3")
    status, _, err = await evaluation.ended()
    assert status == 1
    assert "it is asked again" in err.splitlines()[1], "the first failure is said at once"
    assert "ended: the server has replied in no episode: " in err
    assert "ClientConnectorError" in err
    assert len(evaluation.rows) < 9
    assert containers_left() == []


@pytest.fixture
async def harness(tmp_path: Path, docker_client: docker.DockerClient) -> AsyncIterator[Path]:
    """A program whose image is not made."""
    name = f"agent-{secrets.token_hex(4)}"
    (tmp_path / "program").mkdir()
    program = tmp_path / "program" / "agent"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    path = tmp_path / "agent.toml"
    path.write_text(FILE.format(name=name))
    yield path
    for volume in docker_client.volumes.list(filters={"name": f"{PREFIX}{name}-"}):
        volume.remove()
    with suppress(APIError):
        docker_client.images.remove(read_harness(path).harness.image, force=True)


def by_program(task: str) -> Sequence[str | dict[str, Any]]:
    fix = bug.FIX.replace("100", "10") if "wrongly" in task else bug.FIX
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "bash", "arguments": json.dumps({"command": fix})},
    }
    message = {"content": None, "tool_calls": [call]}
    return [{"choices": [{"message": message, "finish_reason": "tool_calls"}]}, "done"]


@pytest.mark.slow
async def test_an_agent_program_is_evaluated_with_a_servers_model(tasks: Path, harness: Path) -> None:
    api = ContainerApi(docker_host())
    await build(api, read_harness(harness))
    await api.close()
    async with chat_server(by_program, told_at=0) as server:
        evaluation = await evaluate(tasks, server, "--max-concurrent", "3", harness=harness)
        status, _, err = await evaluation.ended()
        assert status == 0, err
        assert {row.key[0]: (row.resolved, row.n_steps) for row in evaluation.rows} == {
            "bench:right-1": (True, 2),
            "bench:wrong-1": (False, 2),
            "bench:right-2": (True, 2),
        }
        assert {tool["function"]["name"] for body in server.bodies for tool in body["tools"]} == {"bash"}
        longer = await evaluate(tasks, server, "--context-tokens", "65536", harness=harness)
        status, _, err = await longer.ended()
        assert (status, "holds results of another evaluation, with limits" in err) == (2, True)
        other = await evaluate(tasks, server)
        status, _, err = await other.ended()
        assert (status, "holds results of another evaluation, with agent" in err) == (2, True)


@pytest.mark.slow
async def test_an_evaluation_whose_program_is_not_on_the_docker_host_ends_and_names_the_command(
    tasks: Path, harness: Path, server: ChatServer
) -> None:
    evaluation = await evaluate(tasks, server, "--samples", "4", "--max-concurrent", "1", harness=harness)
    status, _, err = await evaluation.ended()
    assert status == 1
    assert "ended: the agent program has taken a reply in no episode: this Docker host has no image" in err
    assert "`swerve harness build agent-" in err
    assert len(evaluation.rows) == 3
    assert server.bodies == []


HALF = "\ud800"
TOOL_AGENT = "agent: {system_template: s, instance_template: '{{task}}'}\nmodel: {}\n"


def called(command: str, **more: object) -> dict[str, object]:
    """The body of an answer that calls the tool, with halves of surrogate pairs and other things that no file can hold."""
    arguments = json.dumps({"command": command, HALF: HALF})
    call = {"id": f"{HALF}1", "function": {"name": "bash", "arguments": arguments}}
    message = {"content": HALF, "reasoning_content": HALF, "tool_calls": [call]}
    return {"choices": [{"message": message, "finish_reason": HALF}], **more}


@pytest.mark.slow
async def test_no_answer_of_a_server_keeps_an_evaluation_from_its_end(tasks: Path) -> None:
    def hostile(_: str) -> Sequence[dict[str, object]]:
        nothing = called(f"echo {HALF} >odd")
        nothing["choices"][0]["message"]["tool_calls"][0]["function"]["name"] = HALF  # type: ignore[index]
        many = {HALF: 1, "prompt_tokens": 2**70, "completion_tokens": -1}
        return [nothing, called(f"echo {HALF} >odd", usage=many), called(bug.FIX), called(bug.SUBMIT)]

    agent = tasks.with_name("agent.yaml")
    agent.write_text(TOOL_AGENT)
    async with chat_server(hostile) as server:
        evaluation = await evaluate(tasks, server, "--max-instances", "1", agent=agent)
        async with asyncio.timeout(120):
            status, _, err = await evaluation.ended()
    [row] = evaluation.rows
    assert (status, row.resolved, row.n_steps, row.prompt_tokens) == (0, True, 4, 0), err
    assert "+?" in (evaluation.out / "right-1/patch.diff").read_text()


def kill_player(evaluation: Evaluation) -> None:
    """Kill the process that plays its episodes, of which one waits for a reply."""
    pid = evaluation.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)


@pytest.mark.slow
async def test_a_player_that_is_killed_is_started_again(tasks: Path) -> None:
    def killing(task: str) -> Sequence[str]:
        if server.num_requests == 2:
            kill_player(evaluation)
        return script(task)

    async with chat_server(killing) as server:
        evaluation = await evaluate(tasks, server, "--max-instances", "1")
        status, _, err = await evaluation.ended()
    assert (status, [row.resolved for row in evaluation.rows]) == (0, [True])
    assert "ended (status -9); its episodes begin anew" in err
    while containers_left():  # noqa: ASYNC110 - a container sets no Event
        await asyncio.sleep(0.2)


@pytest.mark.slow
async def test_an_episode_whose_players_are_all_killed_is_lost_and_the_evaluation_ends(tasks: Path) -> None:
    def killing(task: str) -> Sequence[str]:
        kill_player(evaluation)
        return script(task)

    async with chat_server(killing) as server:
        evaluation = await evaluate(tasks, server, "--max-instances", "1")
        status, _, _ = await evaluation.ended()
    assert server.num_requests == 3
    [row] = evaluation.rows
    assert (status, row.resolved, row.exit_status) == (1, None, "WorkerError")
    assert "3 processes ended while they played it" in row.error
    while containers_left():  # noqa: ASYNC110 - a container sets no Event
        await asyncio.sleep(0.2)


@pytest.mark.slow
async def test_results_of_another_model_are_not_continued(tasks: Path, server: ChatServer) -> None:
    await (await evaluate(tasks, server, "--max-instances", "1")).ended()
    status, _, told = await (await evaluate(tasks, server, "--temperature", "1")).ended()
    assert status == 2
    assert "holds results of another evaluation, with options {}" in told


@pytest.mark.slow
async def test_the_key_is_in_no_file_and_no_line(tasks: Path, server: ChatServer) -> None:
    key = "sk-very-secret-key"
    evaluation = await evaluate(
        tasks, server, "--max-instances", "1", "--key-env", "MY_KEY", environment={"MY_KEY": key}
    )
    status, out, err = await evaluation.ended()
    assert status == 0
    assert key not in out + err
    assert [
        file for file in evaluation.out.rglob("*") if file.is_file() and key.encode() in file.read_bytes()
    ] == []
