"""`python -m pipeline.templates` over published chat templates: rendered as transformers renders them, and no difference from a
context that only grows is kept quiet.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pipeline.agent.upstream import BASH_TOOL
from pipeline.chat import ChatMessage, ToolCall, recognised
from pipeline.chat_template import ChatTemplate, TemplateText
from pipeline.errors import RequestError
from pipeline.templates import judge, main
from pipeline.tokenizer import TokenizerBundle

DIRECTORY = Path("tests/chat_templates")
NAMES = sorted(path.stem for path in DIRECTORY.glob("*.jinja"))
EQUAL = "equal to a full re-render"
CALL = ToolCall(
    name="bash", arguments='{"command": "ls <a> && echo \\"fünf\\"", "b": 1, "a": 2}', id="abcdefghi"
)
TOLD = (
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "What's <here> & there?"),
    ChatMessage("assistant", "I look.", tool_calls=(CALL,)),
    ChatMessage("tool", "a.py\n<b> 'c' ü", tool_call_id="abcdefghi"),
)


def bundle(source: str, **variables: Any) -> TokenizerBundle:
    return TokenizerBundle(
        tokenizer_json=b"",
        chat_template=source,
        eos_token="</s>",
        bos_token="<s>",
        stop_token_ids=(),
        vocab_size=0,
        template_kwargs=variables,
        reply_format=recognised(source),
    )


def published(name: str, **variables: Any) -> TokenizerBundle:
    return bundle((DIRECTORY / f"{name}.jinja").read_text(), **variables)


def as_openai(message: ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        fields["tool_call_id"] = message.tool_call_id
    return fields


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_messages", [2, 4])
@pytest.mark.parametrize("thinks", [None, False])
def test_a_template_renders_as_transformers_renders_it(
    name: str, num_messages: int, thinks: bool | None
) -> None:
    chosen = published(name) if thinks is None else published(name, enable_thinking=thinks)
    try:
        rendered, _ = render_jinja_template(
            [[as_openai(message) for message in TOLD[:num_messages]]],
            tools=[BASH_TOOL],
            chat_template=chosen.chat_template,
            add_generation_prompt=True,
            bos_token="<s>",
            eos_token="</s>",
            **chosen.template_kwargs,
        )
    except Exception:  # whatever a template raises
        with pytest.raises(RequestError):
            TemplateText(chosen).render(TOLD[:num_messages], (BASH_TOOL,))
    else:
        assert TemplateText(chosen).render(TOLD[:num_messages], (BASH_TOOL,)) == rendered[0]


def test_there_are_templates_of_many_families() -> None:
    assert len(NAMES) >= 40


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("with_tools", [False, True])
def test_no_difference_is_unannounced(name: str, with_tools: bool) -> None:
    assert not judge(published(name), with_tools=with_tools).unannounced


def test_a_difference_that_nothing_announces_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.chat_template.announce_replies", lambda render, seams: [])
    verdict = judge(published("Qwen-Qwen3-0.6B"), with_tools=False)
    assert verdict.words == "differs, unannounced: words, thoughts, spaced"


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", EQUAL, EQUAL),
        ("trl-qwen3_instruct_2507", EQUAL, EQUAL),
        ("trl-glm4moe", "differs, announced: thoughts, spaced", EQUAL),
        ("GLM-4.6", "differs, announced: thoughts, spaced", EQUAL),
        ("openai-gpt-oss-120b", "differs, announced: thoughts", EQUAL),
        ("written-llama-2", "differs, announced: spaced", None),
        ("written-mistral-v0.1", EQUAL, None),
        ("trl-gemma", "differs, announced: spaced", None),
        ("trl-cohere2", EQUAL, None),
        ("moonshotai-Kimi-K2", EQUAL, EQUAL),
        ("meta-llama-Llama-3.1-8B-Instruct", "differs, announced: spaced", EQUAL),
    ],
)
def test_each_family_has_its_verdict(name: str, text: str, calls: str | None) -> None:
    assert judge(published(name), with_tools=False).words == text
    verdict = judge(published(name), with_tools=True)
    assert verdict.words == calls if calls else verdict.refused


@pytest.mark.slow
def test_the_table_of_a_directory_has_a_row_for_each_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(DIRECTORY), "--announcements"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n| ") == len(NAMES)
    assert "differs, unannounced" not in printed
    assert "- the template drops the thoughts of earlier replies; here they stay" in printed


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["nowhere.jinja"], "give a chat template"), ([str(DIRECTORY), "--set", "x"], "NAME=VALUE")],
)
def test_a_mistake_in_the_command_is_one_line(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


def test_results_that_a_template_groups_into_one_turn_of_the_user_are_rendered_together() -> None:
    template = ChatTemplate(published("Qwen-Qwen3-0.6B"), (BASH_TOOL,))
    behind = template.after_reply([ChatMessage("tool", "one"), ChatMessage("tool", "two")])
    assert behind.removeprefix('"}}\n</tool_call>') == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_results_name_the_calls_that_the_policy_made() -> None:
    template = ChatTemplate(published("moonshotai-Kimi-K2"), (BASH_TOOL,))
    behind = template.after_reply([ChatMessage("tool", "out", tool_call_id="functions.bash:7")])
    assert "## Return of functions.bash:7\\nout" in behind.replace("\n", "\\n")


@pytest.mark.parametrize("identity", ["x", "", "abcdefghi"])
def test_an_id_that_a_template_refuses_is_replaced_by_a_number(identity: str) -> None:
    template = ChatTemplate(published("mistralai-Mistral-Nemo-Instruct-2407"), (BASH_TOOL,))
    behind = template.after_reply([ChatMessage("tool", "out", tool_call_id=identity)])
    shown = identity if len(identity) == 9 else "000000000"
    assert behind.endswith(f'[TOOL_RESULTS]{{"content": out, "call_id": "{shown}"}}[/TOOL_RESULTS]')


def test_variables_of_a_bundle_reach_its_template() -> None:
    assert ChatTemplate(published("Qwen-Qwen3-0.6B")).opening == "<|im_start|>assistant\n"
    silent = ChatTemplate(published("Qwen-Qwen3-0.6B", enable_thinking=False))
    assert silent.opening == "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_a_system_message_that_is_refused_is_joined_to_the_first_of_the_user() -> None:
    template = ChatTemplate(published("trl-gemma"))
    assert template.render(TOLD[:2]) == (
        "<s><start_of_turn>user\nBe brief.\n\nWhat's <here> & there?<end_of_turn>\n<start_of_turn>model\n"
    )
    assert template.announcements[0].about == "system"
    assert "System role not supported" in template.announcements[0].text


@pytest.mark.parametrize("name", ["trl-phi3", "Apertus-8B-Instruct", "trl-cohere2"])
def test_an_agent_that_calls_tools_needs_a_template_that_can(name: str) -> None:
    with pytest.raises(RequestError, match="take an agent file whose commands are text"):
        ChatTemplate(published(name), (BASH_TOOL,))
