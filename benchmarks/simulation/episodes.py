"""Plays many episodes of the demo at once, turn by turn: the agent's protocol as `workers/agent/loop.py` has it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.scripted_fleet import with_digests
from benchmarks.simulation.interpreter import Interpreter
from benchmarks.simulation.llama import Llama, Sequences, Weights, draw
from benchmarks.simulation.sandbox import Repository, solves
from pipeline.message import pack_float32s, pack_int32s
from pipeline.trajectory import Turn, VersionSpan
from trainer.demo.family import DemoTask
from trainer.demo.lessons import END, SENTINEL, EpisodeMessage, Templates
from trainer.warmstart.scratch import build_tokenizer

MAX_TURNS = 8
MAX_NEW_TOKENS = 96
MAX_FORMAT_ERRORS = 3  # consecutive
CONTEXT_TOKENS = 1024
OBSERVATION_CHARS = 2000
TIMED_OUT_TEXT = "The command took too long and was stopped."

_ACTION = re.compile(r"```bash\s*\n(.*?)\n```", re.DOTALL)


@dataclass(slots=True)
class Episode:
    """One episode, under way or over."""

    task: DemoTask
    repository: Repository
    turns: list[Turn] = field(default_factory=list[Turn])
    # What each turn did: the command, or None for a format error.
    commands: list[str | None] = field(default_factory=list[str | None])
    # Whether the hidden tests would have passed after each turn.
    solved_after: list[bool] = field(default_factory=list[bool])
    ending: str = ""  # "" under way, "submitted", or the limit that was reached
    reward: float = 0.0
    pending: list[int] = field(default_factory=list[int])  # to be fed before the next reply
    num_tokens: int = 0
    num_format_errors: int = 0
    format_errors_running: int = 0

    @property
    def room(self) -> int:
        """Tokens that the next reply may have."""
        return min(MAX_NEW_TOKENS, CONTEXT_TOKENS - 1 - self.num_tokens - len(self.pending))


@dataclass(slots=True)
class _Reply:
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])


class Player:
    """Plays with the demo's prompts and tokenizer."""

    def __init__(self, llama: Llama, interpreter: Interpreter) -> None:
        self._llama = llama
        self._interpreter = interpreter
        self._templates = Templates()
        self._tokenizer = build_tokenizer()
        self._end: int = self._tokenizer.token_to_id(END)

    def play(
        self,
        tasks: Sequence[DemoTask],
        weights: Weights,
        *,
        version: int,
        generator: torch.Generator,
        forced: Callable[[Episode], str] = lambda _: "",
    ) -> list[Episode]:
        """One episode of each task, all under the same weights, at temperature 1.

        `forced` returns the text with which the next reply must begin. Forced tokens have a log-prob of 0.
        """
        episodes = [self._begin(task) for task in tasks]
        sequences = Sequences(self._llama, weights, len(episodes))
        running = dict(enumerate(episodes))
        while running:
            begun = {number: self._encoded(forced(episode)) for number, episode in running.items()}
            for number, reply in self._replies(running, begun, sequences, generator).items():
                self._take(running[number], reply, version)
            running = {number: one for number, one in running.items() if not one.ending}
        for episode in episodes:
            episode.reward = float(episode.solved_after[-1])
        return episodes

    def _begin(self, task: DemoTask) -> Episode:
        episode = Episode(task, Repository(task.files, self._interpreter))
        opening = "".join(message.rendered() for message in self._templates.opening(task.issue))
        episode.pending = self._encoded(f"{opening}<|assistant|>")
        return episode

    def _replies(
        self,
        episodes: Mapping[int, Episode],
        begun: Mapping[int, list[int]],
        sequences: Sequences,
        generator: torch.Generator,
    ) -> dict[int, _Reply]:
        replies = {number: _Reply(list(ids), [0.0] * len(ids)) for number, ids in begun.items()}
        new = {number: [*episode.pending, *begun[number]] for number, episode in episodes.items()}
        while new:
            order, logits = sequences.extend(new)
            new = {}
            for number, token, logprob in zip(order, *draw(logits, generator), strict=True):
                reply = replies[number]
                reply.ids.append(token)
                reply.logprobs.append(logprob)
                # The last token is fed with what comes after it.
                if token != self._end and len(reply.ids) < episodes[number].room:
                    new[number] = [token]
        return replies

    def _take(self, episode: Episode, reply: _Reply, version: int) -> None:
        """Put a reply into its episode, and run its command."""
        is_ended = reply.ids[-1] == self._end
        text = self._tokenizer.decode(reply.ids[: len(reply.ids) - is_ended], skip_special_tokens=False)
        # The last token of the reply before was fed now, but belongs to that reply.
        fed = episode.pending[1:] if episode.turns else episode.pending
        episode.turns.append(
            Turn(
                kept_tokens=episode.num_tokens,
                fed=pack_int32s(fed),
                sampled=pack_int32s(reply.ids),
                logprobs=pack_float32s(reply.logprobs),
                versions=(VersionSpan(version, 0, len(reply.ids)),),
                stop="stop" if is_ended else "length",
                text=text,
            )
        )
        episode.num_tokens += len(fed) + len(reply.ids)
        message = self._act(episode, text)
        episode.solved_after.append(solves(episode.task, episode.repository.files, self._interpreter))
        if not episode.ending and len(episode.turns) >= MAX_TURNS:
            episode.ending = "turns"
        ended = "" if is_ended else END
        episode.pending = [reply.ids[-1], *self._encoded(f"{ended}{message.rendered()}<|assistant|>")]
        if not episode.ending and episode.room < 1:
            episode.ending = "context"
        if episode.ending:
            episode.turns = list(with_digests(episode.turns))

    def _act(self, episode: Episode, text: str) -> EpisodeMessage:
        """Run the command of a reply; returns the message to the policy. May end the episode."""
        commands = [found.strip() for found in _ACTION.findall(text)]
        if len(commands) != 1 or "\0" in commands[0]:
            episode.commands.append(None)
            episode.num_format_errors += 1
            episode.format_errors_running += 1
            if episode.format_errors_running >= MAX_FORMAT_ERRORS:
                episode.ending = "format_errors"
            return self._templates.format_error()
        episode.format_errors_running = 0
        ran = episode.repository.run(commands[0])
        episode.commands.append(commands[0])
        if ran.returncode == 0 and ran.output.partition("\n")[0].strip() == SENTINEL:
            episode.ending = "submitted"
        if ran.returncode is None:
            return EpisodeMessage("user", TIMED_OUT_TEXT)
        return self._templates.observation(ran.returncode, ran.output[:OBSERVATION_CHARS])

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids
