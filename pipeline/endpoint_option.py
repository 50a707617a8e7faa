"""The OpenAI-compatible server that replies in place of engines: its options, the same for every command, and the fields of requests to it.

Only `endpoint_of` decides which fields a request's body has beside model, messages and tools: those of the agent file's
`model.model_kwargs`, then `--option`, then `--temperature` and `--max-tokens`. A field that none of these sets is not sent, and the
server's own default holds.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pipeline.agent.config import load_agent
from pipeline.request import Endpoint

DEFAULT_KEY_ENV = "OPENAI_API_KEY"
# Fields that no option may change, and the reasons.
_OURS = {
    "model": "--model says it",
    "messages": "the episode makes them",
    "tools": "the agent or the program says which there are",
    "stream": "replies are read whole",
    "api_key": "--key-env or --key-file says where it is",
}


def add_endpoint_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--key-env",
        metavar="NAME",
        help=f"environment variable with the server's key; default: {DEFAULT_KEY_ENV} if it is set",
    )
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="file with the server's key")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="a further field of each request to the server, as in seed=7 or 'chat_template_kwargs={\"enable_thinking\": false}'; "
        "may be repeated",
    )


def endpoint_of(options: argparse.Namespace, agent: str) -> Endpoint:
    """The server of --api-base and --model, with the fields of requests in an episode of `agent`; "": an agent program plays.

    Raises ValueError, RequestError.
    """
    if options.key_env and options.key_file:
        raise ValueError("--key-env and --key-file: give one of them")
    key_env = options.key_env or ""
    if not key_env and not options.key_file and os.environ.get(DEFAULT_KEY_ENV):
        key_env = DEFAULT_KEY_ENV
    return Endpoint(
        api_base=_url(options.api_base),
        model=options.model,
        key_env=key_env,
        key_file=str(options.key_file.resolve()) if options.key_file else "",
        options=_fields(options, agent),
    )


def _url(said: str) -> str:
    try:
        parts = urlsplit(said)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_one &= not (parts.query or parts.fragment) and said.isprintable() and " " not in said
    except ValueError:  # a port that is not a number, or brackets that do not match
        is_one = False
    if not is_one:
        raise ValueError(f"--api-base {said!r}: give a URL, as in http://127.0.0.1:30000/v1")
    return said


def _fields(options: argparse.Namespace, agent: str) -> dict[str, Any]:
    said = dict(_option(one) for one in options.option)
    fields: dict[str, Any] = {**(load_agent(agent).request_fields if agent else {}), **said}
    most = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    for flag, name, value in (
        ("--temperature", "temperature", options.temperature),
        ("--max-tokens", most, options.max_tokens),
    ):
        if value is None:
            continue
        if not 0 <= value < float("inf") or (flag == "--max-tokens" and value < 1):
            raise ValueError(
                f"{flag} {value:g}: --temperature is 0, which is greedy, or above, --max-tokens 1 or more"
            )
        if name in said:
            raise ValueError(f"{flag} and --option {name}=...: give one of them")
        fields[name] = value
    return fields


def _option(said: str) -> tuple[str, Any]:
    """`name=value` with a JSON value; a value that is not JSON is text."""
    name, equals, text = said.partition("=")
    if not equals or not name:
        raise ValueError(f"--option {said!r}: write it as NAME=JSON, as in seed=7")
    if name in _OURS:
        raise ValueError(f"--option {name}: no option sets it; {_OURS[name]}")
    value: Any = text
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        if not text or text[0] in '{["-0123456789':
            raise ValueError(f"--option {name}: {text!r} is no JSON: {error}") from error
    try:
        msgspec.msgpack.encode((name, value))
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"--option {name}: no request can carry it: {error}") from error
    return name, value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")
