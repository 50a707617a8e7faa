"""mini-swe-agent's own inspector opens our traj.json."""

from pathlib import Path

import pytest

from pipeline import artefacts
from pipeline.chat import ChatMessage
from pipeline.request import Claim
from tests.pipeline import samples


@pytest.mark.slow
async def test_mini_swe_agents_inspector_shows_our_trajectory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path / "config"))
    from minisweagent.run.utilities.inspector import TrajectoryInspector

    reply = ChatMessage("assistant", "I look at the file.", reasoning="Where is add()?")
    opening = (ChatMessage("system", "You fix bugs."), ChatMessage("user", "add() drops its second argument"))
    turns = (samples.turn(told=opening, reply=reply), samples.turn(told=(ChatMessage("user", "output"),)))
    claim = Claim(request=samples.request(), attempt=1, worker="host/1", claimed_at=1.0)
    path = tmp_path / "calc-7.traj.json"
    path.write_text(artefacts.dump(artefacts.trajectory_json(samples.trajectory(claim, turns=turns))))

    inspector = TrajectoryInspector([path])
    async with inspector.run_test() as pilot:
        pages = [await _page(inspector, pilot)]
        while inspector.i_step < inspector.n_steps - 1:
            await pilot.press("l")
            pages.append(await _page(inspector, pilot))
    assert pages[0] == ["SYSTEM", "You fix bugs.", "USER", "add() drops its second argument"]
    assert pages[1] == ["ASSISTANT", "I look at the file.", "REASONING", "Where is add()?", "USER", "output"]
    assert pages[2][-2] == "EXIT"
    assert "return a + b" in pages[2][-1]


async def _page(inspector, pilot) -> list[str]:
    """All texts of the page that it shows."""
    await pilot.pause()
    return [str(one.render()) for one in inspector.query("#content Static")]
