"""The teacher's episodes as a pretrained model's tokens: fed and sampled as in a rollout, so that a policy which imitates them meets
in training the very ids that it has learned on.
"""

import random
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipeline.chat import ChatMessage
from pipeline.chat_template import ChatTemplate
from pipeline.errors import RequestError
from pipeline.tokenizer import read_bundle
from trainer.demo.conversation import EpisodeMessage, Templates
from trainer.demo.family import make_task
from trainer.demo.teacher import Habits, teach

if TYPE_CHECKING:
    pass


class TokenLesson(msgspec.Struct, frozen=True):
    """One episode: its token ids, and which of them the teacher writes."""

    ids: list[int]
    is_reply: list[bool]


class LessonBook:
    """Lessons by number, the same whenever and in whatever order they are asked for."""

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

    def lesson(self, number: int, habits: Habits) -> TokenLesson:
        """The episode of a teacher with these habits on the task of that number."""
        rng = random.Random(f"{self._seed}/{number}")
        messages = teach(make_task(self._seed, "warmstart", number), rng, self._texts, habits).messages
        ids = self._encode(self._template.render(_chat(messages[:2])))
        is_reply = [False] * len(ids)
        for place in range(2, len(messages), 2):
            reply = [*self._encode(messages[place].content), self._end_id]
            told = messages[place + 1 : place + 2]
            # The reply has the first token of what stands behind it: the end of its turn.
            fed = self._encode(self._template.after_reply(_chat(told)))[1:] if told else []
            ids += reply + fed
            is_reply += [True] * len(reply) + [False] * len(fed)
        return TokenLesson(ids, is_reply)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _chat(messages: list[EpisodeMessage]) -> list[ChatMessage]:
    return [ChatMessage(message.role, message.content) for message in messages]
