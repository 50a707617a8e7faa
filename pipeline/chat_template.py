"""A model's chat template, used append-only: a later message never changes how earlier ones were rendered.

A template that breaks this rule would make what is trained differ from what was sampled, so it is refused when it is loaded:
by the trainer before a run starts, and by the worker that renders with it.
"""

from collections.abc import Sequence
from datetime import datetime
from itertools import chain, pairwise
from typing import NoReturn
from uuid import uuid4

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.chat import ChatMessage
from pipeline.errors import RequestError
from pipeline.tokenizer import TokenizerBundle


class ChatTemplate:
    """The template of one bundle. Raises RequestError, when made, if it cannot be used append-only."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self._template = _compile(bundle.chat_template)
        self._bos_token, self._eos_token = bundle.bos_token, bundle.eos_token
        self._mark = uuid4().hex  # stands for the assistant's words; no content can contain it by chance
        self.end_of_reply = self._checked_end_of_reply()
        """The text between an assistant's words and the next user's."""

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The text of `messages` and of the opening of a reply."""
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=True,
                bos_token=self._bos_token,
                eos_token=self._eos_token,
                tools=None,
                documents=None,
                raise_exception=_raise_exception,
                strftime_now=_strftime_now,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise RequestError(f"chat_template: {error}") from error

    def after_reply(self, messages: Sequence[ChatMessage]) -> str:
        """The text behind an assistant's words: the end of its turn, `messages`, the opening of the next reply."""
        return self._after_last_reply(self.render([*self._history("u"), *messages]))

    def _history(self, *users: str) -> list[ChatMessage]:
        """A conversation in which the assistant answered each of `users` with the mark."""
        exchanges = [(ChatMessage("user", user), ChatMessage("assistant", self._mark)) for user in users]
        return [ChatMessage("system", "s"), *chain.from_iterable(exchanges)]

    def _after_last_reply(self, rendered: str) -> str:
        return rendered.rpartition(self._mark)[2]

    def _checked_end_of_reply(self) -> str:
        """`end_of_reply`, after three growing conversations were compared."""
        users = [uuid4().hex for _ in range(3)]
        renderings = [
            self.render([*self._history(*users[:n]), ChatMessage("user", users[n])]) for n in range(3)
        ]
        for before, after in pairwise(renderings):
            if after.count(self._mark) != before.count(self._mark) + 1:
                _refuse("an assistant's words do not appear exactly once in its rendering")
            # A template may open the reasoning of the next reply, and leave that out in later renderings.
            if not before.startswith(after.rpartition(self._mark)[0]):
                _refuse("a later message changes how earlier ones are rendered: tokens cannot be appended")
        ends = [self._after_last_reply(one).split(user) for one, user in zip(renderings, users, strict=True)]
        if len(ends[1]) != 2:
            _refuse("a user's words do not appear exactly once in their rendering")
        if ends[1] != ends[2]:
            _refuse("what it puts behind a reply depends on how many came before")
        return ends[1][0]


def _compile(source: str) -> jinja2.Template:
    """As transformers compiles chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise RequestError(f"chat_template: {error}") from error


def _refuse(reason: str) -> NoReturn:
    raise RequestError(f"chat_template: {reason}")


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
