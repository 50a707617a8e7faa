"""The options of an evaluation of a model behind a server. The names are those of mini-swe-agent and the older systems."""

import argparse
import os
from pathlib import Path

from pipeline.agent_config import load_agent
from pipeline.errors import RequestError
from pipeline.request import Endpoint, Limits, Sampling
from trainer.evaluate.selection import TaskSelection

DEFAULT_KEY_ENV = "OPENAI_API_KEY"


def endpoint_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.evaluate",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("tasks", type=Path, metavar="TASKS.jsonl")
    add("--api-base", required=True, metavar="URL", help="of the server, as in http://127.0.0.1:30000/v1")
    add("--model", required=True, metavar="NAME", help="as the server calls it")
    add(
        "--agent",
        required=True,
        action="append",
        metavar="FILE",
        help="the agent's YAML, or KEY.SUB=VALUE; may be repeated",
    )
    add(
        "--out",
        required=True,
        type=Path,
        metavar="DIR",
        help="where the results go; with results in it, go on there",
    )
    add("--local", action="store_true", help="play on this machine, without a queue; needs Docker alone")
    add("--redo-existing", action="store_true", help="play again what has a verdict")
    add(
        "--key-env",
        metavar="NAME",
        help=f"environment variable with the server's key; default {DEFAULT_KEY_ENV} if it is set",
    )
    add("--key-file", type=Path, metavar="FILE", help="file with the server's key")
    _add_selection(parser)
    _add_limits(parser)
    add("--json", action="store_true", help="print the summary as one JSON object")
    return parser


def _add_selection(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("which tasks").add_argument
    add("--slice", default="", metavar="START:STOP", help="of the tasks that are left, as in 0:5")
    add(
        "--filter",
        default="",
        metavar="RE",
        help="only ids that this regular expression matches from their beginning",
    )
    add("--shuffle", action="store_true", help="in a random order, always the same")
    add("--max-instances", type=int, metavar="N", help="so many tasks at most")
    add(
        "--samples",
        type=int,
        default=1,
        metavar="K",
        help="episodes of each task; pass@1 to pass@K are told; default 1",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("limits and sampling").add_argument
    add("--max-concurrent", type=int, default=4, metavar="N", help="episodes at once; default %(default)s")
    add("--step-limit", type=int, metavar="N", help="replies of an episode; default the agent's, else 50")
    add("--max-tokens", type=int, metavar="N", help="of one reply; default the agent's, else 4096")
    add("--temperature", type=float, metavar="T", help="0 is greedy; default the agent's, else 0")
    add(
        "--wall-s",
        type=float,
        default=Limits().wall_s,
        metavar="S",
        help="wall time of an episode; default %(default)s",
    )


def agent_of(options: argparse.Namespace) -> str:
    """The agent's files as one text. Raises ValueError naming the file and the fault."""
    (path,) = options.agent
    try:
        text = Path(path).read_text()
        load_agent(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--agent: {path}: {error}; give the agent's YAML file") from error
    except RequestError as error:
        raise ValueError(f"--agent: {path}: {error}") from error
    return text


def selection_of(options: argparse.Namespace) -> TaskSelection:
    return TaskSelection(options.shuffle, options.filter, options.slice, options.max_instances)


def sampling_of(options: argparse.Namespace) -> Sampling:
    """Raises ValueError for a value that no server can take."""
    temperature = 0.0 if options.temperature is None else options.temperature
    max_tokens = 4096 if options.max_tokens is None else options.max_tokens
    if temperature < 0:
        raise ValueError(f"--temperature {temperature:g}: it must be 0, which is greedy, or above")
    if max_tokens < 1:
        raise ValueError(f"--max-tokens {max_tokens}: give 1 or more")
    return Sampling(temperature=temperature, max_new_tokens=max_tokens)


def limits_of(options: argparse.Namespace) -> Limits:
    """Raises ValueError for limits that allow no episode."""
    for name in ("samples", "max_concurrent", "step_limit"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give 1 or more")
    if options.wall_s <= 0:
        raise ValueError(f"--wall-s {options.wall_s:g}: it must be above 0")
    turns = options.step_limit or Limits().turns
    return Limits(turns=turns, wall_s=options.wall_s)


def endpoint_of(options: argparse.Namespace) -> Endpoint:
    """Raises ValueError for an address that is none."""
    if not options.api_base.startswith(("http://", "https://")):
        raise ValueError(f"--api-base {options.api_base!r}: give a URL, as in http://127.0.0.1:30000/v1")
    if options.key_env and options.key_file:
        raise ValueError("--key-env and --key-file: give one of them")
    key_env = options.key_env or ""
    if not key_env and not options.key_file and os.environ.get(DEFAULT_KEY_ENV):
        key_env = DEFAULT_KEY_ENV
    key_file = str(options.key_file.resolve()) if options.key_file else ""
    return Endpoint(api_base=options.api_base, model=options.model, key_env=key_env, key_file=key_file)
