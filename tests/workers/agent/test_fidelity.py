"""In exact mode we send byte for byte what the real mini-swe-agent sends, for every agent file that it ships."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.agent.fidelity.__main__ import agents_of, repository
from tests.workers.agent.fidelity.compare import AgentFile, differences, refused_by_us_alone, scenes_of
from tests.workers.agent.fidelity.packages import RELEASES, shipped_files
from tests.workers.agent.fidelity.scenes import Scene

# 1.x has no names for what this file wants, so that upstream cannot open an episode with it either.
BROKEN = {("1.12", "swebench_roulette.yaml")}
AGENTS = [agent for version in RELEASES for agent in agents_of(version)]


def name(agent: AgentFile) -> str:
    return f"{agent.version} {Path(agent.specs[-1]).name}"


@pytest.mark.slow_but_for("1.12 swebench_roulette.yaml")
@pytest.mark.parametrize("agent", AGENTS, ids=name)
def test_the_same_replies_lead_to_the_same_messages(agent: AgentFile) -> None:
    with repository() as path:
        if (agent.version, Path(agent.specs[-1]).name) in BROKEN:
            assert refused_by_us_alone(agent, path) == ""
            return
        assert list(differences(agent, scenes_of(agent, path), path)) == []


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    [agent] = [one for one in agents_of("1.17") if one.specs[0].endswith("extra/swebench.yaml")]
    plain = AgentFile(agent.version, (*agent.specs, "swerve.upstream=1.12"))
    tree = AgentFile.tree
    monkeypatch.setattr(
        AgentFile,
        "tree",
        lambda self, values, path: {**tree(self, values, path), "swerve": {"upstream": "1.17"}},
    )
    act = "```bash\nprintf 'a\\r\\nb'\n```"
    with repository() as path:
        [found] = differences(plain, [Scene("line ends", [act, act])], path)
    assert found.startswith("line ends: query 2, message 4 (user), content: ")
    assert "\\r" in found


@pytest.mark.slow
def test_the_script_says_that_there_is_no_difference() -> None:
    [path] = [path for path in shipped_files("2.4") if path.name == "swebench.yaml"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.agent.fidelity", str(path)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "2.4.6 swebench.yaml: 16 scenes, none different\nno difference\n"
