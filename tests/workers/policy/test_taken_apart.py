"""A conversation takes its replies apart, and answers tool calls as the model's own template does."""

import json

from msgspec.structs import replace

from pipeline.chat import ChatMessage, ToolCall, recognised
from pipeline.message import unpack_int32s
from pipeline.trajectory import Turn
from tests.workers.agent.episode import AGENT, claim, opening, user
from tests.workers.policy.templates import bundle, renderer
from workers.policy.scripted import ScriptedPolicies

NAME = "Qwen-Qwen3-0.6B"
CALLING = json.dumps(
    {
        "agent": {"system_template": "s", "instance_template": "{{task}}"},
        "swerve": {"dialect": "tool_calls", "upstream": "2.4"},
    }
)
LS = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


def policies(*replies: str, name: str = NAME) -> ScriptedPolicies:
    chosen = bundle(name)
    return ScriptedPolicies(replace(chosen, reply_format=recognised(chosen.chat_template)), replies)


def decoded(turn: Turn) -> str:
    return renderer(NAME).decode(unpack_int32s(turn.fed))


async def test_thoughts_and_calls_of_a_reply_are_told_apart_and_results_are_rendered_by_the_template() -> (
    None
):
    scripted = policies(f"<think>\nwhy\n</think>\n\nI look.\n{LS}", "done")
    conversation = await scripted.open(claim(agent=CALLING))
    first = await conversation.begin(opening("s", "u"))
    assert first is not None
    call = ToolCall(name="bash", arguments='{"command": "ls"}')
    assert first.reply == ChatMessage("assistant", "I look.", reasoning="why", tool_calls=(call,))
    second = await conversation.answer([ChatMessage("tool", "a.py"), ChatMessage("tool", "b.py")])
    assert second is not None
    assert second.kept_tokens == len(first.fed) // 4 + len(first.sampled) // 4
    assert decoded(second) == (
        "\n<|im_start|>user\n<tool_response>\na.py\n</tool_response>\n<tool_response>\nb.py\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert second.reply is None
    assert second.said == ChatMessage("assistant", "done")


async def test_the_tools_are_described_to_an_agent_that_calls_them_and_to_no_other() -> None:
    for agent, described in ((CALLING, True), (AGENT, False)):
        scripted = policies("done")
        turn = await (await scripted.open(claim(agent=agent))).begin(opening("s", "u"))
        assert turn is not None
        assert ("Execute a bash command" in decoded(turn)) is described


async def test_a_thought_that_the_prompt_opened_is_no_content() -> None:
    scripted = policies(
        "why\n</think>\n\nplain", "no </think> here", name="deepseek-ai-DeepSeek-R1-Distill-Llama-8B"
    )
    conversation = await scripted.open(claim())
    first = await conversation.begin(opening("s", "u"))
    assert first is not None
    assert first.reply == ChatMessage("assistant", "plain", reasoning="why")
    second = await conversation.answer(user("on"))
    assert second is not None
    assert second.said == ChatMessage("assistant", " here", reasoning="no")
