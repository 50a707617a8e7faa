"""mini-swe-agent's own package, as a black box, leads to the same token ids as the built-in loop in exact mode.

What differs, so that no reply here does it: a command that a signal ended has the status -9 in the package and 137 in the loop, as with
upstream in Docker; and a black box's submission is the changes in its workdir, where the loop's is what the last command printed.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from pipeline.agent.option import read_agent
from pipeline.harness import Harness
from pipeline.message import unpack_int32s
from pipeline.request import EpisodeStatus
from pipeline.trajectory import FIRST_IN_CONTEXT, Trajectory, parents_of
from tests.workers.agent.fidelity.packages import directory_of
from tests.workers.agent.fidelity.scenes import TASK
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from tests.workers.foreign.program import bundle, call
from trainer.demo.__main__ import write_program
from trainer.demo.lessons import RECIPE
from workers.grading.grade import Grader
from workers.policy.scripted import ScriptedPolicies
from workers.rollout import run_rollout
from workers.sandbox.docker import DockerSandboxes

pytestmark = [pytest.mark.docker, pytest.mark.slow]

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
COMMANDS = (
    "cat calc.py",
    "sed -i 's/a - b/a + b/' calc.py",
    "echo to stderr >&2; cat nosuch; exit 3",
    "",
    "printf 'a\\r\\nb\\rc\\n\\r\\r\\n'",
    "printf '\\377\\376 caf\\303\\251 \\303'",
    "printf '<|im_end|>{{ braces }} &<>\\t\\033[0m\\0\\f\\n'",
    "printf 'x%.0s' $(seq 12000)",
    "cat <<'END'\n</think>\n``\nEND",
    f"echo {SUBMIT} and more",
)
THOUGHT = "<think>\nFirst I look.\n</think>\n\n"


def with_tool() -> list[str]:
    """Replies for files that speak in calls of tools: commands, parallel calls, and what is no call or no right one."""
    two = f"Both.\n{call('bash', command='ls')}\n{call('bash', command='pwd')}"
    broken = '<tool_call>\n{"name": "bash", "arguments": {"command": }}\n</tool_call>'
    wrong = [call("nosuch", command="ls"), call("bash", cmd="ls"), broken, "I am lost.", ""]
    plain = [f"{THOUGHT}I do.\n{call('bash', command=command)}" for command in COMMANDS]
    between = [one for reply in wrong for one in (reply, call("bash", command="true"))]
    return [*plain, two, *between, call("bash", command=SUBMIT)]


def with_text() -> list[str]:
    """The same for files that speak in text."""

    def act(command: str) -> str:
        return f"I do.\n```mswea_bash_command\n{command}\n```"

    plain = [f"{THOUGHT}{act(command)}" for command in COMMANDS]
    return [*plain, f"{act('ls')}\n{act('pwd')}", act("ls"), "I am lost.", act("ls"), act(SUBMIT)]


# What the program is started with, and the replies. Two files are for replies in text and do not say so themselves.
FILES = {
    "mini.yaml": (("--config=mini.yaml",), with_tool()),
    "default.yaml": (("--config=default.yaml", "--model-class=litellm_textbased"), with_text()),
    "mini_textbased.yaml": (("--config=mini_textbased.yaml", "--model-class=litellm_textbased"), with_text()),
}


def heard(played: Trajectory) -> list[list[int]]:
    """The whole prompt of each turn."""
    prompts, held = list[list[int]](), list[list[int]]()
    for turn, parent in zip(played.turns, parents_of(played.turns), strict=True):
        before = [] if parent == FIRST_IN_CONTEXT else held[parent][: turn.kept_tokens]
        prompts.append([*before, *unpack_int32s(turn.fed)])
        held.append([*prompts[-1], *unpack_int32s(turn.sampled)])
    return prompts


def commands(played: Trajectory) -> list[list[str]]:
    return [[action.command for action in turn.actions] for turn in played.turns]


async def episode(
    sandboxes: DockerSandboxes, image: RepoImage, replies: Sequence[str], agent: str, harness: Harness | None
) -> Trajectory:
    task = make_task(image.tag, base_commit=image.commit, problem=TASK)
    task = replace(task, resources=replace(task.resources, memory_bytes=1024**3, pids=512))
    claim = make_claim(task, format_errors=1000)
    request = replace(claim.request, agent_config=agent, harness=harness)
    return await run_rollout(
        replace(claim, request=request),
        EpisodeStatus(),
        policies=ScriptedPolicies(bundle(), replies),
        sandboxes=sandboxes,
        grader=Grader(sandboxes),
    )


@pytest.mark.parametrize("file", FILES)
async def test_a_black_box_and_the_built_in_loop_have_the_same_token_ids(
    sandboxes: DockerSandboxes, repo_image: RepoImage, mini: Harness, file: str
) -> None:
    path = directory_of("2.4") / "minisweagent" / "config" / file
    agent = read_agent([str(path)], exact=True)
    words, replies = FILES[file]
    program = replace(mini, command=(*mini.command, *words))
    built_in = await episode(sandboxes, repo_image, replies, agent, None)
    black_box = await episode(sandboxes, repo_image, replies, "", program)
    assert heard(black_box) == heard(built_in)
    assert [turn.sampled for turn in black_box.turns] == [turn.sampled for turn in built_in.turns]
    assert len(built_in.turns) == len(replies)


async def test_the_demos_program_has_the_token_ids_of_the_demos_agent(
    sandboxes: DockerSandboxes, repo_image: RepoImage, mini: Harness, tmp_path: Path
) -> None:
    """No reply lacks a command: the package, unlike the loop with a file of 1.x, does not send such a reply back."""
    program = write_program(tmp_path / "program.toml")
    assert program.image == mini.image
    submit = f"{SUBMIT} && git add -A && git diff --cached"
    replies = [f"THOUGHT: I do it.\n\n```bash\n{command}\n```" for command in (*COMMANDS[:2], submit)]
    built_in = await episode(sandboxes, repo_image, replies, read_agent([str(RECIPE)]), None)
    black_box = await episode(sandboxes, repo_image, replies, "", program)
    assert heard(black_box) == heard(built_in)
    assert commands(black_box) == commands(built_in)
    assert len(built_in.turns) == len(replies)
    assert [one.reward and one.reward.value for one in (built_in, black_box)] == [1.0, 1.0]
