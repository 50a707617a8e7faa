"""`workers.play --exact` in our container and the real mini-swe-agent in its own send the same messages."""

import json
from pathlib import Path

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
from workers.play.__main__ import main

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


# Quick: in a container we send what mini-swe-agent itself sends.
@pytest.mark.slow_but_for("1.12-swebench.yaml")
@pytest.mark.parametrize(
    ("version", "name"), [("1.12", "swebench.yaml"), ("1.17", "swebench_xml.yaml"), ("2.4", "swebench.yaml")]
)
def test_the_whole_command_and_the_real_package_in_docker_send_the_same(
    version: str, name: str, repo_image: RepoImage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [config] = [path for path in shipped_files(version) if path.name == name]
    replies = replies_for(config)
    tasks, given, out = (tmp_path / one for one in ("tasks.jsonl", "replies.json", "traj.json"))
    verdict = ExitCode(eval_script="true\n")
    write_tasks(tasks, [make_task(repo_image.tag, workdir="/testbed", problem=TASK, verdict=verdict)])
    given.write_text(json.dumps(replies))
    agent = ("--agent", str(config), "--agent", f'swerve.upstream="{version}"')
    files = ("--replies", str(given), "--out", str(out))
    assert main([str(tasks), "--only", "task", *agent, *files, "--exact"]) == 0
    capsys.readouterr()
    written = json.loads(out.read_text())
    tree = AgentFile(version, (str(config),)).tree((), Path("/testbed"))
    dialect = load_agent(to_text(tree)).dialect
    scene = {"config": tree, "dialect": dialect, "task": TASK, "replies": replies, "image": repo_image.tag}
    [theirs] = upstream_plays(version, [scene])
    *ours, last, end = written["messages"]
    kept = [{key: value for key, value in one.items() if key != "extra"} for one in ours]
    assert message_difference(kept, theirs["sent"][-1]) == ""
    assert (last["role"], end["role"]) == ("assistant", "exit")
    assert (written["info"]["exit_status"], end["content"]) == ("Submitted", theirs["submission"])
    assert theirs["ended"] == "Submitted"
