import json

import pytest
from msgspec.structs import replace

from pipeline.agent.config import AgentConfig, load_agent
from pipeline.agent.files import to_text
from pipeline.agent.upstream import BASH_BLOCK, MSWEA_BLOCK, MSWEA_TAG
from pipeline.chat import ChatMessage, ReplyFormat, ToolCall
from pipeline.message import decode, encode
from pipeline.trajectory import Turn
from workers.agent.commands import BashCommand, FormatError, called, read_reply
from workers.policy.formats import taken_apart


def reply(text: str, *calls: ToolCall) -> Turn:
    """A turn of a policy that tells thoughts from content."""
    said = ChatMessage("assistant", text, tool_calls=calls)
    return Turn(
        kept_tokens=0, fed=b"", sampled=b"", logprobs=b"", versions=(), stop="stop", text=text, reply=said
    )


def agent(action: str = BASH_BLOCK, **swerve: object) -> AgentConfig:
    said = {"agent": {"action_regex": action}, "swerve": {"upstream": "1.17", **swerve}}
    return load_agent(to_text(said))


async def num_actions(text: str, config: AgentConfig) -> int:
    found = await read_reply(reply(text), config)
    return len(found.actions) if isinstance(found, FormatError) else len(found)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("THOUGHT: look\n\n```bash\nls -la\n```", "ls -la"),
        ("```bash\n  ls  \n```\nand that was it", "ls"),
        ("```bash   \n\nls\n\npwd\n```", "ls\n\npwd"),
        ("```bash\r\nls\r\n```", "ls"),
        ("```bash\n\n```", ""),
        ("```python\nprint()\n```\n```bash\nls\n```", "ls"),
        ("```bash\ncat > a <<'E'\n```\nx\n```\nE\n```", "cat > a <<'E'"),  # cut short, as upstream does
        ("```bash\ngrep '</think>' a\n```", "grep '</think>' a"),
        ("```bash\ncat > a <<'E'\n</think>\nE\n```", "cat > a <<'E'\n</think>\nE"),
    ],
)
async def test_one_bash_block_is_the_command(text: str, command: str) -> None:
    assert await read_reply(reply(text), agent()) == (BashCommand(command),)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("I am done.", 0),
        ("", 0),
        ("```bash\nls", 0),
        ("```bash\nls```", 0),
        ("```sh\nls\n```", 0),
        ("```mswea_bash_command\nls\n```", 0),
        ("```bash\nls\n```\n```bash\npwd\n```", 2),
    ],
)
async def test_no_block_or_two_are_a_format_error_that_says_how_many(text: str, found: int) -> None:
    wrong = await read_reply(reply(text), agent())
    assert isinstance(wrong, FormatError)
    assert len(wrong.actions) == found
    assert wrong.reason == f"expected exactly 1 command, found {found}"


@pytest.mark.parametrize(
    ("text", "opened", "found"),
    [
        ("<think>\n```bash\nrm x\n```\n</think>\n```bash\nls\n```", False, 1),
        ("perhaps ```bash\nrm x\n```\n</think>\n\n```bash\nls\n```", True, 1),
        ("<think>```bash\nls\n```", False, 0),
        ("```bash\nls\n```", True, 0),
        ("```bash\ncat > a <<'E'\n</think>\nE\n```", False, 1),
    ],
)
async def test_thoughts_are_not_searched(text: str, opened: bool, found: int) -> None:
    said = taken_apart(text, ReplyFormat(), opened, False)
    seen = await read_reply(replace(reply(text), reply=said), agent())
    assert (0 if isinstance(seen, FormatError) else len(seen)) == found


async def test_a_reply_that_is_nothing_but_content_is_searched_whole() -> None:
    command = "```bash\ncat > a <<'E'\n</think>\nE\n```"
    assert await read_reply(replace(reply(command), reply=None), agent()) == (
        BashCommand("cat > a <<'E'\n</think>\nE"),
    )


async def test_an_exact_agent_searches_thoughts_too() -> None:
    turn = replace(reply("<think>\n```bash\nls\n```\n</think>\n```bash\npwd\n```"), sampled=b"1234")
    seen = await read_reply(turn, agent(exact=True))
    assert seen == FormatError("Expected exactly 1 action, found 2.", ("ls", "pwd"))


async def test_a_command_with_a_nul_character_is_a_format_error() -> None:
    assert isinstance(await read_reply(reply("```bash\necho \0\n```"), agent()), FormatError)


async def test_other_expressions_find_other_fences() -> None:
    block, tag = agent(MSWEA_BLOCK), agent(MSWEA_TAG)
    assert await read_reply(reply("```mswea_bash_command\nls\n```"), block) == (BashCommand("ls"),)
    assert await num_actions("```bash\nls\n```", block) == 0
    assert await read_reply(reply("<mswea_bash_command>ls</mswea_bash_command>"), tag) == (BashCommand("ls"),)


@pytest.mark.slow
async def test_a_reply_that_takes_for_ever_to_search_is_a_format_error() -> None:
    wrong = await read_reply(reply("```bash" + "\n" * 200_000), agent())
    assert isinstance(wrong, FormatError)
    assert wrong.reason == "the reply could not be searched for commands within 2 s of CPU time"
    assert await read_reply(reply("```bash\nls\n```"), agent()) == (BashCommand("ls"),)


def call(arguments: str, *, name: str = "bash", tool_call_id: str = "1") -> ToolCall:
    return ToolCall(name=name, arguments=arguments, id=tool_call_id)


def test_tool_calls_are_commands_in_their_order() -> None:
    calls = [call('{"command": "ls"}'), call('{"command": "pwd", "more": 1}', tool_call_id="2")]
    assert called(calls) == (BashCommand("ls", "1"), BashCommand("pwd", "2"))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ([], "No tool calls found in the response. Every response MUST include at least one tool call."),
        ([call('{"command": "ls"}', name="python")], "Unknown tool 'python'."),
        ([call('{"cmd": "ls"}')], "Missing 'command' argument in bash tool call."),
        ([call('["command"]')], "Missing 'command' argument in bash tool call."),
        (
            [call('{"command": "ls"')],
            "Error parsing tool call arguments: Expecting ',' delimiter: line 1 column 17 (char 16)."
            "Missing 'command' argument in bash tool call.",
        ),
        ([call("[" * 100_000)], "Error parsing tool call arguments: maximum recursion depth exceeded"),
        ([call('{"command": "ls"}'), call("{}")], "Missing 'command' argument in bash tool call."),
        ([call('{"command": 5}')], "The 'command' argument in bash tool call is not a text."),
        ([call('{"command": "\\u0000"}')], "The command contains a NUL character."),
    ],
)
def test_one_wrong_call_makes_the_reply_a_format_error(wrong: list[ToolCall], reason: str) -> None:
    found = called(wrong)
    assert isinstance(found, FormatError)
    assert found.reason.startswith(reason)


HALF = '{"command": "echo \\ud800"}'
WRITTEN: dict[str, tuple[ReplyFormat, str]] = {
    "harmony": (
        ReplyFormat(thoughts="harmony"),
        f"<|channel|>commentary to=functions.bash<|message|>{HALF}<|call|>",
    ),
    "hermes": (
        ReplyFormat(tool_calls="hermes"),
        f"<tool_call>{json.dumps({'name': 'bash', 'arguments': HALF})}</tool_call>",
    ),
    "mistral": (ReplyFormat(tool_calls="mistral"), f"[TOOL_CALLS]bash[ARGS]{HALF}"),
}


@pytest.mark.parametrize(("form", "text"), WRITTEN.values(), ids=list(WRITTEN))
def test_half_of_a_surrogate_pair_in_a_call_becomes_a_question_mark_in_every_format(
    form: ReplyFormat, text: str
) -> None:
    said = taken_apart(text, form, False, True)
    assert decode(encode(said), ChatMessage) == said
    assert called(said.tool_calls) == (BashCommand("echo ?"),)
