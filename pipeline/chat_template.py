"""A model's chat template, used append-only: what an engine has seen is never rendered again.

The policy's reply is data: it stays as it was sampled. Rendered are the first prompt, and what stands behind each reply: the end of its
turn, the next messages, the opening of the next reply. A template for which no such rendering exists is refused when it is loaded: by the
trainer before a run starts, and by the worker that renders with it. What the template itself would render otherwise in an earlier reply,
or for a system message, is in `announcements`.
"""

from collections.abc import Sequence
from itertools import takewhile
from uuid import uuid4

from msgspec.structs import replace

from pipeline.chat import ChatMessage
from pipeline.errors import RequestError
from pipeline.template_probes import (
    Announcement,
    Seams,
    ToolCalling,
    announce_replies,
    announce_tools,
    call_and_results,
    probe_seams,
    probe_tools,
)
from pipeline.template_text import TemplateText, Tools
from pipeline.tokenizer import TokenizerBundle

BASH: Tools = (
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Execute a bash command",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
                "required": ["command"],
            },
        },
    },
)
"""The one tool of an agent whose commands are tool calls, in mini-swe-agent's words."""


class ChatTemplate:
    """The template of one bundle. Raises RequestError, when made, if it cannot be used append-only."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self._text = TemplateText(bundle)
        self._mark = uuid4().hex  # stands for the assistant's words; no content can contain it by chance
        self._joins_system = False
        self._seams, announced = self._probed()
        announced += announce_replies(self._render, self._seams)
        self._calling: ToolCalling | RequestError
        try:
            self._calling = probe_tools(self._render, BASH)
        except RequestError as error:
            self._calling = error
        self.announcements: tuple[Announcement, ...] = tuple(announced)
        """What an agent whose commands are text sees otherwise than the template renders it."""

    @property
    def opening(self) -> str:
        """The opening of a reply, at the end of each prompt; it may open the reply's thoughts."""
        return self._seams.opening

    @property
    def end_of_reply(self) -> str:
        """The text between an assistant's words and the next user's."""
        return self._seams.end

    @property
    def final_end(self) -> str:
        """The text behind an assistant's words that nothing follows."""
        return self._seams.final_end

    @property
    def tool_calling(self) -> ToolCalling:
        """How tool calls are rendered. Raises RequestError if they are not, or their results cannot be appended."""
        if isinstance(self._calling, RequestError):
            raise RequestError(f"{self._calling}; choose an agent file whose commands are text")
        return self._calling

    @property
    def tool_announcements(self) -> tuple[Announcement, ...]:
        """What an agent that calls tools sees otherwise, besides `announcements`. Raises RequestError as `tool_calling`."""
        return tuple(announce_tools(self.tool_calling))

    @property
    def takes_users_in_a_row(self) -> bool:
        """Whether two user messages may follow each other."""
        words = [uuid4().hex, uuid4().hex]
        try:
            text = self.after_reply([ChatMessage("user", word) for word in words])
        except RequestError:
            return False
        return all(text.count(word) == 1 for word in words)

    def render(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> str:
        """The text of `messages` and of the opening of a reply."""
        return self._render(messages, tools)

    def after_reply(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> str:
        """The text behind an assistant's words: the end of its turn, `messages`, the opening of the next reply.

        Where `messages` begin with tool results, it is the text behind the arguments of the assistant's last call.
        """
        results = list(takewhile(lambda message: message.role == "tool", messages))
        asked = [ChatMessage("system", "s"), ChatMessage("user", "u")]
        if not results:
            moved = bool(tools) and self.tool_calling.moves_list
            told = [*asked, ChatMessage("assistant", self._mark), *messages]
            return self._behind_mark(self._render(told, () if moved else tools))
        calling = self.tool_calling
        answered = call_and_results(self._mark, results, one_call=calling.one_call)
        told = [*asked, *answered, *messages[len(results) :]]
        return self._behind_mark(self._render(told, tools, arguments_as_text=calling.arguments_as_text))

    def _behind_mark(self, rendered: str) -> str:
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
        """The seams of the template; if it refuses or moves the system message, those with it in the first user message."""
        try:
            return probe_seams(self._render), []
        except RequestError as error:
            refusal = error
        self._joins_system = True
        try:
            seams = probe_seams(self._render)
        except RequestError:
            raise refusal from None
        reason = str(refusal).removeprefix("chat_template: ")
        text = f"the system message is joined to the first user message, because by itself {reason!r}"
        return seams, [Announcement("system", text)]


def _with_system_joined(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    if not messages or messages[0].role != "system":
        return messages
    system, *others = messages
    if not others or others[0].role != "user":
        return [ChatMessage("user", system.content), *others]
    return [replace(others[0], content=f"{system.content}\n\n{others[0].content}"), *others[1:]]
