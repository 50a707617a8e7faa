"""A pretrained Llama that imitates the demonstration's teacher, all its weights trained.

Lessons are fed and sampled as in a rollout, so that a policy which imitates them gets the same token ids in training.

The state is saved every few minutes, and a killed command continues from there.
"""

import contextlib
import functools
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipeline.chat import ChatMessage
from pipeline.chat_template import ChatTemplate
from pipeline.errors import RequestError
from pipeline.tokenizer import read_bundle
from trainer.demo.family import make_task
from trainer.demo.lessons import EpisodeMessage, Templates, teach


class TokenLesson(msgspec.Struct, frozen=True):
    """One episode: its token ids, and a flag for each that the teacher writes."""

    ids: list[int]
    is_reply: list[bool]


class LessonBook:
    """Lessons by number. A lesson depends only on its number, not on the order of the calls."""

    def __init__(self, model: Path, *, seed: int) -> None:
        """`model` is a Hugging Face directory. Raises ValueError if its chat template cannot be used."""
        from tokenizers import Tokenizer

        bundle = read_bundle(model)
        try:
            self._template = ChatTemplate(bundle)
        except RequestError as error:
            raise ValueError(f"{model}: {error}") from error
        self._tokenizer: Tokenizer = Tokenizer.from_buffer(bundle.tokenizer_json)
        self._stop_ids = bundle.stop_token_ids
        self._texts = Templates()
        self._seed = seed
        (self._end_id, *_) = self._encode(self._template.end_of_reply)
        if self._end_id not in self._stop_ids:
            raise ValueError(
                f"{model}: its chat template ends a reply with {self._template.end_of_reply!r}, at which sampling does not "
                "end; add its first token to eos_token_id in config.json"
            )

    def lesson(self, number: int) -> TokenLesson:
        """The teacher's episode on the task of that number."""
        rng = random.Random(f"{self._seed}/{number}")
        messages = teach(make_task(self._seed, "warmstart", number), rng, self._texts).messages
        ids = self._encode(self._template.render(_chat(messages[:2])))
        is_reply = [False] * len(ids)
        for place in range(2, len(messages), 2):
            reply = [*self._encode(messages[place].content), self._end_id]
            told = messages[place + 1 : place + 2]
            # The first token after a reply, the end of its turn, is already part of the reply.
            fed = self._encode(self._template.after_reply(_chat(told)))[1:] if told else []
            ids += reply + fed
            is_reply += [True] * len(reply) + [False] * len(fed)
        return TokenLesson(ids, is_reply)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _chat(messages: list[EpisodeMessage]) -> list[ChatMessage]:
    return [ChatMessage(message.role, message.content) for message in messages]


if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
FIRST_PROBE = 1_000_000
"""Lessons from this number on are not used for training; they measure the result."""

PASS_TOKENS = 1200
"""The number of tokens of one forward and backward pass.

They bound the memory: 1.2 GB of activations for a model of 135 million parameters.
"""

REPORT_S = 20.0


class Imitation(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the imitation. The number of lessons, of about 440 tokens each, determines the duration."""

    seed: int = 0
    num_lessons: int = 640
    lessons_per_update: int = 8
    peak_lr: float = 2e-4
    warmup_updates: int = 10
    save_every_updates: int = 16
    num_probes: int = 16

    @property
    def num_updates(self) -> int:
        return -(-self.num_lessons // self.lessons_per_update)

    def lr_at(self, update: int) -> float:
        """The learning rate of an update (first: 0): linear up in the warm-up, then linear down to a twentieth."""
        left = 1 - update / self.num_updates
        return self.peak_lr * min(1.0, (update + 1) / self.warmup_updates) * max(left, 0.05)

    def batch(self, book: LessonBook, update: int) -> list[TokenLesson]:
        """The lessons of an update."""
        first = update * self.lessons_per_update
        numbers = range(first, min(first + self.lessons_per_update, self.num_lessons))
        return [book.lesson(number) for number in numbers]


class Imitated(msgspec.Struct, frozen=True, kw_only=True):
    """The quality of a model's predictions of the teacher's text, in lessons that it was not trained on."""

    loss: float  # nats per token
    right_share: float  # share of the tokens that greedy decoding would have chosen


def imitate(model: Path, out: Path, settings: Imitation) -> None:
    """Train the model in `model` and write the result to `out`, completely or not at all. A complete directory is kept.

    Raises ValueError for a directory without a model, and for a saved state with other settings.
    """
    if (out / "config.json").exists():
        print(f"{out} is complete", flush=True)
        return
    if settings.num_lessons < 1:
        raise ValueError(f"--lessons is {settings.num_lessons}; it must be 1 or more")
    if not (model / "config.json").is_file():
        raise ValueError(f"--model {model} holds no config.json: give a Hugging Face directory")
    run = _Run(model, out.with_name(f"{out.name}.partial"), settings)
    run.train()
    run.finish(out)


class _Run:
    """One command: the model, its optimizer, and the directory of its state."""

    def __init__(self, model: Path, partial: Path, settings: Imitation) -> None:
        import torch
        from transformers import LlamaForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._source, self._partial, self._settings = model, partial, settings
        self._book = LessonBook(model, seed=settings.seed)
        self._policy = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._policy.train()
        self._optimizer = torch.optim.AdamW(
            self._policy.parameters(), lr=settings.peak_lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._update = 0
        self._probes = [self._book.lesson(FIRST_PROBE + number) for number in range(settings.num_probes)]
        partial.mkdir(parents=True, exist_ok=True)
        self._restore()

    def train(self) -> None:
        """Makes the remaining updates, with a line every REPORT_S, and a measurement whenever the state is saved."""
        settings, began, reported_at = self._settings, time.monotonic(), 0.0
        first, num_tokens = self._update, 0
        if not first:
            self._say_measured()
        while self._update < settings.num_updates:
            lessons = settings.batch(self._book, self._update)
            loss = self._step(lessons, settings.lr_at(self._update))
            self._update += 1
            num_tokens += sum(len(lesson.ids) for lesson in lessons)
            spent_s = time.monotonic() - began
            if spent_s - reported_at >= REPORT_S:
                reported_at = spent_s
                left_s = spent_s / (self._update - first) * (settings.num_updates - self._update)
                self._say(f"loss {loss:.4f}, {num_tokens / spent_s:.0f} tokens/s, {left_s / 60:.0f} min left")
            if self._update % settings.save_every_updates == 0 or self._update == settings.num_updates:
                self._save()
                self._say_measured()

    def finish(self, out: Path) -> None:
        """Write the Hugging Face directory under its name, and remove the state."""
        finished = self._partial / "finished"
        shutil.rmtree(finished, ignore_errors=True)
        self._policy.generation_config.do_sample = True
        self._policy.save_pretrained(finished)
        for name in TOKENIZER_FILES:
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(self._source / name, finished / name)
        out.parent.mkdir(parents=True, exist_ok=True)
        os.replace(finished, out)
        shutil.rmtree(self._partial)
        print(f"the policy that imitates the teacher is in {out}", flush=True)

    def _step(self, lessons: Sequence[TokenLesson], lr: float) -> float:
        import torch

        self._policy.zero_grad()
        num_replied = sum(sum(lesson.is_reply) for lesson in lessons)
        loss = 0.0
        for ids, targets in _passes(lessons):
            part, _ = _errors(self._policy, ids, targets)
            (part / num_replied).backward()
            loss += float(part.detach()) / num_replied
        torch.nn.utils.clip_grad_norm_(self._policy.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        return loss

    def _say_measured(self) -> None:
        seen = measure(self._policy, self._probes)
        self._say(f"on other lessons: loss {seen.loss:.4f}, {seen.right_share:.1%} of the tokens right")

    def _say(self, text: str) -> None:
        print(f"update {self._update}/{self._settings.num_updates}: {text}", flush=True)

    @property
    def _state(self) -> Path:
        return self._partial / "state.pt"

    def _save(self) -> None:
        """Saves the state completely or not at all: after a kill, the previous state is still there."""
        import torch

        written = self._state.with_suffix(".new")
        torch.save(
            {
                "update": self._update,
                "settings": msgspec.json.encode(self._settings),
                "model": self._policy.state_dict(),
                "optimizer": self._optimizer.state_dict(),
            },
            written,
        )
        os.replace(written, self._state)

    def _restore(self) -> None:
        import torch

        if not self._state.exists():
            return
        state = torch.load(self._state, weights_only=True)
        if state["settings"] != msgspec.json.encode(self._settings):
            raise ValueError(
                f"{self._partial} is of a command with other settings: repeat that, or remove it"
            )
        self._policy.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._update = state["update"]
        self._say("goes on from here")


def measure(policy: "LlamaForCausalLM", lessons: Sequence[TokenLesson]) -> Imitated:
    """The quality of `policy`'s predictions of the replies in these lessons."""
    import torch

    loss, num_right, num_tokens = 0.0, 0, 0
    with torch.no_grad():
        for ids, targets in _passes(lessons):
            part, right = _errors(policy, ids, targets)
            loss, num_right = loss + float(part), num_right + right
            num_tokens += int((targets >= 0).sum())
    return Imitated(loss=loss / num_tokens, right_share=num_right / num_tokens)


def _errors(policy: "LlamaForCausalLM", ids: "Tensor", targets: "Tensor") -> "tuple[Tensor, int]":
    """The summed cross-entropy of the targets, and the number of targets that are the most probable token.

    Logits are computed for targets only.
    """
    import torch

    counted = targets >= 0
    with torch.autocast("cpu", torch.bfloat16, enabled=_multiplies_bf16()):
        hidden = policy.model(input_ids=ids).last_hidden_state
        logits = policy.lm_head(hidden[counted]).float()
    loss = torch.nn.functional.cross_entropy(logits, targets[counted], reduction="sum")
    return loss, int((logits.detach().argmax(dim=-1) == targets[counted]).sum())


@functools.cache
def _multiplies_bf16() -> bool:
    """Whether this processor has instructions for matrix products in bfloat16, which are about five times as fast as in fp32.

    Other processors emulate them.
    """
    import torch

    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _passes(lessons: Sequence[TokenLesson]) -> "Iterator[tuple[Tensor, Tensor]]":
    """Batches of lessons of similar length, with at most PASS_TOKENS padded tokens each, unless one lesson is longer."""
    chosen: list[TokenLesson] = []
    for lesson in sorted(lessons, key=lambda one: len(one.ids)):
        if chosen and (len(chosen) + 1) * len(lesson.ids) > PASS_TOKENS:
            yield _padded(chosen)
            chosen = []
        chosen.append(lesson)
    if chosen:
        yield _padded(chosen)


def _padded(lessons: Sequence[TokenLesson]) -> "tuple[Tensor, Tensor]":
    """Inputs, padded at the end, and the targets that the teacher writes; -1 at other positions."""
    import torch

    width = max(len(lesson.ids) for lesson in lessons)
    ids = torch.zeros((len(lessons), width - 1), dtype=torch.int64)
    targets = torch.full((len(lessons), width - 1), -1)
    for row, lesson in enumerate(lessons):
        end = len(lesson.ids) - 1
        ids[row, :end] = torch.tensor(lesson.ids[:-1])
        told = torch.tensor(lesson.ids[1:])
        targets[row, :end] = torch.where(torch.tensor(lesson.is_reply[1:]), told, -1)
    return ids, targets
