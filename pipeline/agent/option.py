"""The options that choose who plays and who replies, the same for every command that plays episodes: `--agent` and `--exact`, or
`--harness`; and the OpenAI-compatible server that replies in place of engines.

An agent file is tried on a task before anything starts: its opening messages, and what looks wrong with them.

Only `endpoint_of` decides which fields a request's body has beside model, messages and tools: those of the agent file's
`model.model_kwargs`, then `--option`, then `--temperature` and `--max-tokens`. A field that none of these sets is not sent, and the
server's own default holds.
"""

import argparse
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from pipeline.agent.config import AgentConfig, load_agent
from pipeline.agent.files import merged, parse, pinned, to_text, without_secrets
from pipeline.harness import Harness, check_can_play, read_harness
from pipeline.request import Endpoint, Limits, Sampling
from pipeline.task import Task

# An absolute path that is a word of its own: no closing tag, and no part of a URL, of "and/or" or of an expression.
_PATH: Final = re.compile(r"(?<![\w<:/.}*~\\-])/[A-Za-z_][\w.-]*(?:/[\w.-]+)*")
# Directories in which repositories commonly are.
_USUAL: Final = ("/testbed", "/workspace", "/app", "/repo")
# Paths of the operating system, and placeholders for any other.
_NO_WORKDIR: Final = (
    "/bin", "/boot", "/dev", "/etc", "/lib", "/path", "/proc", "/root/.", "/sbin", "/sys", "/tmp", "/usr", "/var",
)  # fmt: skip
_ABOUT_PLACES: Final = re.compile(
    r"director|folder|repositor|code ?base|checked out|located|\bcd\b", re.IGNORECASE
)

DEFAULT_KEY_ENV = "OPENAI_API_KEY"
# Fields that no option may change, and the reasons.
_FIXED_FIELDS = {
    "model": "--model says it",
    "messages": "the episode makes them",
    "tools": "the agent or the program says which there are",
    "stream": "replies are read whole",
    "api_key": "--key-env or --key-file says where it is",
}


def example(config: AgentConfig, task: Task, limits: Limits) -> tuple[str, str]:
    """The system message and the first user message of an episode of `task`. Raises RequestError."""
    return config.opening(_live(config, task, limits, problem=task.problem))


def instructions(config: AgentConfig, task: Task, limits: Limits) -> str:
    """The opening messages without the problem. Raises RequestError."""
    return "\n".join(config.opening(_live(config, task, limits, problem="")))


def doubts(config: AgentConfig, task: Task, limits: Limits) -> list[str]:
    """Statements of an agent file that do not hold for this task, each as a sentence."""
    workdir = task.workdir
    if not workdir:
        return []
    found: list[str] = []
    if config.cwd and config.cwd != workdir:
        where = f"commands start in {config.cwd}" if config.exact else f"commands start in {workdir}"
        found.append(
            f"environment.cwd is {config.cwd}, the directory of task {task.id} is {workdir}: {where}"
        )
    text = instructions(config, task, limits)
    found += [
        f"the prompt names the directory {place}, but task {task.id} is in {workdir}; write {{{{cwd}}}} there"
        for place in dict.fromkeys(_places(text, workdir, config.cwd))
    ]
    return found


def _places(text: str, workdir: str, cwd: str | None) -> Iterator[str]:
    """Directories other than `workdir` that the text names as the directory to work in."""
    usual = {*_USUAL, *([cwd] if cwd else [])}
    for line in text.splitlines():
        for path in _PATH.findall(line):
            place = path.rstrip(".")
            if _is_in(place, workdir) or _is_in(workdir, place) or place.startswith(_NO_WORKDIR):
                continue
            root = next((one for one in sorted(usual) if _is_in(place, one)), None)
            if root is not None or _ABOUT_PLACES.search(line):
                yield root or place


def _is_in(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _live(config: AgentConfig, task: Task, limits: Limits, *, problem: str) -> dict[str, object]:
    return {
        "task": problem,
        "cwd": task.workdir,
        "timeout": int(min(limits.command_s, config.command_s or limits.command_s)),
        "step_limit": min(limits.turns, config.step_limit or limits.turns),
        "n_model_calls": 0,
        "model_cost": 0.0,
        "elapsed_seconds": 0,
        "image": task.image,
    }


def add_agent_options(parser: argparse.ArgumentParser, *, default: Path | None = None) -> None:
    """The options set `options.agent`, a list of specs, `options.exact` and `options.harness`.

    Without a default, an agent or a harness must be given.
    """
    who = parser.add_mutually_exclusive_group(required=default is None)
    who.add_argument(
        "--agent",
        action=_Agents,
        default=None if default is None else [str(default)],
        metavar="FILE",
        help="the agent's YAML, or a value as in agent.step_limit=50; may be repeated, the later one wins"
        + ("" if default is None else "; default: ours"),
    )
    who.add_argument(
        "--harness",
        metavar="NAME",
        help="an agent program plays in place of the built-in loop: the name of one that `swerve harness ls` shows, or its file",
    )
    parser.add_argument(
        "--exact", action="store_true", help="do as mini-swe-agent does even where our own way is better"
    )


@dataclass(frozen=True, slots=True)
class Player:
    """The player: an agent of the built-in loop, or an agent program."""

    agent: str  # the text that requests carry; "" where an agent program plays
    harness: Harness | None = None


def read_player(options: argparse.Namespace) -> Player:
    """The player that the options of `add_agent_options` choose.

    Raises ValueError naming the option, RequestError for a file that cannot be used.
    """
    if options.harness is None:
        return Player(read_agent(options.agent, exact=options.exact))
    if options.exact:
        raise ValueError("--exact: it is for the built-in loop; leave it out where --harness says who plays")
    try:
        return Player("", read_harness(options.harness).harness)
    except ValueError as error:
        raise ValueError(f"--harness: {error}") from error


def check_program(harness: Harness, limits: Limits, sampling: Sampling) -> None:
    """Raises ValueError if the program cannot play, or not in the context that --context-tokens and --max-tokens allow."""
    try:
        check_can_play(harness, limits.context_tokens, sampling.max_new_tokens)
    except ValueError as error:
        raise ValueError(f"--harness: {error}") from error


def read_agent(specs: Sequence[str], *, exact: bool = False) -> str:
    """The agent as requests carry it: files and values merged, without secrets, with facts about this machine.

    Raises ValueError for a file that cannot be read, RequestError for one that cannot be used.
    """
    tree = pinned(without_secrets(merged(specs)))
    if all("=" in spec for spec in specs):
        raise ValueError(f"{' '.join(specs)}: give the agent's YAML file that these values belong to as well")
    if exact:
        tree["swerve"]["exact"] = True
    text = to_text(tree)
    load_agent(text)
    return text


def agent_digest(text: str) -> str:
    """A digest that is the same for the same files, whatever machine made the request."""
    tree = {name: {**keys, "facts": None} if name == "swerve" else keys for name, keys in parse(text).items()}
    return hashlib.sha256(to_text(tree).encode()).hexdigest()[:16]


def player_digest(player: Player) -> str:
    """A digest that is the same for the same player, whatever machine made the request."""
    if player.harness is None:
        return agent_digest(player.agent)
    words = msgspec.json.encode(player.harness, order="deterministic")
    return f"{player.harness.name} {player.harness.version} {hashlib.sha256(words).hexdigest()[:16]}"


def sampling_for(text: str, sampling: Sampling) -> Sampling:
    """`sampling` with the parameters that the agent file sets."""
    said = load_agent(text).sampling
    if said.temperature is not None:
        sampling = replace(sampling, temperature=float(said.temperature))
    if said.top_p is not None:
        sampling = replace(sampling, top_p=float(said.top_p))
    if said.max_tokens is not None:
        sampling = replace(sampling, max_new_tokens=said.max_tokens)
    return sampling


class _Agents(argparse.Action):
    """Collects specs; the first one given replaces the default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        before: list[str] = getattr(namespace, self.dest) or []
        setattr(namespace, self.dest, [*([] if before is self.default else before), str(values)])


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
        api_base=checked_url(options.api_base, "--api-base"),
        model=options.model,
        key_env=key_env,
        key_file=str(options.key_file.resolve()) if options.key_file else "",
        options=_fields(options, agent),
    )


def checked_url(said: str, option: str) -> str:
    """The URL of an endpoint. Raises ValueError naming the option."""
    try:
        parts = urlsplit(said)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_one &= not (parts.query or parts.fragment) and said.isprintable() and " " not in said
    except ValueError:  # a port that is not a number, or brackets that do not match
        is_one = False
    if not is_one:
        raise ValueError(f"{option} {said!r}: give a URL, as in http://127.0.0.1:30000/v1")
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
    if name in _FIXED_FIELDS:
        raise ValueError(f"--option {name}: no option sets it; {_FIXED_FIELDS[name]}")
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
