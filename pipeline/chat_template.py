"""A model's chat template, used append-only: what an engine has seen is never rendered again.

It is rendered as transformers renders it: the same Jinja environment, filters, names and shapes of messages.

The policy's reply is data: it stays as it was sampled. Only the first prompt is rendered, and the text after each reply: the end of its
turn, the next messages, the opening of the next reply. A template for which no such rendering exists is refused when it is loaded: by the
trainer before a run starts, and by the worker that renders with it.

The behaviour of a template in a growing conversation is measured by rendering small conversations in which every word is unique. A probe
raises RequestError where no rendering of the template grows only at its end. If the template itself would render an earlier reply or a
system message differently, that is an `Announcement`: the template is accepted, and the plan of a run has a line about it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from itertools import product, takewhile
from typing import Any, Literal, NoReturn, Protocol, cast
from uuid import uuid4

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec.structs import replace

from pipeline.chat import ChatMessage, Role, ToolCall, storable
from pipeline.errors import RequestError
from pipeline.message import Message
from pipeline.tokenizer import TokenizerBundle

Tools = Sequence[Mapping[str, Any]]  # described as in OpenAI's API: {type: function, function: {name, ...}}

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
            text = self._template.render(
                messages=[self._fields(message, read_arguments) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=opening,
                **self._variables,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            raise RequestError(f"chat_template: {error}") from error
        return storable(text)

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
    """The arguments as a mapping; malformed arguments stay text."""
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
    """Writes JSON. Unlike Jinja's own filter, it escapes no HTML, keeps the order of keys, and does not escape letters."""
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


# The ways in which a template may render a conversation differently from a context that only grows.
Difference = Literal["system", "opening", "end", "thoughts", "whitespace", "tools"]


class Announcement(Message, frozen=True):
    """A difference between the context of an episode and the template's own rendering of its messages."""

    about: Difference
    text: str  # a sentence for the plan of a run


class Render(Protocol):
    """`TemplateText.render` with chosen tools, possibly after rearranging the messages."""

    def __call__(
        self, messages: Sequence[ChatMessage], *, opening: bool = True, arguments_as_text: bool = False
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Seams:
    """The text that a template puts around an assistant's content."""

    opening: str  # the text before the words of the reply to come
    earlier_opening: str  # the text before an earlier reply's words
    end: str  # the text between an assistant's content and the next user's
    final_end: str  # the text after words that nothing follows; "" if the template cannot render that


@dataclass(frozen=True, slots=True)
class ToolCalling:
    """The form in which a template renders tool calls and their results."""

    end: str  # the text between the arguments of a reply's last call and the first result
    arguments_as_text: bool  # it takes arguments as JSON text; usual is a mapping
    one_call: bool  # it renders at most one call of a reply
    moves_list: bool  # it describes the tools in front of the last user message, wherever that is
    changes_later_results: bool  # it puts other text around results that are not the conversation's first
    drops_thoughts: bool  # earlier replies lose their thoughts, although only tool results followed them
    drops_words: bool  # a reply with calls loses its words
    changes_calls: bool  # it renders calls differently once their results follow
    changes_results: bool  # it renders results differently once a message follows them
    opens_otherwise: bool  # it opens a reply to results differently from an earlier reply


def probe_seams(render: Render) -> Seams:
    """Measures the seams. Raises RequestError unless the text of a growing conversation, without its replies, only grows at its end."""
    system, *users = (uuid4().hex for _ in range(4))
    replies = [uuid4().hex for _ in range(2)]
    grown = [[ChatMessage("system", system), ChatMessage("user", users[0])]]
    for reply, user in zip(replies, users[1:], strict=False):
        grown.append([*grown[-1], ChatMessage("assistant", reply), ChatMessage("user", user)])
    rendered = [render(messages) for messages in grown]
    settled = [_settled(render, messages) for messages in grown]
    if rendered[0].count(system) != 1:
        refuse("the system message does not appear exactly once in its rendering")
    for number, after in enumerate(rendered[1:]):
        if after.count(replies[number]) != 1:
            refuse("an assistant's words do not appear exactly once in its rendering")
        if not after.partition(replies[number])[0].startswith(settled[number]):
            refuse("a later message changes how earlier ones are rendered: tokens cannot be appended")
    ends = [
        after.rpartition(reply)[2].split(user)
        for after, reply, user in zip(rendered[1:], replies, users[1:], strict=False)
    ]
    if len(ends[0]) != 2:
        refuse("a user's words do not appear exactly once in their rendering")
    if ends[0] != ends[1]:
        refuse("what it puts after a reply depends on how many came before")
    return Seams(
        opening=rendered[0].removeprefix(settled[0]),
        earlier_opening=rendered[1].partition(replies[0])[0].removeprefix(settled[0]),
        end=ends[0][0],
        final_end=_final_end(render, grown[1][:3]),
    )


def announce_replies(render: Render, seams: Seams) -> list[Announcement]:
    """Returns what the template changes in earlier replies, which stay unchanged in a context that only grows."""
    announced: list[Announcement] = []
    if seams.opening != seams.earlier_opening:
        text = f"{_opening_words(seams)}; here a reply stays after the opening that it was sampled with"
        announced.append(Announcement("opening", text))
    if _first_piece(seams.end) != _first_piece(seams.final_end) and seams.final_end.strip():
        text = f"the template ends only the last reply with {seams.final_end!r}; here every reply keeps it as sampled"
        announced.append(Announcement("end", text))
    thought, words = uuid4().hex, uuid4().hex
    if thought not in _earlier(render, ChatMessage("assistant", words, reasoning=thought)):
        text = "the template drops the thoughts of earlier replies; here they stay"
        announced.append(Announcement("thoughts", text))
    spaced = f"\n\n\n  {words} \n\n\n"  # begins with more line ends than an opening ends with
    if spaced not in _earlier(render, ChatMessage("assistant", spaced)):
        text = "the template trims the whitespace around replies; here it stays as sampled"
        announced.append(Announcement("whitespace", text))
    return announced


def with_marked_description(tools: Tools) -> Tools:
    """The tools, the first with a description that every template prints unchanged and that occurs nowhere else.

    An agent program's own description may be missing, or contain quotes and line breaks that JSON escapes.
    """
    if not tools:
        return tools
    first = tools[0]
    return [{**first, "function": {**first["function"], "description": uuid4().hex}}, *tools[1:]]


def probe_tools(render: Render, tools: Tools) -> ToolCalling:
    """Measures tool calls. Raises RequestError if the template renders no tool calls, or not so that their results can be appended."""
    errors: list[RequestError] = []
    for arguments_as_text in (False, True):
        for one_call in (False, True):
            try:
                return _tool_calling(render, tools, arguments_as_text=arguments_as_text, one_call=one_call)
            except RequestError as error:
                errors.append(error)
    raise errors[0]


def announce_tools(calling: ToolCalling, announced: Sequence[Announcement]) -> list[Announcement]:
    """Returns the differences for an agent that calls tools. `announced` are those for other agents."""
    texts = {
        "the template renders one tool call of a reply at most; here further ones stay as sampled": calling.one_call,
        "the template moves the list of tools to the last user message; here it stays where it was": calling.moves_list,
        "the template puts other text around later tool results; here all are as the first": calling.changes_later_results,
        "the template drops the words beside a reply's tool calls; here they stay": calling.drops_words,
        "the template renders tool results otherwise once a message follows; here they stay as first seen": calling.changes_results,
        "the template writes tool calls otherwise once results follow; here they stay as sampled": calling.changes_calls,
    }
    others = [one for one in announced if one.about != "thoughts"]
    if calling.opens_otherwise:
        text = "the template opens a reply to tool results otherwise than earlier ones; here each stays after its own opening"
        others.append(Announcement("opening", text))
    thoughts = [one for one in announced if one.about == "thoughts"]
    if calling.drops_thoughts and not calling.drops_words:
        thoughts = [
            Announcement("thoughts", "the template drops the thoughts of earlier replies; here they stay")
        ]
    elif thoughts and not calling.drops_thoughts:
        text = "the template drops the thoughts of replies before the last user message; here they stay"
        thoughts = [Announcement("thoughts", text)]
    return [*others, *thoughts, *(Announcement("tools", text) for text, holds in texts.items() if holds)]


def call_and_results(
    command: str, results: Sequence[ChatMessage], *, one_call: bool, reasoning: str = ""
) -> list[ChatMessage]:
    """Returns a reply that calls the tool with `command` once for each of `results`, and the results. Results without an id get one."""
    numbered = [
        result if result.tool_call_id else ChatMessage("tool", result.content, tool_call_id=f"{number:09d}")
        for number, result in enumerate(results)
    ]
    arguments = json.dumps({"command": command})
    calls = tuple(ToolCall(name="bash", arguments=arguments, id=result.tool_call_id) for result in numbered)
    kept = calls[-1:] if one_call else calls
    return [ChatMessage("assistant", "", reasoning=reasoning, tool_calls=kept), *numbered]


def refuse(reason: str) -> NoReturn:
    raise RequestError(f"chat_template: {reason}")


def _settled(render: Render, messages: Sequence[ChatMessage]) -> str:
    """The text of `messages` without the opening of a reply.

    Some templates have no opening of their own, and some end a conversation without one differently: there it is the text up to the last
    message's last word.
    """
    whole = render(messages)
    try:
        bare = render(messages, opening=False)
    except RequestError:
        bare = ""
    if bare and whole.startswith(bare):
        return bare
    last = messages[-1].content
    return whole[: whole.rfind(last) + len(last)]


def _final_end(render: Render, messages: Sequence[ChatMessage]) -> str:
    try:
        return render(messages, opening=False).rpartition(messages[-1].content)[2]
    except RequestError:
        return ""


def _earlier(render: Render, reply: ChatMessage) -> str:
    """The rendering of a conversation in which `reply` is not the last."""
    return render([*_asked(), reply, ChatMessage("user", "u")])


def _asked() -> list[ChatMessage]:
    return [ChatMessage("system", "s"), ChatMessage("user", "u")]


def _opening_words(seams: Seams) -> str:
    if seams.earlier_opening.startswith(seams.opening):
        written = seams.earlier_opening.removeprefix(seams.opening)
        return f"the template begins earlier replies with {written!r}"
    return (
        f"the template opens a reply with {seams.opening!r} and earlier ones with {seams.earlier_opening!r}"
    )


def _first_piece(text: str) -> str:
    """The first tag or word, which in most templates is one token."""
    found = re.match(r"\s*(<[^<>]*>|\[[^\[\]]*\]|\S+)", text)
    return found[1] if found else ""


def _tool_calling(render: Render, tools: Tools, *, arguments_as_text: bool, one_call: bool) -> ToolCalling:
    show = partial(render, arguments_as_text=arguments_as_text)
    description = str(tools[0]["function"]["description"])
    if description not in show(_asked()):
        refuse(
            "it does not describe the agent's tools to the policy; take an agent file whose commands are text"
        )
    commands, outputs = ([uuid4().hex for _ in range(2)] for _ in range(2))
    results = [ChatMessage("tool", output) for output in outputs]
    thought = uuid4().hex
    answered = [
        *_asked(),
        *call_and_results(commands[0], results, one_call=one_call),
    ]
    later = call_and_results(commands[1], results, one_call=one_call)
    twice = [*answered, *later]
    first, second = show(answered), show(twice)
    end, *between = first.rpartition(commands[0])[2].replace(outputs[1], outputs[0]).split(outputs[0])
    if commands[0] not in first or len(between) != 2:
        refuse("it does not render a reply's tool calls and each of their results once")
    if not first.startswith(_settled(show, _asked())):
        refuse("a tool call changes how earlier messages are rendered: tokens cannot be appended")
    settled = _settled(show, answered)
    thoughtful = call_and_results(commands[0], results, one_call=one_call, reasoning=thought)
    talkative = [replace(thoughtful[0], content=thought, reasoning=""), *thoughtful[1:]]
    plain = [*_asked(), ChatMessage("assistant", commands[0]), ChatMessage("user", "u")]
    return ToolCalling(
        end=end,
        arguments_as_text=arguments_as_text,
        one_call=one_call,
        moves_list=description in _rest_after(show(plain), commands[0]),
        changes_later_results=_rest_after(second, commands[1]) != _rest_after(first, commands[0]),
        drops_thoughts=thought not in show([*_asked(), *thoughtful, *later]),
        drops_words=thought not in show([*_asked(), *talkative, *later]),
        changes_calls=_between_calls(show, answered[:3], commands[0]) not in first,
        changes_results=not second.startswith(settled),
        opens_otherwise=second.startswith(settled) and not second.startswith(first),
    )


def _between_calls(show: Render, messages: Sequence[ChatMessage], command: str) -> str:
    """Returns the text between the tool calls of a reply that is the last message; "" if the template cannot render it."""
    try:
        newest = show(messages, opening=False)
    except RequestError:
        return ""
    return newest[newest.find(command) : newest.rfind(command)]


def _rest_after(rendered: str, words: str) -> str:
    return rendered.rpartition(words)[2]


class ChatTemplate:
    """The template of one bundle, for an agent with these tools. Raises RequestError, when made, if it cannot be used append-only."""

    def __init__(self, bundle: TokenizerBundle, tools: Tools = ()) -> None:
        self._text = TemplateText(bundle)
        self._tools = tools
        # A placeholder for the assistant's words, which no content can contain by chance.
        self._mark = uuid4().hex
        self._joins_system = False
        self._shown_tools: Tools = ()  # the tools that are rendered where no tool is called
        self._seams, announced = self._probed()
        announced += announce_replies(partial(self._render, tools=self._shown_tools), self._seams)
        probed = with_marked_description(tools)
        self._calling = probe_tools(partial(self._render, tools=probed), probed) if tools else None
        if tools and bundle.reply_format.tool_calls == "none":
            raise RequestError(
                "chat_template: the form in which the model writes tool calls is not recognised; take an agent file whose commands "
                "are text, or set chat.tool_calls in the recipe"
            )
        if self._calling is not None:
            announced = announce_tools(self._calling, announced)
        self.announcements: tuple[Announcement, ...] = tuple(announced)
        """The ways in which an episode's context differs from the template's own rendering of its messages."""

    @property
    def opening(self) -> str:
        """The opening of a reply, at the end of each prompt; it may begin the reply's thoughts."""
        return self._seams.opening

    @property
    def end_of_reply(self) -> str:
        """The text between an assistant's content and the next user's."""
        return self._seams.end

    @property
    def final_end(self) -> str:
        """The text after an assistant's content if nothing follows."""
        return self._seams.final_end

    @property
    def end_of_call(self) -> str:
        """The text between the arguments of a reply's last call and the first result; "" without tools."""
        return "" if self._calling is None else self._calling.end

    @cached_property
    def takes_users_in_a_row(self) -> bool:
        """Whether two user messages may follow each other."""
        return self._takes("user", "user")

    @cached_property
    def takes_later_system(self) -> bool:
        """Whether the template accepts a system message after other messages."""
        return self._takes("user", "system") and self._takes("system", "user")

    def _takes(self, *roles: Role) -> bool:
        words = [uuid4().hex for _ in roles]
        try:
            text = self.after_reply(
                [ChatMessage(role, word) for role, word in zip(roles, words, strict=True)]
            )
        except RequestError:
            return False
        return all(text.count(word) == 1 for word in words)

    @property
    def has_one_call(self) -> bool:
        """Whether it renders at most one tool call of a reply."""
        return self._calling is not None and self._calling.one_call

    def rerender(self, messages: Sequence[ChatMessage], *, opening: bool = True) -> str:
        """The template's own text of a whole conversation, replies included. An episode's context is not made from it."""
        as_text = self._takes_text
        try:
            return self._text.render(messages, self._tools, opening=opening, arguments_as_text=as_text)
        except RequestError:
            return self._render(messages, self._tools, opening=opening, arguments_as_text=as_text)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The text of `messages` and of the opening of a reply."""
        return self._render(messages, self._tools, arguments_as_text=self._takes_text)

    def reply_text(self, reply: ChatMessage) -> str:
        """The text that a policy writes after the opening of a reply in saying `reply`, and the end of its turn: as the template renders it
        in the last message. Raises RequestError if the template loses a part of it, or renders it after another opening.
        """
        if self.has_one_call and len(reply.tool_calls) > 1:
            refuse(f"it renders one tool call of a reply at most, not {len(reply.tool_calls)}")
        try:
            text = self._last_reply(reply)
        except RequestError:  # some templates demand ids of a certain length
            calls = [replace(call, id=f"{number:09d}") for number, call in enumerate(reply.tool_calls)]
            text = self._last_reply(replace(reply, tool_calls=tuple(calls)))
        for part in (reply.reasoning, reply.content, *(call.name for call in reply.tool_calls)):
            if part.strip() not in text:
                refuse("it loses thoughts, words or calls of a last reply that has several of them")
        return text

    def _last_reply(self, reply: ChatMessage) -> str:
        """The text of a last reply after the opening of a reply."""
        rendered = self._render(
            [*_asked(), reply], self._tools, opening=False, arguments_as_text=self._takes_text
        )
        prompt = self.render(_asked())
        if not rendered.startswith(prompt):
            refuse(f"it ends each prompt with {self.opening!r}, and does not write that before a last reply")
        return rendered.removeprefix(prompt)

    @property
    def _takes_text(self) -> bool:
        """Whether the template expects the arguments of tool calls as JSON text, not as an object."""
        return self._calling is not None and self._calling.arguments_as_text

    def after_reply(self, messages: Sequence[ChatMessage]) -> str:
        """The text after an assistant's content: the end of its turn, `messages`, the opening of the next reply.
        Where `messages` begin with tool results, it is the text after the arguments of the assistant's last call.
        """
        results = list(takewhile(lambda message: message.role == "tool", messages))
        calling = self._calling
        if calling is None or not results:
            reply = ChatMessage("assistant", self._mark)
            told = [ChatMessage("system", "s"), ChatMessage("user", "u"), reply, *messages]
            shown = self._shown_tools if calling is None or calling.moves_list else self._tools
            return self._after_mark(self._render(told, shown, arguments_as_text=self._takes_text))
        others = messages[len(results) :]
        try:
            return self._after_call(calling, results, others)
        except RequestError:  # some templates demand ids of a certain length, and the policy may write any
            return self._after_call(calling, [replace(one, tool_call_id="") for one in results], others)

    def _after_call(
        self, calling: ToolCalling, results: Sequence[ChatMessage], others: Sequence[ChatMessage]
    ) -> str:
        answered = call_and_results(self._mark, results, one_call=calling.one_call)
        told = [ChatMessage("system", "s"), ChatMessage("user", "u"), *answered, *others]
        return self._after_mark(self._render(told, self._tools, arguments_as_text=calling.arguments_as_text))

    def _after_mark(self, rendered: str) -> str:
        return rendered.rpartition(self._mark)[2]

    def _render(
        self,
        messages: Sequence[ChatMessage],
        tools: Tools = (),
        *,
        opening: bool = True,
        arguments_as_text: bool = False,
    ) -> str:
        arranged = _with_system_joined(messages) if self._joins_system else messages
        return self._text.render(arranged, tools, opening=opening, arguments_as_text=arguments_as_text)

    def _probed(self) -> tuple[Seams, list[Announcement]]:
        """The seams of the template. If it refuses or moves the system message, that message is put into the first user message.

        Tools are left out unless the template demands them, because some templates describe them again before each user message.
        """
        refusals: list[RequestError] = []
        shown = ((), self._tools) if self._tools else ((),)
        for joins_system, tools in product((False, True), shown):
            self._joins_system, self._shown_tools = joins_system, tools
            try:
                seams = probe_seams(partial(self._render, tools=tools))
            except RequestError as error:
                refusals.append(error)
                continue
            if not joins_system:
                return seams, []
            reason = str(refusals[0]).removeprefix("chat_template: ")
            text = f"the system message is joined to the first user message, because by itself it is refused: {reason}"
            return seams, [Announcement("system", text)]
        raise refusals[0]


def _with_system_joined(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    if not messages or messages[0].role != "system":
        return messages
    system, *others = messages
    if not others or others[0].role != "user":
        return [ChatMessage("user", system.content), *others]
    return [replace(others[0], content=f"{system.content}\n\n{others[0].content}"), *others[1:]]
