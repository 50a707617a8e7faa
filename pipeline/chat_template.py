"""A model's chat template, used append-only: what an engine has seen is never rendered again.

The policy's reply is data: it stays as it was sampled. Rendered are the first prompt, and what stands behind each reply: the end of its
turn, the next messages, the opening of the next reply. A template for which no such rendering exists is refused when it is loaded: by the
trainer before a run starts, and by the worker that renders with it. What the template itself would render otherwise in an earlier reply,
or for a system message, is in `announcements`.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product, takewhile
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


class ChatTemplate:
    """The template of one bundle, for an agent with these tools. Raises RequestError, when made, if it cannot be used append-only."""

    def __init__(self, bundle: TokenizerBundle, tools: Tools = ()) -> None:
        self._text = TemplateText(bundle)
        self._tools = tools
        self._mark = uuid4().hex  # stands for the assistant's words; no content can contain it by chance
        self._joins_system = False
        self._shown_tools: Tools = ()  # where no tool is called
        self._seams, announced = self._probed()
        announced += announce_replies(partial(self._render, tools=self._shown_tools), self._seams)
        self._calling = probe_tools(partial(self._render, tools=tools), tools) if tools else None
        if tools and bundle.reply_format.tool_calls == "none":
            raise RequestError(
                "chat_template: the form in which the model writes tool calls is not recognised; take an agent file whose commands "
                "are text, or set chat.tool_calls in the recipe"
            )
        if self._calling is not None:
            announced = announce_tools(self._calling, announced)
        self.announcements: tuple[Announcement, ...] = tuple(announced)
        """How an episode's context differs from the template's own rendering of its messages."""

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
    def end_of_call(self) -> str:
        """The text between the arguments of a reply's last call and the first result; "" without tools."""
        return "" if self._calling is None else self._calling.end

    @property
    def takes_users_in_a_row(self) -> bool:
        """Whether two user messages may follow each other."""
        words = [uuid4().hex, uuid4().hex]
        try:
            text = self.after_reply([ChatMessage("user", word) for word in words])
        except RequestError:
            return False
        return all(text.count(word) == 1 for word in words)

    @property
    def has_one_call(self) -> bool:
        """Whether it renders one tool call of a reply at most."""
        return self._calling is not None and self._calling.one_call

    def rerender(self, messages: Sequence[ChatMessage], *, opening: bool = True) -> str:
        """The template's own text of a whole conversation, replies included, which is not what an episode's context is made of."""
        as_text = self._calling is not None and self._calling.arguments_as_text
        try:
            return self._text.render(messages, self._tools, opening=opening, arguments_as_text=as_text)
        except RequestError:
            return self._render(messages, self._tools, opening=opening, arguments_as_text=as_text)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The text of `messages` and of the opening of a reply."""
        return self._render(messages, self._tools)

    def after_reply(self, messages: Sequence[ChatMessage]) -> str:
        """The text behind an assistant's words: the end of its turn, `messages`, the opening of the next reply.

        Where `messages` begin with tool results, it is the text behind the arguments of the assistant's last call.
        """
        results = list(takewhile(lambda message: message.role == "tool", messages))
        calling = self._calling
        if calling is None or not results:
            reply = ChatMessage("assistant", self._mark)
            told = [ChatMessage("system", "s"), ChatMessage("user", "u"), reply, *messages]
            shown = self._shown_tools if calling is None or calling.moves_list else self._tools
            return self._behind_mark(self._render(told, shown))
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
        return self._behind_mark(self._render(told, self._tools, arguments_as_text=calling.arguments_as_text))

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
        """The seams of the template; if it refuses or moves the system message, those with it in the first user message.

        Tools are left out unless the template demands them, because some describe them anew before each message of the user.
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
