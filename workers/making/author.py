"""A model as the author of problems and bugs: the endpoint that `--author-url` names, and how it is asked.

Requests are those of `workers.policy.endpoint`, which repeats them while the endpoint is busy. If it gives no reply, that is a failure of
the infrastructure, and another run of the command asks again. A reply that cannot be used is asked for again, three times in all. A prompt
never has an earlier reply, which may give the answer away; it only says why that could not be used.
"""

import argparse
import base64
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

import aiohttp

from pipeline.agent.option import checked_url
from pipeline.errors import EngineError, RequestError, RolloutError
from pipeline.request import Endpoint
from workers.policy.endpoint import EndpointServer, EndpointSettings, ServerHealth, read_key
from workers.policy.formats import ThoughtSplitter

NUM_TRIES = 3
MOST_REPLY_CHARS = 20_000
NO_REPLY = "--author-url: no reply"  # the reason of a candidate that has failed
SETTINGS = EndpointSettings(retry_budget_s=60.0)
_AGAIN = "\n\nAn earlier reply of yours could not be used: {why}. Mind this now.\n"

T = TypeVar("T")


class Unusable(ValueError):
    """A reply cannot be used. The message is shown to the author, so it says nothing that the author may not see."""


class NoReply(RolloutError):
    """The author's endpoint gave no reply."""


def add_author_options(parser: argparse.ArgumentParser, *, writes: str) -> None:
    """`writes` says what the author writes."""
    add = parser.add_argument
    help_ = f"an OpenAI-compatible endpoint, such as http://127.0.0.1:30000/v1, whose model writes {writes}"
    add("--author-url", metavar="URL", help=help_)
    add("--author-model", metavar="NAME", help="the model there")
    add("--author-key-env", metavar="VAR", help="the environment variable with the endpoint's key")


def author_of(options: argparse.Namespace) -> "Author | None":
    """The author that the options name; None without --author-url. Raises ValueError naming an option."""
    url, model, key_env = options.author_url, options.author_model, options.author_key_env
    if not url:
        if given := [name for name in ("author_model", "author_key_env") if getattr(options, name)]:
            raise ValueError(f"--{given[0].replace('_', '-')}: give --author-url, the URL of its endpoint")
        return None
    if not model:
        raise ValueError("--author-model: name the model at --author-url")
    address, login = _parted(checked_url(url, "--author-url"))
    if login and key_env:
        raise ValueError("--author-key-env: --author-url has a user's name already: give one of them")
    endpoint = Endpoint(api_base=address, model=model, key_env=key_env or "")
    try:
        return Author(endpoint, read_key(endpoint), login)
    except RequestError as error:
        raise ValueError(f"--author-key-env: {error}") from error


def author_settings(options: argparse.Namespace) -> dict[str, str]:
    """What the book has of the author, by the names of options: nothing without one. Raises ValueError naming an option."""
    author = author_of(options)
    if author is None:
        return {}
    return {"author_url": author.endpoint.api_base, "author_model": author.endpoint.model}


def _parted(url: str) -> tuple[str, str]:
    """The URL without user and password, and the header that has these; "" without them."""
    parts = urlsplit(url)
    login, at, host = parts.netloc.rpartition("@")
    encoded = base64.b64encode(unquote(login).encode()).decode()
    address = urlunsplit(parts._replace(netloc=host)).rstrip("/")
    return address, f"Basic {encoded}" if at else ""


@dataclass(frozen=True, slots=True)
class Written(Generic[T]):
    """What became of a reply that can be used, and the prompt that it answers."""

    value: T
    prompt: str


@dataclass(slots=True)
class Author:
    """Asks the model of one endpoint. Its key and login are in no file, log or error."""

    endpoint: Endpoint
    key: str = field(default="", repr=False)
    login: str = field(default="", repr=False)  # the header of a user's name and password
    settings: EndpointSettings = field(default_factory=lambda: SETTINGS)
    _health: ServerHealth = field(default_factory=ServerHealth)
    _server: EndpointServer | None = None

    @property
    def name(self) -> str:
        """As sources of problems have it."""
        return f"author {self.endpoint.model}"

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Inside, the author can be asked."""
        headers = {"Authorization": self.login} if self.login else {}
        async with aiohttp.ClientSession(headers=headers) as session:
            self._server = EndpointServer(session, self.endpoint, self.key, self.settings, self._health)
            yield

    async def write(self, request: str, use: Callable[[str], T]) -> Written[T]:
        """What `use` makes of a reply. It raises Unusable for one that has to be asked for again.

        Raises Unusable with all reasons after the last try, NoReply if the endpoint gives none.
        """
        reasons: list[str] = []
        for _ in range(NUM_TRIES):
            prompt = request + (_AGAIN.format(why=reasons[-1]) if reasons else "")
            try:
                return Written(use(await self._reply(prompt)), prompt)
            except Unusable as error:
                reasons.append(str(error))
        raise Unusable("; ".join(dict.fromkeys(reasons)))

    async def _reply(self, prompt: str) -> str:
        """The text of a reply without its thoughts. Raises NoReply, Unusable."""
        assert self._server is not None, "the author is asked outside its `async with`"
        message = {"role": "user", "content": prompt}
        try:
            found = await self._server.ask({"model": self.endpoint.model, "messages": [message]})
        except EngineError as error:
            raise NoReply(f"--author-url: {self._without_login(str(error))}") from None
        if found is None:
            raise Unusable("the endpoint has no room for it")
        text = ThoughtSplitter(exact=False)(found.reply).content.replace("\r\n", "\n").strip()
        if found.finish_reason == "length" or len(text) > MOST_REPLY_CHARS:
            raise Unusable("it is too long")
        return text

    def _without_login(self, text: str) -> str:
        """An error without the login, which an endpoint may have quoted."""
        return text.replace(self.login.removeprefix("Basic "), "[login]") if self.login else text
