"""Holds a context that only grows against the template's own rendering of the same conversation.

The replies are what a model would write: the template's own text of its newest reply. Where both texts differ,
`ChatTemplate.announcements` has to say so; a difference that it does not announce is a defect of ours.
"""

from collections.abc import Iterator, Sequence
from typing import Literal
from uuid import uuid4

from msgspec.structs import replace

from pipeline.agent.upstream import BASH_TOOL
from pipeline.chat import ChatMessage
from pipeline.chat_template import ChatTemplate
from pipeline.errors import RequestError
from pipeline.message import Message
from pipeline.template_probes import Difference, call_and_results
from pipeline.tokenizer import TokenizerBundle

Replies = Literal["words", "thoughts", "spaced", "calls", "calls with thoughts"]
TEXT_REPLIES: tuple[Replies, ...] = ("words", "thoughts", "spaced")
CALL_REPLIES: tuple[Replies, ...] = ("words", "calls", "calls with thoughts")

# The announcements that can explain a difference, by the replies that show it.
# Some templates write an empty thought into a newest reply without one, so that dropping thoughts explains a difference of any replies.
_ANYWHERE: tuple[Difference, ...] = ("system", "opening", "end", "thoughts")
_EXPLAINED: dict[Replies, frozenset[Difference]] = {
    "words": frozenset({*_ANYWHERE, "tools"}),
    "thoughts": frozenset(_ANYWHERE),
    "spaced": frozenset({*_ANYWHERE, "whitespace"}),
    "calls": frozenset({*_ANYWHERE, "tools"}),
    "calls with thoughts": frozenset({*_ANYWHERE, "tools"}),
}


class Verdict(Message, frozen=True, kw_only=True):
    """What became of one template, for agents whose commands are text or tool calls."""

    refused: str = ""  # the reason; "" if it is accepted
    announced: tuple[str, ...] = ()
    differs: tuple[Replies, ...] = ()  # replies with which the two texts differ
    unannounced: tuple[Replies, ...] = ()  # those of them that nothing announces

    @property
    def words(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        if self.unannounced:
            return f"differs, unannounced: {', '.join(self.unannounced)}"
        if self.differs:
            return f"differs, announced: {', '.join(self.differs)}"
        return "equal to a full re-render"


def judge(bundle: TokenizerBundle, *, with_tools: bool) -> Verdict:
    """Compare the two texts for each kind of reply."""
    try:
        template = ChatTemplate(bundle, (BASH_TOOL,) if with_tools else ())
        kinds: tuple[Replies, ...] = CALL_REPLIES if with_tools else TEXT_REPLIES
        differs: list[Replies] = [kind for kind in kinds if not _is_equal(template, kind)]
    except RequestError as error:
        return Verdict(refused=str(error).removeprefix("chat_template: "))
    about = {one.about for one in template.announcements}
    return Verdict(
        announced=tuple(one.text for one in template.announcements),
        differs=tuple(differs),
        unannounced=tuple(kind for kind in differs if not about & _EXPLAINED[kind]),
    )


def _is_equal(template: ChatTemplate, kind: Replies) -> bool:
    """Whether three turns in a row have the same text either way."""
    told = [ChatMessage("system", uuid4().hex), ChatMessage("user", uuid4().hex)]
    grown = template.render(told)
    for reply, *others in _turns(template, kind):
        grown += _written(template, told, reply) + template.after_reply(others)
        told += [reply, *others]
    return grown == template.rerender(told)


def _turns(template: ChatTemplate, kind: Replies) -> Iterator[list[ChatMessage]]:
    """Each a reply and the messages after it."""
    for _ in range(3):
        words = uuid4().hex
        reasoning = uuid4().hex if "thoughts" in kind else ""
        if kind.startswith("calls"):
            results = [ChatMessage("tool", uuid4().hex), ChatMessage("tool", uuid4().hex)]
            yield call_and_results(words, results, one_call=template.has_one_call, reasoning=reasoning)
        else:
            content = f"\n {words}\n" if kind == "spaced" else words
            yield [ChatMessage("assistant", content, reasoning=reasoning), ChatMessage("user", uuid4().hex)]


def _written(template: ChatTemplate, told: Sequence[ChatMessage], reply: ChatMessage) -> str:
    """What a model would write for `reply`, up to where `after_reply` begins. A rendering may trim words, the model does not."""
    words = reply.content.strip()
    prompt = template.rerender(told)
    newest = template.rerender([*told, replace(reply, content=words)], opening=False)
    shared = _num_shared(prompt, newest)
    if reply.tool_calls:
        command = reply.tool_calls[-1].arguments.split('"')[-2]
        return newest[shared : newest.rfind(command) + len(command)]
    if shared < len(prompt):  # the prompt has begun the reply otherwise than the template renders it later
        return f"{reply.reasoning}\n</think>\n\n{reply.content}" if reply.reasoning else reply.content
    return newest[shared:].removesuffix(template.final_end).replace(words, reply.content)


def _num_shared(one: str, other: str) -> int:
    """How many leading characters both have."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
