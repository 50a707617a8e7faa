"""The form that a template is recognised by reads what the template itself writes, behind the tokens where it belongs."""

from pathlib import Path

import pytest

from pipeline.agent.upstream import BASH_TOOL
from pipeline.chat import ChatMessage, recognised
from pipeline.chat_template import ChatTemplate, call_and_results
from pipeline.errors import RequestError
from pipeline.tokenizer import TokenizerBundle
from workers.policy.formats import taken_apart

DIRECTORY = Path(__file__).parents[3] / "chat_templates"


def bundle(path: Path) -> TokenizerBundle:
    source = path.read_text()
    return TokenizerBundle(
        tokenizer_json=b"",
        chat_template=source,
        eos_token="</s>",
        bos_token="<s>",
        stop_token_ids=(),
        vocab_size=0,
        reply_format=recognised(source),
    )


def test_calls_that_templates_write_are_read() -> None:
    told = [ChatMessage("system", "s"), ChatMessage("user", "u")]
    families: set[str] = set()
    for path in sorted(DIRECTORY.glob("*.jinja")):
        try:
            template = ChatTemplate(bundle(path), (BASH_TOOL,))
        except RequestError:
            continue
        (reply, _) = call_and_results("ls -la", [ChatMessage("tool", "out")], one_call=True)
        prompt, newest = template.rerender(told), template.rerender([*told, reply], opening=False)
        written = newest[len(prompt) if newest.startswith(prompt) else prompt.rfind("u") :]
        read = taken_apart(written, bundle(path).reply_format, False, True)
        families.add(bundle(path).reply_format.tool_calls)
        assert [(call.name, call.arguments) for call in read.tool_calls] == [
            ("bash", '{"command": "ls -la"}')
        ], path.name
    assert families >= {
        "hermes",
        "qwen3_coder",
        "glm",
        "llama3",
        "mistral",
        "harmony",
        "kimi_k2",
        "minimax",
        "pythonic",
    }


@pytest.mark.parametrize("name", ["trl-phi3", "trl-gemma"])
def test_a_template_without_calls_has_no_form(name: str) -> None:
    assert recognised((DIRECTORY / f"{name}.jinja").read_text()).tool_calls == "none"
