"""Any model, on this machine alone: real containers, a real grader, servers that are well and servers that break."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import msgspec
import pytest
from msgspec.structs import replace

from benchmarks import bug
from pipeline.taskfile import write_tasks
from tests.trainer.evaluate.chat_server import ChatServer, chat_server
from trainer.evaluate.results import EpisodeResult
from workers.docker.labels import FLEET

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


async def evaluate(tasks: Path, server: ChatServer, *options: str, environment: Any = None) -> Evaluation:
    out = tasks.with_name("out")
    where = ("--api-base", server.url, "--model", "m", "--agent", str(AGENT), "--out", str(out), "--local")
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
        == 2
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
    before = server.begun.copy()
    second = await evaluate(tasks, server, "--samples", "2")
    status, _, told = await second.ended()
    assert status == 0
    assert f"{len(done)} of them are in" in told
    assert sorted(row.key for row in second.rows) == sorted({row.key for row in second.rows}), "none twice"
    assert (server.begun - before).total() == 6 - len(done)
    while containers_left():  # noqa: ASYNC110 - a container sets no Event
        await asyncio.sleep(0.2)


@pytest.mark.slow
async def test_results_of_another_model_are_not_continued(tasks: Path, server: ChatServer) -> None:
    await (await evaluate(tasks, server, "--max-instances", "1")).ended()
    status, _, told = await (await evaluate(tasks, server, "--temperature", "1")).ended()
    assert status == 2
    assert "holds results with another sampling" in told


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
