"""Episodes whose commands are tool calls."""

from typing import Any

from tests.workers.agent.episode import SUBMIT, LocalShell, played
from tests.workers.agent.fidelity.scenes import calls, message
from workers.agent.commands import Submission

AGENT = """
agent:
  system_template: You fix code.
  instance_template: "Fix this: {{task}}"
model:
  format_error_template: "REFUSED: {{error}} {{finish_reason}} {{has_tool_calls}}"
"""
EXACT = AGENT + "swerve: {exact: true}\n"


def messages(sent: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(one["role"], one.get("tool_call_id", ""), one["content"]) for one in sent]


async def test_several_commands_run_in_their_order_and_each_is_answered(shell: LocalShell) -> None:
    first = calls("Two things.", "echo 1 > a; echo one", "cat a; exit 2")
    ended = await played(shell, AGENT, first, calls("", SUBMIT))
    assert messages(ended.sent[1][2:]) == [
        ("assistant", "", "Two things."),
        ("tool", "call_0", "<returncode>0</returncode>\n<output>\none\n</output>"),
        ("tool", "call_1", "<returncode>2</returncode>\n<output>\n1\n</output>"),
    ]
    actions = ended.turns[0].actions
    assert [action.tool_call_id for action in actions] == ["call_0", "call_1"]
    assert [action.observation and action.observation.exit_code for action in actions] == [0, 2]


async def test_a_submission_ends_the_commands_behind_it(shell: LocalShell) -> None:
    ended = await played(shell, AGENT, calls("", "echo x > new", SUBMIT, "touch never"))
    assert isinstance(ended.outcome, Submission)
    assert b"+x" in ended.outcome.printed
    assert not (shell.repository / "never").exists()
    assert [action.observation is None for action in ended.turns[0].actions] == [False, True, True]


async def test_a_wrong_call_is_answered_under_its_id(shell: LocalShell) -> None:
    wrong = message("x", ("bash", '{"command": "touch never"}'), ("python", "1"))
    ended = await played(shell, AGENT, wrong, calls("", SUBMIT))
    reason = "REFUSED: Unknown tool 'python'.Missing 'command' argument in bash tool call. tool_calls True"
    assert messages(ended.sent[1][2:]) == [
        ("assistant", "", "x"),
        ("tool", "call_0", reason),
        ("tool", "call_1", reason),
    ]
    assert not (shell.repository / "never").exists()
    assert ended.turns[0].actions == ()


async def test_an_exact_agents_wrong_call_leaves_the_context(shell: LocalShell) -> None:
    ended = await played(shell, EXACT, message("x", ("python", "{}")), calls("", SUBMIT))
    assert [one["role"] for one in ended.sent[1]] == ["system", "user", "user"]


async def test_a_reply_without_a_call_is_a_format_error(shell: LocalShell) -> None:
    ended = await played(shell, AGENT, "```bash\nls\n```", calls("", SUBMIT))
    [(role, _, text)] = messages(ended.sent[1][3:])
    assert role == "user"
    assert text == (
        "REFUSED: No tool calls found in the response. Every response MUST include at least one tool call. "
        "stop False"
    )


# Quick: no call is executed after the end of the episode's time.
async def test_a_call_that_no_time_is_left_for_is_not_executed(shell: LocalShell) -> None:
    ended = await played(shell, AGENT, calls("", "sleep 60", "touch never"), calls("", SUBMIT), wall_s=3.0)
    first, second = ended.turns[0].actions
    assert first.observation is not None
    assert first.observation.exit_code is None
    assert second.observation is None
    assert not (shell.repository / "never").exists()


async def test_the_reminder_stands_behind_the_last_result_alone(shell: LocalShell) -> None:
    agent = AGENT + "swerve: {reminders: true}\n"
    ended = await played(shell, agent, calls("", "true", "true"), calls("", SUBMIT), turns=3)
    assert [text.count("REMINDER: You have 2 turns left") for text in ended.told[1]] == [0, 1]
