"""Files of replies, in every form that they may have."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.chat import ChatMessage, ToolCall
from workers.policy.replies import GivenReply, read_replies

CALL = ToolCall(name="bash", arguments='{"command":"ls"}', id="1")


def read(tmp_path: Path, content: Any) -> list[GivenReply]:
    path = tmp_path / "replies.json"
    path.write_text(json.dumps(content))
    return list(read_replies(path))


def test_a_reply_is_a_text_or_a_message(tmp_path: Path) -> None:
    given = ["ls", {"content": "pwd"}, {"role": "assistant", "content": None, "extra": {"actions": []}}]
    assert [reply.message for reply in read(tmp_path, given)] == [
        ChatMessage("assistant", "ls"),
        ChatMessage("assistant", "pwd"),
        ChatMessage("assistant", ""),
    ]


@pytest.mark.parametrize(
    "call",
    [
        {"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}},
        {"id": "1", "function": {"name": "bash", "arguments": {"command": "ls"}}},
        {"id": "1", "name": "bash", "arguments": {"command": "ls"}},
        {"id": "1", "command": "ls"},
    ],
)
def test_tool_calls_may_be_written_in_short(tmp_path: Path, call: dict[str, Any]) -> None:
    [reply] = read(tmp_path, [{"content": "x", "tool_calls": [call]}])
    assert reply.message == ChatMessage("assistant", "x", tool_calls=(CALL,))


def test_a_trajectory_file_stands_for_its_replies(tmp_path: Path) -> None:
    roles = ("system", "user", "assistant", "tool", "assistant", "exit")
    messages = [{"role": role, "content": f"{number}"} for number, role in enumerate(roles)]
    found = read(tmp_path, {"messages": messages, "info": {}})
    assert [reply.message.content for reply in found] == ["2", "4"]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ([], "holds no reply"),
        ({"messages": []}, "holds no reply"),
        ([5], "give a JSON list of replies"),
        ({"a": "b"}, "give a JSON list of replies"),
        ([{"content": 5}], "content"),
    ],
)
def test_what_is_no_list_of_replies_is_refused(tmp_path: Path, content: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        read(tmp_path, content)
