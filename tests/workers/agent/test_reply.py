import re

import pytest

from pipeline.agent.upstream import BASH_BLOCK, MSWEA_BLOCK, MSWEA_TAG
from workers.agent.reply import BashCommand, FormatError, parse_reply

BASH = re.compile(BASH_BLOCK, re.DOTALL)
SECOND = re.compile(MSWEA_BLOCK, re.DOTALL)
TAG = re.compile(MSWEA_TAG, re.DOTALL)


async def num_actions(text: str, action: re.Pattern[str] = BASH) -> int:
    reply = await parse_reply(text, action)
    return 1 if isinstance(reply, BashCommand) else len(reply.actions)


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
        ("<think>\n```bash\nrm x\n```\n</think>\n```bash\nls\n```", "ls"),
        ("perhaps ```bash\nrm x\n```\n</think>\n\n```bash\nls\n```", "ls"),
        ("```bash\ngrep '</think>' a\n```", "grep '</think>' a"),
    ],
)
async def test_one_bash_block_is_the_command(text: str, command: str) -> None:
    assert await parse_reply(text, BASH) == BashCommand(command)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("I am done.", 0),
        ("", 0),
        ("```bash\nls", 0),
        ("```bash\nls```", 0),
        ("```sh\nls\n```", 0),
        ("```mswea_bash_command\nls\n```", 0),
        ("<think>```bash\nls\n```", 0),
        ("```bash\nls\n```\n```bash\npwd\n```", 2),
    ],
)
async def test_no_block_or_two_are_a_format_error_that_says_how_many(text: str, found: int) -> None:
    reply = await parse_reply(text, BASH)
    assert isinstance(reply, FormatError)
    assert len(reply.actions) == found
    assert reply.reason == f"expected exactly 1 command, found {found}"


async def test_a_command_with_a_nul_character_is_a_format_error() -> None:
    assert isinstance(await parse_reply("```bash\necho \0\n```", BASH), FormatError)


async def test_the_second_dialect_has_its_own_fence() -> None:
    assert await parse_reply("```mswea_bash_command\nls\n```", SECOND) == BashCommand("ls")
    assert await num_actions("```bash\nls\n```", SECOND) == 0
    assert await parse_reply("<mswea_bash_command>ls</mswea_bash_command>", TAG) == BashCommand("ls")


async def test_a_reply_that_takes_for_ever_to_search_is_a_format_error() -> None:
    reply = await parse_reply("```bash" + "\n" * 200_000, BASH)
    assert isinstance(reply, FormatError)
    assert reply.reason == "the reply could not be searched for commands within 2 s of CPU time"
    assert await parse_reply("```bash\nls\n```", BASH) == BashCommand("ls")
