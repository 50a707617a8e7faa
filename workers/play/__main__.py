"""`python -m workers.play TASKS.jsonl --only ID --agent FILE`: plays one episode, and shows each turn as it happens.

The episode is that of training: the same loop, container and grader, without queue and trainer. Who replies is one of
  --replies FILE.json                 given replies: a JSON list of texts or of {"content", "tool_calls"}, or a trajectory file
  --api-base URL --model NAME         an OpenAI-compatible server; its key is in OPENAI_API_KEY, or where --key-env or --key-file says
  --router URL --tokenizer MODEL_DIR  SGLang engines behind our router

Needs Docker and the task's image; no Redis, no GPU. Exit status: 0 the episode ended and has a reward; 1 an infrastructure failure
kept it from one; 2 misuse; 130 after Ctrl-C.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from pipeline import artefacts
from pipeline.agent.config import load_agent
from pipeline.agent.example import doubts
from pipeline.agent.option import add_agent_options, read_agent, sampling_for
from pipeline.endpoint_option import add_key_options, endpoint_of
from pipeline.errors import RequestError, SandboxError
from pipeline.request import Claim, Context, Endpoint, Limits, Sampling
from pipeline.task import Task
from pipeline.tokenizer import read_bundle
from pipeline.visible import visible_line
from workers.policy.endpoint import EndpointPolicies, read_key
from workers.policy.replies import RepliesPolicies, read_replies
from workers.rollout import Policies
from workers.sandbox.backend import command_sandboxes
from workers.sandbox.protocol import Sandboxes
from workers.unqueued.claims import unqueued_claim
from workers.unqueued.ending import exit_status, misuse
from workers.unqueued.outputs import must_be_writable, writing
from workers.unqueued.tasks import TaskIndex, calibrated_tasks

DEFAULT_AGENT = Path(__file__).parent.parent / "agent" / "prompts" / "default.yaml"
UNLIMITED_TURNS = 100_000  # of an exact agent whose file sets no limit


@dataclass(frozen=True, slots=True)
class OneEpisode:
    """What is to be played, and who replies."""

    claim: Claim
    policies: AbstractAsyncContextManager[Policies]
    out: Path | None  # for the trajectory


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        episode = _read(options)
        sandboxes = command_sandboxes(fleet=f"play-{os.getpid()}")
    except (OSError, ValueError, RequestError) as error:
        return misuse(error)
    try:
        return exit_status(
            lambda: _play(episode, sandboxes), kept_if_stopped=lambda: "", kept_if_unwritable=lambda: ""
        )
    except SandboxError as error:
        return misuse(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workers.play",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("tasks", type=Path, metavar="TASKS.jsonl")
    add("--only", required=True, metavar="ID", help="the task to play")
    add_agent_options(parser, default=DEFAULT_AGENT)
    add("--replies", type=Path, metavar="FILE.json", help="replay these replies")
    add("--api-base", metavar="URL", help="an OpenAI-compatible server, such as http://host:30000/v1")
    add("--model", metavar="NAME", help="the model's name there")
    add_key_options(parser)
    add("--router", metavar="URL", help="sample from the engines behind this router")
    add("--tokenizer", type=Path, metavar="MODEL_DIR", help="the engines' model directory; with --router")
    add("--out", type=Path, metavar="FILE", help="write the trajectory there, as mini-swe-agent's traj.json")
    add("--temperature", type=float, metavar="T", help="of sampling; default: the agent file's, else 1")
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="that one reply may have; default: the agent file's, else 4096",
    )
    add("--step-limit", type=int, metavar="N", help="turns; default: the agent file's, else 50")
    add(
        "--context-tokens",
        type=int,
        metavar="N",
        help="that the policy has before it at one time; our engines' full contexts are cut, with --exact the episode ends; "
        "default: %(default)s",
    )
    add("--wall-s", type=float, metavar="S", help="wall time of the episode; default: %(default)s")
    parser.set_defaults(context_tokens=Limits().context_tokens, wall_s=Limits().wall_s)
    return parser


def _read(options: argparse.Namespace) -> OneEpisode:
    """Raises ValueError, OSError and RequestError for what cannot be played at all."""
    task = _task(options.tasks, options.only)
    claim = _claim(task, options)
    if options.out:
        must_be_writable(options.out, "--out")
    for doubt in doubts(load_agent(claim.request.agent_config), task, claim.request.limits):
        print(f"warning: {visible_line(doubt)}", file=sys.stderr)
    return OneEpisode(claim, _policies(options), options.out)


def _task(path: Path, only: str) -> Task:
    [task] = TaskIndex(path, calibrated_tasks(path)).require([only], where="--only")
    return task


def _claim(task: Task, options: argparse.Namespace) -> Claim:
    agent = read_agent(options.agent, exact=options.exact)
    config = load_agent(agent)
    turns = config.step_limit or (UNLIMITED_TURNS if config.exact else Limits().turns)
    limits = replace(Limits(), turns=turns, wall_s=options.wall_s, context_tokens=options.context_tokens)
    if options.step_limit is not None:
        limits = replace(limits, turns=options.step_limit)
    sampling = sampling_for(agent, Sampling())
    if options.temperature is not None:
        sampling = replace(sampling, temperature=options.temperature)
    if options.max_tokens is not None:
        sampling = replace(sampling, max_new_tokens=options.max_tokens)
    if min(limits.turns, limits.context_tokens, sampling.max_new_tokens) < 1 or sampling.temperature < 0:
        raise ValueError(
            "--step-limit, --max-tokens and --context-tokens must be 1 or more, --temperature 0 or more"
        )
    if limits.wall_s <= 0:
        raise ValueError("--wall-s must be above 0")
    claim = unqueued_claim(task, command="play", limits=limits)
    request = replace(
        claim.request,
        agent_config=agent,
        sampling=sampling,
        context=Context(policy="stop" if config.exact else "head_tail"),
        endpoint=_endpoint(options),
    )
    return replace(claim, request=request)


def _endpoint(options: argparse.Namespace) -> Endpoint | None:
    if (options.api_base is None) != (options.model is None):
        raise ValueError("--api-base and --model belong together: give both, or neither")
    if options.api_base is None:
        return None
    endpoint = endpoint_of(options)
    read_key(endpoint)
    return endpoint


def _policies(options: argparse.Namespace) -> AbstractAsyncContextManager[Policies]:
    if sum(one is not None for one in (options.replies, options.api_base, options.router)) != 1:
        raise ValueError(
            "say who replies: give one of --replies FILE.json, --api-base URL --model NAME, and --router URL"
        )
    if options.replies is not None:
        return nullcontext(RepliesPolicies(read_replies(options.replies)))
    if options.api_base is not None:
        return EndpointPolicies()
    if options.tokenizer is None:
        raise ValueError("--router needs --tokenizer: the directory of the model that the engines serve")
    from workers.policy.sglang import SglangPolicies, one_tokenizer

    return SglangPolicies(options.router, one_tokenizer(read_bundle(options.tokenizer)), any_weights=True)


def _play(episode: OneEpisode, sandboxes: Sandboxes) -> int:
    from workers.play.run import play_claim
    from workers.play.screen import Screen

    screen = Screen(sys.stdout)
    played = asyncio.run(
        play_claim(episode.claim, policies=episode.policies, sandboxes=sandboxes, watcher=screen)
    )
    screen.ended(played)
    if episode.out:
        with writing("--out", episode.out):
            episode.out.write_text(artefacts.dump(artefacts.trajectory_json(played)))
    return 1 if played.reward is None else 0


if __name__ == "__main__":
    sys.exit(main())
