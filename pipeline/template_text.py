"""A chat template rendered as transformers renders it: the same Jinja environment, filters, names and shapes of messages."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.chat import ChatMessage, ToolCall
from pipeline.errors import RequestError
from pipeline.tokenizer import TokenizerBundle

Tools = Sequence[Mapping[str, Any]]  # as OpenAI's API describes them: {type: function, function: {name, ...}}

# Where templates look for an assistant's thoughts. A template that reads none of them gets thoughts inside the content.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class TemplateText:
    """The template of one bundle, as a function from messages to text. Raises RequestError, when made, if it does not compile."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self._template = _compile(bundle.chat_template)
        self._variables: dict[str, Any] = {
            "bos_token": bundle.bos_token,
            "eos_token": bundle.eos_token,
            "documents": None,
            **bundle.template_kwargs,
        }
        self._reasoning_fields = [field for field in REASONING_FIELDS if field in bundle.chat_template]
        self.source = bundle.chat_template

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Tools = (),
        *,
        opening: bool = True,
        arguments_as_text: bool = False,
    ) -> str:
        """The text of `messages` and, unless `opening` is False, of the opening of a reply.

        Templates get the arguments of tool calls as a mapping; with `arguments_as_text`, as JSON text.
        """
        read_arguments = str if arguments_as_text else _as_mapping
        try:
            return self._template.render(
                messages=[self._fields(message, read_arguments) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=opening,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise RequestError(f"chat_template: {error}") from error

    def _fields(self, message: ChatMessage, read_arguments: Callable[[str], Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning and self._reasoning_fields:
            fields |= dict.fromkeys(self._reasoning_fields, message.reasoning)
        elif message.reasoning:
            fields["content"] = f"<think>\n{message.reasoning}\n</think>\n\n{message.content}"
        if message.tool_calls:
            fields["tool_calls"] = [_call(call, read_arguments) for call in message.tool_calls]
        if message.role == "tool":
            fields["tool_call_id"] = message.tool_call_id
        return fields


def _call(call: ToolCall, read_arguments: Callable[[str], Any]) -> dict[str, Any]:
    function = {"name": call.name, "arguments": read_arguments(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _as_mapping(arguments: str) -> Any:
    """Malformed arguments stay text."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    cast(dict[str, Any], environment.filters)["tojson"] = _to_json  # pyright: ignore[reportUnknownMemberType]
    names = cast(dict[str, Any], environment.globals)  # pyright: ignore[reportUnknownMemberType]
    names |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise RequestError(f"chat_template: {error}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter it escapes no HTML, keeps the order of keys, and leaves letters as they are."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Generation(Extension):
    """{% generation %} marks assistant text for training in some templates; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it mutable)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
