"""`python -m workers.play TASKS.jsonl --only ID --agent FILE`: plays one episode, and shows each turn when it is played.

The episode is the same as in training: the same loop, container and grader, without queue and trainer. With --harness NAME an agent
program plays in place of the loop. The replies come from one of
  --replies FILE.json                 given replies: a JSON list of texts or of {"content", "tool_calls"}, or a trajectory file
  --api-base URL --model NAME         an OpenAI-compatible server; its key is in OPENAI_API_KEY, or where --key-env or --key-file says
  --router URL --tokenizer MODEL_DIR  SGLang engines of our router

The command needs Docker and the task's image; no Redis, no GPU. Exit status: 0 the episode ended and has a reward; 1 an infrastructure
failure prevented one; 2 misuse; 130 after Ctrl-C.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from msgspec.structs import replace
from rich.rule import Rule
from rich.text import Text

from pipeline import artefacts
from pipeline.agent.config import load_agent
from pipeline.agent.option import (
    Player,
    add_agent_options,
    add_endpoint_options,
    check_program,
    doubts,
    endpoint_of,
    read_player,
    sampling_for,
)
from pipeline.agent.upstream import BASH_TOOL
from pipeline.chat import ChatMessage
from pipeline.chat_template import ChatTemplate
from pipeline.commandline import program
from pipeline.errors import RequestError, SandboxError
from pipeline.harness import Harness
from pipeline.request import Claim, Context, Endpoint, EpisodeStatus, Limits, Sampling
from pipeline.rich_console import VisibleConsole
from pipeline.screen import visible, visible_line
from pipeline.task import Task
from pipeline.tokenizer import read_bundle
from pipeline.trajectory import Cut, Exhausted, Failed, Submitted, Trajectory, Turn, failure_of, outcome_tag
from workers.agent.loop import Watcher
from workers.grading.grade import Grader
from workers.policy.endpoint import EndpointPolicies, read_key
from workers.policy.replies import RepliesPolicies, read_replies
from workers.rollout import Policies, run_rollout
from workers.sandbox.backend import command_sandboxes
from workers.sandbox.protocol import Sandboxes
from workers.unqueued import (
    DEFAULT_AGENT,
    TaskIndex,
    exit_status,
    misuse,
    must_be_writable,
    session,
    unqueued_claim,
    verified_tasks,
    writing,
)

TOLD, SAID, ENDED, BROKEN = "cyan", "green", "bold", "red"  # colours on a terminal


class EpisodeScreen:
    """Prints an episode; implements `workers.agent.loop.Watcher`. It makes control characters visible."""

    def __init__(self, stream: TextIO) -> None:
        self._console = VisibleConsole(stream, highlight=False)
        self._num_replies = 0
        # The newest turn whose commands have run, until the policy is shown what they printed.
        self._untold: Turn | None = None

    def told(self, messages: Sequence[ChatMessage]) -> None:
        self._untold = None
        for message in messages:
            of_call = f" (result of {message.tool_call_id})" if message.tool_call_id else ""
            self._section(f"{message.role}{of_call}", message.content, TOLD)

    def replied(self, turn: Turn) -> None:
        self._num_replies += 1
        if turn.cut is not None:
            self._section("context cut", _cut(turn.cut), TOLD)
        self._section(f"reply {self._num_replies}{_facts(turn)}", _spoken(turn.said), SAID)

    def acted(self, turn: Turn) -> None:
        self._untold = turn

    def ended(self, played: Trajectory) -> None:
        """Prints the end of the episode, and its reward unless something broke."""
        if self._untold is not None and not isinstance(played.outcome, Submitted):
            for action in self._untold.actions:
                if action.observation is not None:
                    self._section("output that the policy was not shown", action.observation.output, TOLD)
        if not isinstance(played.outcome, Failed):
            self._section("patch", played.outcome.patch.decode("utf-8", "replace"), ENDED)
        self._section("end", _ending(played), BROKEN if played.reward is None else ENDED)

    def _section(self, title: str, text: str, colour: str) -> None:
        self._console.print(Rule(Text(visible_line(title), style=colour), align="left", style=colour))
        self._console.print(Text(visible(text)), soft_wrap=True)


def _cut(cut: Cut) -> str:
    parts = ["the last reply is taken out, a format error"] if cut.forgot_reply else []
    parts += [f"{cut.num_omitted} turns omitted so far"] if cut.num_omitted else []
    parts += [f"thoughts of {cut.num_thoughts} replies taken out"] if cut.num_thoughts else []
    parts += [f"{cut.dropped_chars} characters of the newest output did not fit"] if cut.dropped_chars else []
    return "; ".join(parts)


def _facts(turn: Turn) -> str:
    """Further facts about a reply besides its text."""
    num_tokens = turn.usage.completion_tokens if turn.usage is not None else len(turn.sampled) // 4
    facts = [f"{num_tokens} tokens"] if num_tokens else []
    facts += [f"{turn.generate_s:.1f} s"] if turn.generate_s else []
    facts += ["cut short by its limit of tokens"] if turn.stop != "stop" else []
    return f" ({', '.join(facts)})" if facts else ""


def _spoken(said: ChatMessage) -> str:
    thoughts = [f"<thoughts>\n{said.reasoning}\n</thoughts>"] if said.reasoning else []
    calls = [f"{call.name}{f' [{call.id}]' if call.id else ''} {call.arguments}" for call in said.tool_calls]
    return "\n".join([*thoughts, *([said.content] if said.content else []), *calls])


def _ending(played: Trajectory) -> str:
    num_turns = len(played.turns)
    head = f"{outcome_tag(played.outcome)} after {num_turns} {'turn' if num_turns == 1 else 'turns'}"
    if isinstance(played.outcome, Failed):
        return f"{head}: {played.outcome.message}\nno reward: an infrastructure failure is not a verdict"
    reached = " (the repository's diff is graded)" if isinstance(played.outcome, Exhausted) else ""
    reward = played.reward
    assert reward is not None
    control = f", control {reward.control}" if reward.control else ""
    seconds = played.finished_at - played.started_at
    return f"{head}{reached}\nreward {reward.value:g}: {reward.decided_by}{control}\n{seconds:.1f} s in all"


async def play_claim(
    claim: Claim,
    *,
    policies: AbstractAsyncContextManager[Policies],
    sandboxes: Sandboxes,
    watcher: Watcher,
) -> Trajectory:
    """The finished episode. Closes `sandboxes`. Raises SandboxError if no sandbox can be opened on this machine."""
    async with session(sandboxes) as outage, policies as opened:
        if outage:
            raise SandboxError(outage)
        return await run_rollout(
            claim,
            EpisodeStatus(),
            policies=opened,
            sandboxes=sandboxes,
            grader=Grader(sandboxes),
            watcher=watcher,
        )


UNLIMITED_TURNS = 100_000  # the limit of an exact agent whose file sets no limit


@dataclass(frozen=True, slots=True)
class OneEpisode:
    """The episode to play, and the source of replies."""

    claim: Claim
    policies: AbstractAsyncContextManager[Policies]
    out: Path | None  # the file for the trajectory


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
        prog=program("workers.play"),
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
    add_endpoint_options(parser)
    add("--router", metavar="URL", help="sample from the engines behind this router")
    add("--tokenizer", type=Path, metavar="MODEL_DIR", help="the engines' model directory; with --router")
    add("--out", type=Path, metavar="FILE", help="write the trajectory there, as mini-swe-agent's traj.json")
    add(
        "--temperature",
        type=float,
        metavar="T",
        help="sampling temperature; default: the agent file's, else the server's; of engines 1",
    )
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="largest number of tokens of one reply; default: the agent file's, else the server's; of engines 4096",
    )
    add("--step-limit", type=int, metavar="N", help="turns; default: the agent file's, else 50")
    add(
        "--context-tokens",
        type=int,
        metavar="N",
        help="largest context of the policy. When it is full, our engines' contexts are cut; with --exact the episode ends; an agent "
        "program gets the number; default: %(default)s",
    )
    add("--wall-s", type=float, metavar="S", help="wall time of the episode; default: %(default)s")
    parser.set_defaults(context_tokens=Limits().context_tokens, wall_s=Limits().wall_s)
    return parser


def _read(options: argparse.Namespace) -> OneEpisode:
    """The parsed arguments. Raises ValueError, OSError and RequestError for arguments with which nothing can be played."""
    task = _task(options.tasks, options.only)
    player = read_player(options)
    claim = _claim(task, player, options)
    if options.out:
        must_be_writable(options.out, "--out")
    if player.harness is None:
        for doubt in doubts(load_agent(player.agent), task, claim.request.limits):
            print(f"warning: {visible_line(doubt)}", file=sys.stderr)
    return OneEpisode(claim, _policies(options, player.harness), options.out)


def _task(path: Path, only: str) -> Task:
    [task] = TaskIndex(path, verified_tasks(path)).require([only], where="--only")
    return task


def _claim(task: Task, player: Player, options: argparse.Namespace) -> Claim:
    turns, sampling, context = _habits(player)
    limits = replace(Limits(), turns=turns, wall_s=options.wall_s, context_tokens=options.context_tokens)
    if options.step_limit is not None:
        limits = replace(limits, turns=options.step_limit)
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
    if player.harness is not None:
        check_program(player.harness, limits, sampling)
    claim = unqueued_claim(task, command="play", limits=limits)
    request = replace(
        claim.request,
        agent_config=player.agent,
        harness=player.harness,
        sampling=sampling,
        context=context,
        endpoint=_endpoint(options, player.agent),
    )
    return replace(claim, request=request)


def _habits(player: Player) -> tuple[int, Sampling, Context]:
    """The limit of turns, the sampling, and the treatment of a full context, if the command line does not set them."""
    if player.harness is not None:
        return Limits().turns, Sampling(), Context(policy="stop")  # a program cuts its context itself
    config = load_agent(player.agent)
    turns = config.step_limit or (UNLIMITED_TURNS if config.exact else Limits().turns)
    context = Context(policy="stop" if config.exact else "head_tail")
    return turns, sampling_for(player.agent, Sampling()), context


def _endpoint(options: argparse.Namespace, agent: str) -> Endpoint | None:
    if (options.api_base is None) != (options.model is None):
        raise ValueError("--api-base and --model belong together: give both, or neither")
    if options.api_base is None:
        if options.option:
            raise ValueError("--option: it is for the server of --api-base")
        return None
    endpoint = endpoint_of(options, agent)
    read_key(endpoint)
    return endpoint


def _policies(options: argparse.Namespace, harness: Harness | None) -> AbstractAsyncContextManager[Policies]:
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

    bundle = read_bundle(options.tokenizer)
    if harness is not None and harness.uses_tools:
        try:
            ChatTemplate(bundle, (BASH_TOOL,))
        except RequestError as error:
            raise ValueError(
                f"--tokenizer {options.tokenizer}: {harness.name} calls tools: {error}"
            ) from error
    return SglangPolicies(options.router, one_tokenizer(bundle), any_weights=True)


def _play(episode: OneEpisode, sandboxes: Sandboxes) -> int:

    screen = EpisodeScreen(sys.stdout)
    played = asyncio.run(
        play_claim(episode.claim, policies=episode.policies, sandboxes=sandboxes, watcher=screen)
    )
    failed = failure_of(played)
    if failed is not None and failed.boundary == "harness" and not failed.transient:
        return misuse(ValueError(f"--harness: {failed.message}"))
    screen.ended(played)
    if episode.out:
        with writing("--out", episode.out):
            episode.out.write_text(artefacts.dump(artefacts.trajectory_json(played)))
    return 1 if played.reward is None else 0


if __name__ == "__main__":
    sys.exit(main())
