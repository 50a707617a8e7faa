"""Replies are taken apart: thoughts only at their beginning, malformed calls as calls, hostile text within limits."""

import json
from pathlib import Path

import pytest

from pipeline.chat import (
    CALL_FORMATS,
    CallFormat,
    ChatMessage,
    ReplyFormat,
    ThoughtFormat,
    ToolCall,
    recognised,
)
from workers.policy.formats import read_reply, taken_apart

TEMPLATES = Path(__file__).parents[3] / "chat_templates"
HEREDOC = "cat > a <<'E'\n</think>\n<tool_call>\nE"


def read(
    text: str, calls: CallFormat = "none", thoughts: ThoughtFormat = "think", *, opened: bool = False
) -> ChatMessage:
    return taken_apart(text, ReplyFormat(thoughts=thoughts, tool_calls=calls), opened, calls != "none")


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("plain", False, "", "plain"),
        ("<think>\nwhy\n</think>\n\nplain", False, "why", "plain"),
        ("\n<think></think>\nplain", False, "", "plain"),
        ("why\n</think>\n\nplain", True, "why", "plain"),
        ("<think>\nwhy</think>plain", True, "why", "plain"),
        ("no end", True, "no end", ""),
        ("<think>no end", False, "no end", ""),
        ("I say </think> here", False, "", "I say </think> here"),
        (f"```bash\n{HEREDOC}\n```", False, "", f"```bash\n{HEREDOC}\n```"),
        (f"why</think>```bash\n{HEREDOC}\n```", True, "why", f"```bash\n{HEREDOC}\n```"),
    ],
)
def test_thoughts_are_what_stands_before_the_first_end_of_a_thought_that_was_begun(
    text: str, opened: bool, reasoning: str, content: str
) -> None:
    assert read(text, opened=opened) == ChatMessage("assistant", content, reasoning=reasoning)


@pytest.mark.parametrize(
    ("text", "thoughts"),
    [
        ("[THINK]why[/THINK]plain", "mistral"),
        ("<seed:think>why</seed:think>plain", "seed"),
        ("<|START_THINKING|>why<|END_THINKING|>plain", "cohere"),
        ("<|channel>thought\nwhy<channel|>plain", "gemma"),
        (
            "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>plain",
            "harmony",
        ),
    ],
)
def test_each_family_has_its_marks(text: str, thoughts: ThoughtFormat) -> None:
    assert read(text, thoughts=thoughts) == ChatMessage("assistant", "plain", reasoning="why")


@pytest.mark.parametrize("calls", [one for one in CALL_FORMATS if one != "none"])
def test_text_without_a_call_is_content(calls: CallFormat) -> None:
    assert read("I look at it.", calls) == ChatMessage("assistant", "I look at it.")


@pytest.mark.parametrize(
    ("calls", "text", "name", "arguments"),
    [
        ("hermes", '<tool_call>\n{"name": "bash", "arguments": {"command": "l', "bash", '{"name"'),
        ("hermes", "<tool_call>ls</tool_call>", "", "ls"),
        ("hermes", '<tool_call>["bash"]</tool_call>', "", '["bash"]'),
        ("llama3", '{"name": "bash", "parameters": {"command": "l', "bash", '{"name"'),
        ("mistral", '[TOOL_CALLS][{"name": "bash", "arguments": {', "bash", '[{"name"'),
        ("mistral", '[TOOL_CALLS]bash[ARGS]{"command": "l', "bash", '{"command"'),
        ("pythonic", "<|tool_call_start|>[bash(ls)]", "", "[bash(ls)]"),
        ("pythonic", "<|tool_call_start|>[bash(command='l", "", "[bash("),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0", "bash", ""),
    ],
)
def test_a_call_that_cannot_be_read_is_a_call_with_what_was_written(
    calls: CallFormat, text: str, name: str, arguments: str
) -> None:
    (call,) = read(text, calls).tool_calls
    assert call.name == name
    assert call.arguments.startswith(arguments)


def test_ids_that_a_model_writes_are_kept() -> None:
    kimi = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:7<|tool_call_argument_begin|>"
        '{"command": "ls"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    call = ToolCall(name="bash", arguments='{"command": "ls"}', id="functions.bash:7")
    assert read(kimi, "kimi_k2").tool_calls == (call,)
    mistral = '[TOOL_CALLS]bash[CALL_ID]abcdefghi[ARGS]{"command": "ls"}'
    assert read(mistral, "mistral").tool_calls[0].id == "abcdefghi"


@pytest.mark.parametrize(
    ("calls", "before", "after"),
    [
        ("qwen3_coder", "<tool_call>\n<function=bash>\n<parameter=command>\n", "\n</parameter>\n</function>"),
        ("glm", "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"),
        (
            "seed",
            "<seed:tool_call>\n<function=bash><parameter=command>",
            "</parameter></function></seed:tool_call>",
        ),
        ("minimax", '<invoke name="bash"><parameter name="command">', "</parameter></invoke>"),
    ],
)
def test_a_value_may_hold_the_marks_that_end_values(calls: CallFormat, before: str, after: str) -> None:
    command = "echo '</parameter> </arg_value>'\ncat <<E\n</parameter>\n</arg_value>\nE"
    reply = read(before + command + after, calls)
    (call,) = reply.tool_calls
    assert reply.content == ""
    assert json.loads(call.arguments) == {"command": command}


def test_calls_in_thoughts_are_thoughts_and_calls_of_a_text_agent_are_content() -> None:
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    assert read(f"<think>{call}</think>", "hermes").tool_calls == ()
    assert taken_apart(call, ReplyFormat(tool_calls="hermes"), False, False).content == call


def test_halves_of_surrogate_pairs_do_not_stop_a_trajectory() -> None:
    (call,) = read(
        '<tool_call>{"name": "a\\ud800", "arguments": {"command": "\\udfff"}}', "hermes"
    ).tool_calls
    assert (call.name, call.arguments) == ("a?", '{"command": "?"}')


@pytest.mark.parametrize("calls", [one for one in CALL_FORMATS if one != "none"])
async def test_hostile_replies_are_read_within_limits(calls: CallFormat) -> None:
    form = ReplyFormat(tool_calls=calls)
    begins = "<tool_call>[TOOL_CALLS]<|python_tag|><|tool_call_start|><function=<parameter=<arg_key><arg_value></parameter>"
    for text in (begins * 3_000, begins + "[" * 100_000, "<tool_call>{" * 20_000, "</parameter>\n" * 50_000):
        reply = await read_reply(text, form, opened=False, with_calls=True)
        assert reply.role == "assistant"


@pytest.mark.parametrize(
    ("template", "calls", "thoughts"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", "hermes", "think"),
        ("Qwen3-Coder", "qwen3_coder", "think"),
        ("meta-llama-Llama-3.1-8B-Instruct", "llama3", "think"),
        ("moonshotai-Kimi-K2", "kimi_k2", "think"),
        ("ByteDance-Seed-OSS", "seed", "seed"),
        ("microsoft-Phi-3.5-mini-instruct", "none", "think"),
    ],
)
def test_the_format_is_recognised_by_the_template(
    template: str, calls: CallFormat, thoughts: ThoughtFormat
) -> None:
    source = (TEMPLATES / f"{template}.jinja").read_text()
    assert recognised(source) == ReplyFormat(thoughts=thoughts, tool_calls=calls)
