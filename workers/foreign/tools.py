"""Converts the tools that a program describes to the form of chat templates, and a policy's calls to the form of the program.

A dialect's special tools become functions: a namespace's functions are called `namespace__name`, and a tool that takes free text takes an
object with the one field `input`. A tool that the provider would run is left out, because the policy has no way to call it and the
program works without it.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from msgspec.structs import replace

from pipeline.chat import CallFormat, ToolCall
from workers.foreign.fields import Json, RequestRefused, as_object, json_value, objects_in, printed, text_in

SEPARATOR = "__"
FREE_TEXT = "input"  # the field of a tool that takes free text
# Formats of calls in which every value is text.
TEXT_VALUES: frozenset[CallFormat] = frozenset({"qwen3_coder", "seed", "glm", "minimax"})
MOST_TOOLS = 1024
NO_TOOLS = b""  # the key of an empty tool set


@dataclass(frozen=True, slots=True)
class ToolSet:
    """A program's tools."""

    described: tuple[dict[str, Any], ...] = ()  # tools in the format of OpenAI's API
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    free_text: frozenset[str] = frozenset()
    num_left_out: int = 0  # tools that the provider would run
    key: bytes = NO_TOOLS  # distinguishes these tools from others in a prompt
    num_chars: int = 0  # length of the descriptions

    @classmethod
    def of(
        cls,
        described: Sequence[dict[str, Any]],
        num_left_out: int,
        namespaces: Mapping[str, tuple[str, str]] | None = None,
        free_text: frozenset[str] = frozenset(),
    ) -> "ToolSet":
        text = printed(described)
        key = hashlib.blake2b(text.encode(), digest_size=16).digest() if described else NO_TOOLS
        return cls(tuple(described), namespaces or {}, free_text, num_left_out, key, len(text))

    def parameters(self, name: str) -> Json:
        """The schema of each parameter of the function `name`."""
        for tool in self.described:
            if tool["function"]["name"] == name:
                return tool["function"]["parameters"]["properties"]
        return {}

    def flat_name(self, namespace: str, name: str) -> str:
        return f"{namespace}{SEPARATOR}{name}" if namespace else name

    def parted_name(self, flat: str) -> tuple[str, str]:
        """Namespace and name. A name that the program has not described as part of a namespace has none."""
        return self.namespaces.get(flat, ("", flat))


NO_TOOL_SET = ToolSet()


def function(name: str, description: str, parameters: object) -> dict[str, Any]:
    """One function. Its parameters always have properties, because templates read them."""
    schema = dict(cast(Json, parameters)) if isinstance(parameters, Mapping) else {}
    schema = {"type": "object", **schema}
    if not isinstance(schema.get("properties"), Mapping):
        schema["properties"] = dict[str, Any]()
    if not name:
        raise RequestRefused("a tool has no name")
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def read_chat_tools(body: Json) -> ToolSet:
    """The tools in a request of chat completions."""
    described: list[dict[str, Any]] = []
    num_left_out = 0
    for tool in _listed(body):
        if text_in(tool, "type") != "function":
            num_left_out += 1
            continue
        fields = as_object(tool.get("function"), "a tool's function")
        described.append(
            function(text_in(fields, "name"), text_in(fields, "description"), fields.get("parameters"))
        )
    return ToolSet.of(described, num_left_out)


def read_messages_tools(body: Json) -> ToolSet:
    """The tools in a request of Messages. A tool with a type of its own is run by the provider, or has no description."""
    described: list[dict[str, Any]] = []
    num_left_out = 0
    for tool in _listed(body):
        if text_in(tool, "type") not in ("", "custom"):
            num_left_out += 1
            continue
        described.append(
            function(text_in(tool, "name"), text_in(tool, "description"), tool.get("input_schema"))
        )
    return ToolSet.of(described, num_left_out)


def read_responses_tools(body: Json) -> ToolSet:
    """The tools in a request of Responses: functions, namespaces of functions, and tools that take free text."""
    described: list[dict[str, Any]] = []
    namespaces: dict[str, tuple[str, str]] = {}
    free_text: set[str] = set()
    num_left_out = 0
    for namespace, tool in _in_namespaces(_listed(body)):
        name = text_in(tool, "name")
        flat = f"{namespace}{SEPARATOR}{name}" if namespace else name
        kind = text_in(tool, "type")
        if kind == "function":
            described.append(function(flat, text_in(tool, "description"), tool.get("parameters")))
        elif kind == "custom":
            schema = {
                "type": "object",
                "properties": {FREE_TEXT: {"type": "string"}},
                "required": [FREE_TEXT],
            }
            described.append(function(flat, _free_text_description(tool), schema))
            free_text.add(flat)
        else:
            num_left_out += 1
            continue
        namespaces[flat] = namespace, name
    return ToolSet.of(described, num_left_out, namespaces, frozenset(free_text))


def _in_namespaces(tools: Iterable[Json]) -> Iterable[tuple[str, Json]]:
    for tool in tools:
        if text_in(tool, "type") == "namespace":
            for inner in objects_in(tool, "tools"):
                yield text_in(tool, "name"), inner
        else:
            yield "", tool


def _free_text_description(tool: Json) -> str:
    """The tool's description, followed by the grammar of its free-text input if the tool defines one."""
    form = tool.get("format")
    definition = cast(Json, form).get("definition") if isinstance(form, Mapping) else None
    description = text_in(tool, "description")
    return f"{description}\n\n{definition}" if isinstance(definition, str) else description


def _listed(body: Json) -> list[Json]:
    tools = objects_in(body, "tools")
    if len(tools) > MOST_TOOLS:
        raise RequestRefused(f"there are more than {MOST_TOOLS} tools")
    return tools


def arguments_object(arguments: str) -> dict[str, Any] | None:
    """The arguments of a call as an object; None if they are not one."""
    try:
        value = json_value(arguments)
    except ValueError:
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def with_typed_values(call: ToolCall, tools: ToolSet) -> ToolCall:
    """The call with values of the types that its tool describes, for a format in which all values were written as text.

    A value that does not fit its type stays text: the program's reaction to it is part of the environment.
    """
    written = arguments_object(call.arguments)
    if written is None:
        return call
    schemas = tools.parameters(call.name)
    typed = {name: _typed(value, schemas.get(name)) for name, value in written.items()}
    return replace(call, arguments=printed(typed))


_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def _typed(value: Any, schema: Any) -> Any:
    names = _type_names(schema)
    if not isinstance(value, str) or "string" in names:
        return value
    try:
        read = json_value(value)
    except ValueError:
        return value
    fits = any(
        isinstance(read, _TYPES.get(name, ())) and (name == "boolean" or not isinstance(read, bool))
        for name in names
    )
    return read if fits else value


def _type_names(schema: Any) -> set[str]:
    """The types that a schema allows; none if it has no type."""
    if not isinstance(schema, Mapping):
        return set()
    fields = cast(Json, schema)
    said: list[Any] = [fields.get("type")]
    for union in ("anyOf", "oneOf"):
        choices = fields.get(union)
        if isinstance(choices, list):
            said += [
                cast(Json, one).get("type") for one in cast(list[Any], choices) if isinstance(one, Mapping)
            ]
    flat = [name for one in said for name in (cast(list[Any], one) if isinstance(one, list) else [one])]
    return {name for name in flat if isinstance(name, str)}
