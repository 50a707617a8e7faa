"""The options of an evaluation of a model behind a server. The names are those of mini-swe-agent and the older systems."""

import argparse
from pathlib import Path

from msgspec.structs import replace

from pipeline.agent.config import load_agent
from pipeline.agent.option import add_agent_options, read_agent, sampling_for
from pipeline.endpoint_option import add_key_options
from pipeline.errors import RequestError
from pipeline.request import Limits, Sampling
from trainer.evaluate.selection import TaskSelection


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
    add_agent_options(parser)
    add(
        "--out",
        required=True,
        type=Path,
        metavar="DIR",
        help="where the results go; with results in it, go on there",
    )
    add("--local", action="store_true", help="play on this machine, without a queue; needs Docker alone")
    add("--redo-existing", action="store_true", help="play again what has a verdict")
    add_key_options(parser)
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
    try:
        return read_agent(options.agent, exact=options.exact)
    except (ValueError, RequestError) as error:
        raise ValueError(f"--agent: {error}") from error


def selection_of(options: argparse.Namespace) -> TaskSelection:
    return TaskSelection(options.shuffle, options.filter, options.slice, options.max_instances)


def sampling_of(options: argparse.Namespace, agent: str) -> Sampling:
    """Raises ValueError for a value that no server can take."""
    sampling = sampling_for(agent, Sampling(temperature=0.0))
    if options.temperature is not None:
        sampling = replace(sampling, temperature=options.temperature)
    if options.max_tokens is not None:
        sampling = replace(sampling, max_new_tokens=options.max_tokens)
    if sampling.temperature < 0:
        raise ValueError(f"--temperature {sampling.temperature:g}: it must be 0, which is greedy, or above")
    if sampling.max_new_tokens < 1:
        raise ValueError(f"--max-tokens {sampling.max_new_tokens}: give 1 or more")
    return sampling


def limits_of(options: argparse.Namespace, agent: str) -> Limits:
    """Raises ValueError for limits that allow no episode."""
    for name in ("samples", "max_concurrent", "step_limit"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give 1 or more")
    if options.wall_s <= 0:
        raise ValueError(f"--wall-s {options.wall_s:g}: it must be above 0")
    turns = options.step_limit or load_agent(agent).step_limit or Limits().turns
    return Limits(turns=turns, wall_s=options.wall_s)
