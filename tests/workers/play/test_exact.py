"""`workers.play --exact` in our container and the real mini-swe-agent in its own send the same messages."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.agent.config import load_agent
from pipeline.agent.files import merged, to_text
from pipeline.task import ExitCode
from pipeline.taskfile import write_tasks
from tests.workers.agent.fidelity.compare import AgentFile, act_of, message_difference, upstream_plays
from tests.workers.agent.fidelity.packages import shipped_files
from tests.workers.agent.fidelity.scenes import COMMANDS, DONE, TASK, calls
from tests.workers.claims import make_task
from tests.workers.conftest import RepoImage
from workers.play import main

pytestmark = pytest.mark.docker


def replies_for(config: Path) -> list[object]:
    agent = load_agent(to_text(merged([str(config)])))
    if agent.dialect == "tool_calls":
        return [
            *(calls("Let me see.", command) for command in COMMANDS),
            calls("", *COMMANDS),
            calls("", DONE),
        ]
    act = act_of(agent)
    return [act.replace("{}", command) for command in (*COMMANDS, DONE)]


def both_played(
    version: str, config: Path, replies: list[object], image: RepoImage, place: Path, *values: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The trajectory that our command writes, and what the real package in its container sent."""
    tasks, given, out = (place / one for one in ("tasks.jsonl", "replies.json", "traj.json"))
    verdict = ExitCode(eval_script="true\n")
    write_tasks(tasks, [make_task(image.tag, workdir="/testbed", problem=TASK, verdict=verdict)])
    given.write_text(json.dumps(replies))
    specs = (str(config), f'swerve.upstream="{version}"', *values)
    agent = [word for spec in specs for word in ("--agent", spec)]
    files = ("--replies", str(given), "--out", str(out))
    assert main([str(tasks), "--only", "task", *agent, *files, "--exact"]) == 0
    tree = AgentFile(version, (str(config),)).tree(values, Path("/testbed"))
    dialect = load_agent(to_text(tree)).dialect
    scene = {"config": tree, "dialect": dialect, "task": TASK, "replies": replies, "image": image.tag}
    [theirs] = upstream_plays(version, [scene])
    return json.loads(out.read_text()), theirs


def without_extra(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in one.items() if key != "extra"} for one in messages]


# Quick: in a container we send what mini-swe-agent itself sends.
@pytest.mark.slow_but_for("1.12-swebench.yaml")
@pytest.mark.parametrize(
    ("version", "name"), [("1.12", "swebench.yaml"), ("1.17", "swebench_xml.yaml"), ("2.4", "swebench.yaml")]
)
def test_the_whole_command_and_the_real_package_in_docker_send_the_same(
    version: str, name: str, repo_image: RepoImage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [config] = [path for path in shipped_files(version) if path.name == name]
    written, theirs = both_played(version, config, replies_for(config), repo_image, tmp_path)
    capsys.readouterr()
    *ours, last, end = written["messages"]
    assert message_difference(without_extra(ours), theirs["sent"][-1]) == ""
    assert (last["role"], end["role"]) == ("assistant", "exit")
    assert (written["info"]["exit_status"], end["content"]) == ("Submitted", theirs["submission"])
    assert theirs["ended"] == "Submitted"


@pytest.mark.slow
@pytest.mark.parametrize(("version", "name"), [("1.17", "swebench_xml.yaml"), ("2.4", "swebench.yaml")])
def test_a_command_that_times_out_in_docker_differs_from_the_real_package_in_what_2_x_quotes_alone(
    version: str, name: str, repo_image: RepoImage, tmp_path: Path
) -> None:
    [config] = [path for path in shipped_files(version) if path.name == name]
    slow = "printf begun; exec sleep 300"
    agent = load_agent(to_text(merged([str(config)])))
    replies: list[object] = [calls("", slow), calls("", DONE)]
    if agent.dialect == "text":
        replies = [act_of(agent).replace("{}", command) for command in (slow, DONE)]
    written, theirs = both_played(version, config, replies, repo_image, tmp_path, "environment.timeout=10")
    *ours, _, _ = without_extra(written["messages"])
    sent = theirs["sent"][-1]
    if version == "2.4":
        [argv] = re.findall(r"Command '(\[.*\])' timed out", sent[-1]["content"])
        assert [ast.literal_eval(argv)[place] for place in (0, 1, -1)] == ["docker", "exec", slow]
        sent[-1]["content"] = sent[-1]["content"].replace(argv, slow)
    assert "begun" in sent[-1]["content"]
    assert message_difference(ours, sent) == ""
