"""What a chat template does with a growing conversation, learnt by rendering small ones in which every word is unique.

A probe raises RequestError where no rendering of the template grows only at its end. What the template renders otherwise than a context
that keeps replies as they were sampled is an `Announcement`: no reason to refuse the template, but a line in the plan of a run.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NoReturn, Protocol
from uuid import uuid4

from msgspec.structs import replace

from pipeline.chat import ChatMessage, ToolCall
from pipeline.errors import RequestError
from pipeline.message import Message
from pipeline.template_text import Tools

# What a template renders otherwise than a context that only grows.
Difference = Literal["system", "opening", "end", "thoughts", "whitespace", "tools"]


class Announcement(Message, frozen=True):
    """How the context of an episode differs from the template's own rendering of its messages."""

    about: Difference
    text: str  # a sentence for the plan of a run


class Render(Protocol):
    """`TemplateText.render` with tools chosen, and perhaps with the messages arranged before."""

    def __call__(
        self, messages: Sequence[ChatMessage], *, opening: bool = True, arguments_as_text: bool = False
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Seams:
    """What a template puts around an assistant's words."""

    opening: str  # in front of the words of the reply to come
    earlier_opening: str  # in front of an earlier reply's
    end: str  # between an assistant's words and the next user's
    final_end: str  # behind words that nothing follows; "" if the template cannot render such a conversation


@dataclass(frozen=True, slots=True)
class ToolCalling:
    """How a template renders tool calls and their results."""

    end: str  # between the arguments of a reply's last call and the first result
    arguments_as_text: bool  # it takes arguments as JSON text; usual is a mapping
    one_call: bool  # it renders one call of a reply at most
    moves_list: bool  # it describes the tools in front of the last user message, wherever that is
    changes_later_results: bool  # it puts other text around results that are not the conversation's first
    drops_thoughts: bool  # of earlier replies, although only tool results followed them
    drops_words: bool  # beside the calls of a reply
    changes_calls: bool  # once their results follow
    changes_results: bool  # once a message follows them
    opens_otherwise: bool  # a reply to results: its opening is not what it writes in front of an earlier one


def probe_seams(render: Render) -> Seams:
    """Raises RequestError unless the text of a growing conversation, without its replies, only grows."""
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
        refuse("what it puts behind a reply depends on how many came before")
    return Seams(
        opening=rendered[0].removeprefix(settled[0]),
        earlier_opening=rendered[1].partition(replies[0])[0].removeprefix(settled[0]),
        end=ends[0][0],
        final_end=_final_end(render, grown[1][:3]),
    )


def announce_replies(render: Render, seams: Seams) -> list[Announcement]:
    """What the template changes in earlier replies, and a context that only grows keeps."""
    announced: list[Announcement] = []
    if seams.opening != seams.earlier_opening:
        text = f"{_opening_words(seams)}; here a reply stays behind the opening that it was sampled with"
        announced.append(Announcement("opening", text))
    if _first_piece(seams.end) != _first_piece(seams.final_end) and seams.final_end.strip():
        text = f"the template ends only the last reply with {seams.final_end!r}; here every reply keeps it as sampled"
        announced.append(Announcement("end", text))
    thought, words = uuid4().hex, uuid4().hex
    if thought not in _earlier(render, ChatMessage("assistant", words, reasoning=thought)):
        text = "the template drops the thoughts of earlier replies; here they stay"
        announced.append(Announcement("thoughts", text))
    spaced = f"\n\n\n  {words} \n\n\n"  # more lines than an opening ends with
    if spaced not in _earlier(render, ChatMessage("assistant", spaced)):
        text = "the template trims the whitespace around replies; here it stays as sampled"
        announced.append(Announcement("whitespace", text))
    return announced


def probe_tools(render: Render, tools: Tools) -> ToolCalling:
    """Raises RequestError if the template renders no tool calls, or not so that their results can be appended."""
    errors: list[RequestError] = []
    for arguments_as_text in (False, True):
        for one_call in (False, True):
            try:
                return _tool_calling(render, tools, arguments_as_text=arguments_as_text, one_call=one_call)
            except RequestError as error:
                errors.append(error)
    raise errors[0]


def announce_tools(calling: ToolCalling, announced: Sequence[Announcement]) -> list[Announcement]:
    """What the template changes for an agent that calls tools, who was `announced` what it changes for others."""
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
        text = "the template opens a reply to tool results otherwise than earlier ones; here each stays behind its own opening"
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
    """A reply that calls the one tool with `command` as often as there are `results`, and these. Results without an id get one."""
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
        moves_list=description in _behind(show(plain), commands[0]),
        changes_later_results=_behind(second, commands[1]) != _behind(first, commands[0]),
        drops_thoughts=thought not in show([*_asked(), *thoughtful, *later]),
        drops_words=thought not in show([*_asked(), *talkative, *later]),
        changes_calls=_between_calls(show, answered[:3], commands[0]) not in first,
        changes_results=not second.startswith(settled),
        opens_otherwise=second.startswith(settled) and not second.startswith(first),
    )


def _between_calls(show: Render, messages: Sequence[ChatMessage], command: str) -> str:
    """What stands between the calls of a reply that nothing follows; "" if the template cannot render it."""
    try:
        newest = show(messages, opening=False)
    except RequestError:
        return ""
    return newest[newest.find(command) : newest.rfind(command)]


def _behind(rendered: str, words: str) -> str:
    return rendered.rpartition(words)[2]
