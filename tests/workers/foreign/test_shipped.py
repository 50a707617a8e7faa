"""A shipped agent program plays whole episodes, by the benchmark that plays all of them, which notices what is wrong with an episode."""

import pytest
from msgspec.structs import replace

from benchmarks import bug, harnesses
from benchmarks.harnesses import Measured, ProgramStage, ending_faults
from benchmarks.scripted_programs import COMMANDS, ProgramScript, faults, replies
from pipeline.harness import Harness
from pipeline.trajectory import Submitted
from tests.workers.foreign.program import bundle
from workers.policy.render import Renderer
from workers.sandbox.docker import DockerSandboxes

pytestmark = [pytest.mark.docker, pytest.mark.slow]


def test_the_benchmark_finds_nothing_wrong(
    mini: Harness, task_image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert harnesses.main(["--programs", "mini", "--episodes", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"mini {mini.version}\nfinished with nothing wrong             1/1\n" in printed
    assert "turns / replies taken or not            6/6\n" in printed


async def test_a_whole_episode_is_recorded_and_what_is_wrong_with_one_is_noticed(
    mini: Harness, task_image: str, sandboxes: DockerSandboxes
) -> None:
    with bug.image():
        one = await ProgramStage(mini, Measured(sandboxes), bundle()).play("whole", 0)
    played = one.trajectory
    assert one.faults == ()
    assert isinstance(played.outcome, Submitted)
    assert b"percent / 100" in played.outcome.patch
    assert [turn.after for turn in played.turns] == [-1, 0, 1, 2, 3, 4]
    actions = [action for turn in played.turns for action in turn.actions]
    assert [action.command for action in actions[: len(COMMANDS)]] == list(COMMANDS)

    script = ProgramScript(Renderer(bundle()), replies("mini"), None, prompts=[[0]] * len(COMMANDS) + [[0]])
    assert not list(faults(played, script))
    assert list(ending_faults("limit", played))
    assert list(ending_faults("engine", played))
    assert list(ending_faults("whole", replace(played, reward=None)))
    last = played.turns[-1]
    altered = replace(last, fed=last.fed[4:])
    (fault,) = faults(replace(played, turns=(*played.turns[:-1], altered)), script)
    assert "is not what the engine sampled" in fault
    aside = replace(played, turns=played.turns[:-1])
    assert any("5 turns, 0 not taken" in fault for fault in faults(aside, script))
