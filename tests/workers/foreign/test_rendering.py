"""What is told under templates that differ in what they take, and calls in every form."""

import json
from typing import Any

import pytest

from pipeline.agent.upstream import BASH_TOOL
from pipeline.chat import CallFormat, ChatMessage, ReplyFormat, ToolCall, recognised
from pipeline.chat_template import ChatTemplate
from pipeline.errors import RequestError
from pipeline.tokenizer import TokenizerBundle
from tests.workers.foreign.program import BASH, Json, playing, renderers, result, system, user
from tests.workers.policy.templates import DIRECTORY as TEMPLATES
from tests.workers.policy.templates import ENDS
from workers.foreign import voices
from workers.foreign.fields import RequestRefused
from workers.foreign.tools import TEXT_VALUES, ToolSet, function, with_typed_values
from workers.policy.formats import taken_apart

CALLS: dict[str, str] = {
    "hermes": '<tool_call>\n{"name": "edit", "arguments": {"path": "a", "line": 3}}\n</tool_call>',
    "qwen3_coder": (
        "<tool_call>\n<function=edit>\n<parameter=path>\na\n</parameter>\n<parameter=line>\n3\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "seed": (
        "<seed:tool_call>\n<function=edit>\n<parameter=path>a</parameter>\n<parameter=line>3</parameter>\n"
        "</function>\n</seed:tool_call>"
    ),
    "llama3": '{"name": "edit", "parameters": {"path": "a", "line": 3}}',
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|>"
        '{"path": "a", "line": 3}<|tool_call_end|><|tool_calls_section_end|>'
    ),
}
EDIT: Json = {
    "type": "function",
    "function": {
        "name": "edit",
        "description": "Edits",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
        },
    },
}
CALLING = [name for name in ENDS if renderers(name)._base.reply_format.tool_calls in CALLS]


@pytest.mark.parametrize("template", CALLING)
async def test_calls_of_any_tool_go_both_ways_in_each_form(template: str) -> None:
    form: CallFormat = renderers(template)._base.reply_format.tool_calls
    async with playing(CALLS[form], "done", template=template) as program:
        told = [system("s"), user("u")]
        first = await program.chat(told, tools=(EDIT, BASH))
        (made,) = first["tool_calls"]
        assert made["function"]["name"] == "edit"
        assert json.loads(made["function"]["arguments"]) == {"path": "a", "line": 3}
        await program.chat([*told, first, *result(first, "edited it")], tools=(EDIT, BASH))
        assert program.afters() == [-1, 0]
        assert "edited it" in program.prompt(1)
        assert made["id"] not in program.prompt(1), "the policy sees its own ids only"


def test_every_form_with_a_tokenizer_here_was_tried() -> None:
    assert {renderers(name)._base.reply_format.tool_calls for name in CALLING} == CALLS.keys()


AWKWARD = (
    function("no_description", "", None),
    function(
        "agents__spawn", 'says "hello"\nand <b>bye</b>', {"properties": {"x": {"anyOf": [{"type": "null"}]}}}
    ),
    function(
        "odd",
        "x",
        {"type": "object", "properties": {"a": {"type": "array"}, "b": {}}, "$defs": {}},
    ),
)


def without_tokenizer(file: str) -> TokenizerBundle:
    source = (TEMPLATES / file).read_text()
    return TokenizerBundle(
        tokenizer_json=b"",
        chat_template=source,
        reply_format=recognised(source),
        eos_token="</s>",
        bos_token="<s>",
        stop_token_ids=(),
        vocab_size=0,
    )


@pytest.mark.slow
def test_every_template_that_shows_a_shell_shows_any_tools() -> None:
    shown: set[str] = set()
    for path in sorted(TEMPLATES.glob("*.jinja")):
        bundle = without_tokenizer(path.name)
        try:
            ChatTemplate(bundle, (BASH_TOOL,))
        except RequestError:
            continue
        template = ChatTemplate(bundle, AWKWARD)
        text = template.render([ChatMessage("system", "s"), ChatMessage("user", "u")])
        assert all(tool["function"]["name"] in text for tool in AWKWARD), path.name
        assert "out" in template.after_reply([ChatMessage("tool", "out", tool_call_id="call_1")])
        shown.add(bundle.reply_format.tool_calls)
    assert shown >= {
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


@pytest.mark.parametrize(
    ("form", "written"),
    [
        (
            "glm",
            "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n"
            "<arg_key>line</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        ),
        (
            "minimax",
            '<minimax:tool_call>\n<invoke name="edit">\n<parameter name="path">a</parameter>\n'
            '<parameter name="line">3</parameter>\n</invoke>\n</minimax:tool_call>',
        ),
    ],
)
def test_forms_without_a_tokenizer_here_have_typed_values_too(form: CallFormat, written: str) -> None:
    assert form in TEXT_VALUES
    (made,) = taken_apart(written, ReplyFormat(tool_calls=form), False, True).tool_calls
    assert json.loads(with_typed_values(made, ToolSet.of([EDIT], 0)).arguments) == {"path": "a", "line": 3}


@pytest.mark.parametrize("template", ENDS)
async def test_what_a_template_does_not_take_is_joined_to_its_neighbour(template: str) -> None:
    told: list[Json] = [
        system("first rule"),
        {"role": "developer", "content": "second rule"},
        user("one"),
        user("two"),
        system("later rule"),
        {"role": "assistant", "content": "Got it."},
        user("three"),
    ]
    async with playing("fine", "done", template=template) as program:
        first = await program.chat(told, tools=())
        await program.chat([*told, first, user("four"), system("last rule"), user("five")], tools=())
        shown = program.prompt(1)
        words = [
            "first rule",
            "second rule",
            "one",
            "two",
            "later rule",
            "Got it.",
            "three",
            "fine",
            "four",
            "last rule",
            "five",
        ]
        places = [shown.index(word) for word in words]
        assert places == sorted(places)
        assert program.afters() == [-1, 0]


@pytest.mark.parametrize(
    "template", ["ibm-granite-granite-3.3-2B-Instruct", "microsoft-Phi-3.5-mini-instruct"]
)
async def test_a_template_that_knows_no_calls_refuses_tools(template: str) -> None:
    async with playing("never", template=template) as program:
        status, answer = await program.send("chat/completions", {"messages": [user("u")], "tools": [EDIT]})
        assert (status, "cannot show these tools" in answer["error"]["message"]) == (400, True), answer


def test_a_template_that_never_ends_with_a_tool_refuses_it() -> None:
    bundle = without_tokenizer("NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja")
    tool = function("odd", "x", {"properties": {"a": {"type": ["integer", "null"]}}})
    with pytest.raises(RequestError):
        ChatTemplate(bundle, (tool,))


async def test_told_calls_with_broken_arguments_are_shown_under_a_template_that_reads_them() -> None:
    broken: Json = {
        "role": "assistant",
        "content": "x",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "edit", "arguments": '{"path": '}}
        ],
    }
    told = [user("u"), broken, {"role": "tool", "tool_call_id": "1", "content": "bad call"}, user("on")]
    for template in CALLING:
        async with playing("done", template=template) as program:
            await program.chat(told, tools=(EDIT,))
            assert '{"path":' in program.prompt(0).replace("\\", "")
            assert "bad call" in program.prompt(0)


@pytest.mark.parametrize(
    ("written", "schema", "read"),
    [
        ("3", {"type": "integer"}, 3),
        ("3.5", {"type": "number"}, 3.5),
        ("true", {"type": "boolean"}, True),
        ("true", {"type": "integer"}, "true"),
        ('["a"]', {"type": "array"}, ["a"]),
        ('{"a": 1}', {"type": ["object", "null"]}, {"a": 1}),
        ("null", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("3", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3"),
        ("3", {"type": "string"}, "3"),
        ("3", {}, "3"),
        ("3", {"anyOf": 5}, "3"),
        ("three", {"type": "integer"}, "three"),
        ("[" * 9999, {"type": "array"}, "[" * 9999),
        ("NaN", {"type": "number"}, "NaN"),
        ("3", {"type": "number"}, 3),
        ("3", {"type": "date"}, "3"),
        ("3", {"oneOf": [{"type": "integer"}]}, 3),
        ("3", {"anyOf": [5, {"type": "integer"}]}, 3),
        ("3", {"type": [5, [], "integer"]}, 3),
        ("3", 5, "3"),
        ("true", {"type": "number"}, "true"),
        ("3.5", {"type": "integer"}, "3.5"),
        (3, {"type": "integer"}, 3),
    ],
)
def test_values_that_were_written_as_text_have_the_type_of_the_tool(
    written: object, schema: Any, read: object
) -> None:
    others = function("other", "", {"properties": {"x": {"type": "boolean"}}})
    tools = ToolSet.of([others, function("edit", "", {"properties": {"x": schema}})], 0)
    call = with_typed_values(ToolCall(name="edit", arguments=json.dumps({"x": written})), tools)
    assert json.loads(call.arguments) == {"x": read}


def test_calls_that_cannot_be_read_or_whose_tool_is_unknown_keep_their_values() -> None:
    tools = ToolSet.of([function("edit", "", {"properties": {"x": {"type": "integer"}}})], 0)
    for name, arguments in (("edit", '{"x": '), ("edit", '["3"]'), ("other", '{"x": "\u00e9"}')):
        call = ToolCall(name=name, arguments=arguments)
        assert with_typed_values(call, tools) == call


@pytest.mark.parametrize("parameters", [None, 5, {}, {"properties": 5}, {"type": "object"}])
def test_every_tool_has_parameters_with_properties(parameters: object) -> None:
    described = function("x", "", parameters)["function"]["parameters"]
    assert described == {"type": "object", "properties": {}}


async def test_values_of_a_form_that_knows_types_stay_as_they_were_written() -> None:
    async with playing('<tool_call>\n{"name": "edit", "arguments": {"line": "3"}}\n</tool_call>') as program:
        made = await program.chat([user("u")], tools=(EDIT,))
        assert made["tool_calls"][0]["function"]["arguments"] == '{"line": "3"}'


async def test_no_id_of_ours_is_in_a_quotation_either() -> None:
    async with playing(CALLS["kimi_k2"], "done", template="moonshotai-Kimi-K2") as program:
        first = await program.chat([user("u")], tools=(EDIT,))
        (made,) = first["tool_calls"]
        await program.chat([user("They did:"), first, *result(first, "x")], tools=(EDIT,))
        assert program.afters() == [-1, -1]
        assert made["id"] not in program.prompt(1)
        assert "functions.edit:0" in program.prompt(1)


def test_renderers_of_forgotten_tools_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voices, "MOST_RENDERERS", 3)
    made = renderers("Qwen-Qwen3-0.6B")
    sets = [ToolSet.of([function(f"tool{number}", "", None)], 0) for number in range(5)]
    first = made.of(sets[0])
    for one in sets[1:3]:
        made.of(one)
    assert made.of(sets[0]) is first
    made.of(sets[3])
    assert made.of(sets[0]) is first, "what was used last is forgotten last"
    for one in sets[1:4]:
        made.of(one)
    assert made.of(sets[0]) is not first
    with pytest.raises(RequestRefused, match="no messages"):
        made.of(sets[0]).opened([])
    assert "tool0" in first.renderer.decode(first.opened([ChatMessage("user", "u")]))
