"""What an agent file's keys do in an episode."""

from pathlib import Path

import pytest

from pipeline.errors import RequestError
from pipeline.trajectory import Exhausted
from tests.workers.agent import episode
from tests.workers.agent.episode import AGENT, SUBMIT, LocalShell, bash, played
from workers.agent.commands import Submission

EXACT = AGENT.replace("REFUSED: {{error}}", "REFUSED") + "swerve: {exact: true}\n"


def environment(keys: str, agent: str = AGENT) -> str:
    return f"{agent}environment: {{{keys}}}\n"


async def test_an_interpreter_of_the_file_runs_the_commands(shell: LocalShell) -> None:
    agent = environment("interpreter: [sh, -ec]")
    ended = await played(shell, agent, bash("echo $0; false; echo 'not' reached"), bash(SUBMIT))
    assert ended.told[1] == ["<returncode>1</returncode>\n<output>\nsh\n</output>"]


async def test_a_file_without_one_is_run_by_bash(shell: LocalShell) -> None:
    await played(shell, AGENT, bash("echo $0"), bash(SUBMIT))
    assert shell.lines == ["echo $0", SUBMIT]


async def test_an_exact_agent_of_1_x_for_docker_has_a_login_shell(shell: LocalShell) -> None:
    agent = environment("environment_class: docker", EXACT)
    ended = await played(shell, agent, bash("shopt -q login_shell && echo login"), bash(SUBMIT))
    assert "login\n" in ended.told[1][0]


async def test_a_login_shell_reads_no_profile_of_whoever_runs_the_tests(
    shell: LocalShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for profile in (".bash_profile", ".profile", ".bashrc"):
        (tmp_path / profile).write_text("echo the profile was read\n")
    agent = environment("environment_class: docker", EXACT)
    ended = await played(shell, agent, bash("echo begun"), bash(SUBMIT))
    assert ended.told[1] == ["<returncode>0</returncode>\n<output>\nbegun\n</output>"]


async def test_a_command_that_hangs_fails_its_test_soon(
    shell: LocalShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode, "HANGING_S", 0.2)
    with pytest.raises(AssertionError, match=r"hung for 0 s: sleep 1000"):
        await shell.run("sleep 1000", timeout_s=1000)


async def test_only_an_exact_agent_leaves_the_repository_for_its_own_directory(
    shell: LocalShell, tmp_path: Path
) -> None:
    there = tmp_path / "it's there"
    there.mkdir()
    for agent, expected in ((AGENT, tmp_path), (EXACT, there)):
        said = environment(f'cwd: "{there}"', agent)
        ended = await played(shell, said, bash("pwd"), bash(SUBMIT))
        assert f"\n{expected}\n" in ended.told[1][0]


async def test_an_exact_agent_has_upstreams_limit_of_30_s_for_a_command(shell: LocalShell) -> None:
    for agent, limit in ((AGENT, "77"), (EXACT, "30")):
        said = agent.replace("Fix this:", "{{timeout}} s:")
        ended = await played(shell, said, bash(SUBMIT), command_s=77.0)
        assert ended.told[0][1].startswith(f"{limit} s:")


async def test_the_start_up_command_runs_before_the_first_turn(shell: LocalShell) -> None:
    agent = AGENT + "run: {env_startup_command: 'echo {{repo}} > made'}\n"
    ended = await played(shell, agent, bash("cat made"), bash(SUBMIT))
    assert "\nacme/calc\n" in ended.told[1][0]
    assert len(ended.turns) == 2


async def test_a_start_up_command_that_fails_ends_the_request(shell: LocalShell) -> None:
    agent = AGENT + "run: {env_startup_command: 'echo no conda; exit 3'}\n"
    with pytest.raises(RequestError, match="env_startup_command ended with status 3: no conda"):
        await played(shell, agent, bash(SUBMIT))


SECOND = """
agent:
  system_template: You fix code.
  instance_template: "Fix this: {{task}}"
  max_consecutive_format_errors: MOST
  wall_time_limit_seconds: WALL
model:
  model_class: litellm_textbased
  action_regex: "```bash\\n(.*?)\\n```"
  format_error_template: "REFUSED: {{error}}"
"""


def second(*, most: int = 3, wall_s: int = 0, exact: bool = False) -> str:
    return SECOND.replace("MOST", str(most)).replace("WALL", str(wall_s)) + (
        "swerve: {exact: true}\n" if exact else ""
    )


@pytest.mark.parametrize(
    ("most", "exact", "turns"), [(2, False, 2), (0, False, 3), (9, False, 3), (4, True, 4), (0, True, 6)]
)
async def test_how_many_format_errors_in_a_row_end_an_episode(
    shell: LocalShell, most: int, exact: bool, turns: int
) -> None:
    """The file's limit, never above the request's; exact, the file's alone, where 0 is no limit."""
    agent = second(most=most, exact=exact)
    ended = await played(shell, agent, *["what?"] * 6, format_errors=3, turns=6)
    assert len(ended.turns) == turns


# Quick: at an agent file's limit of time the command ends, and what it did is kept.
async def test_the_files_wall_time_ends_a_running_command(shell: LocalShell) -> None:
    ended = await played(shell, second(wall_s=3), bash("touch new; sleep 60"), bash(SUBMIT))
    assert isinstance(ended.outcome, Exhausted)
    assert ended.outcome.limit == "wall_s"
    assert b"new" in ended.outcome.patch


@pytest.mark.slow
async def test_an_exact_agents_wall_time_is_looked_at_between_turns(shell: LocalShell) -> None:
    ended = await played(shell, second(wall_s=5, exact=True), bash("sleep 5.2; echo x > y"), bash(SUBMIT))
    assert ended.outcome == Exhausted(limit="wall_s", patch=b"")
    assert (shell.repository / "y").read_text() == "x\n"


async def test_an_exact_agent_submits_nothing_at_a_limit(shell: LocalShell) -> None:
    for agent, is_empty in ((AGENT, False), (EXACT, True)):
        ended = await played(shell, agent, bash("echo x >> calc.py"), turns=1)
        assert isinstance(ended.outcome, Exhausted)
        assert (ended.outcome.patch == b"") == is_empty


async def test_a_format_error_leaves_the_context_of_an_exact_agent_of_2_x(shell: LocalShell) -> None:
    for exact, roles in ((False, ["assistant", "user"]), (True, ["user"])):
        ended = await played(shell, second(exact=exact), "what?", bash("ls"), bash(SUBMIT))
        assert [message["role"] for message in ended.sent[1]] == ["system", "user", *roles]
        assert [message["role"] for message in ended.sent[2]] == [
            "system",
            "user",
            *roles,
            "assistant",
            "user",
        ]
        assert (ended.turns[1].cut is not None) == exact


# Quick: a reminder stands behind what a command that was stopped wrote.
async def test_the_older_systems_reminders_stand_behind_observations(shell: LocalShell) -> None:
    agent = AGENT + "swerve: {reminders: true}\n"
    replies = [bash("true"), "what?", bash("sleep 9"), bash("true"), bash(SUBMIT)]
    ended = await played(shell, agent, *replies, turns=5, command_s=3.0)
    endings = [texts[-1].rpartition("\nREMINDER: ")[2] for texts in ended.told[1:]]
    assert endings[0] == "You have 4 turns left to arrive at the solution."
    assert endings[1].startswith("REFUSED")
    assert endings[2].startswith("STOPPED")
    assert endings[3] == "You only have 1 turn left. Please provide the final answer"


async def test_what_the_sandbox_did_not_keep_is_counted_by_templates(shell: LocalShell) -> None:
    agent = AGENT.replace(
        "{{output.output}}", "{{output.output[:3]}}{{output.output|length - 6}}{{output.output[-3:]}}"
    )
    ended = await played(shell, agent, bash("head -c 3000000 /dev/zero | tr '\\0' x"), bash(SUBMIT))
    assert "\nxxx2999994xxx</output>" in ended.told[1][0]
    assert isinstance(ended.outcome, Submission)


async def test_a_template_without_a_limit_shows_more_to_an_exact_agent(shell: LocalShell) -> None:
    for agent, shown in ((AGENT, 10_000), (EXACT, 40_000)):
        ended = await played(shell, agent, bash("printf 'x%.0s' $(seq 40000)"), bash(SUBMIT))
        assert abs(ended.told[1][0].count("x") - shown) < 100
