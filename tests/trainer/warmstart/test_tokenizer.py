"""The tokenizer and the chat template: exact, whole words, append-only, and the same through transformers."""

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from trainer.demo.family import LOCALS, NOUNS, VERBS, make_task
from trainer.demo.lessons import EpisodeMessage, Templates, teach
from trainer.warmstart.scratch import build_tokenizer, padded_vocabulary_size, save_tokenizer


@pytest.fixture(scope="module")
def lesson() -> list[EpisodeMessage]:
    return teach(make_task(0, "warmstart", 1), random.Random(0), Templates()).messages


@pytest.mark.parametrize(
    "text", ["héllo ✓ wörld\r\n\t x", "def merge_tax(a, b):\n    return 123456", "\x00\x7f"]
)
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_word_of_the_family_is_one_token() -> None:
    tokenizer = build_tokenizer()
    for word in VERBS + NOUNS + LOCALS:
        assert len(tokenizer.encode(word).ids) == 1, word
    assert padded_vocabulary_size(tokenizer) % 64 == 0


@pytest.fixture
def loaded(tmp_path: Path) -> Any:
    """The tokenizer as transformers reads it from a directory."""
    save_tokenizer(build_tokenizer(), tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


def chat_of(lesson: list[EpisodeMessage]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in lesson]


def test_transformers_reads_the_same_tokens_and_template(loaded: Any, lesson: list[EpisodeMessage]) -> None:
    tokenizer, chat = build_tokenizer(), chat_of(lesson)
    text = "".join(message.rendered() for message in lesson)
    assert loaded.apply_chat_template(chat, tokenize=False) == text
    assert loaded.encode(text, add_special_tokens=False) == tokenizer.encode(text).ids
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.eos_token == "<|end|>"


def test_a_longer_conversation_starts_with_the_shorter_ones_tokens(
    loaded: Any, lesson: list[EpisodeMessage]
) -> None:
    tokenizer, chat = build_tokenizer(), chat_of(lesson)
    turns = [n for n, message in enumerate(lesson) if message.role == "assistant"]
    whole = tokenizer.encode(loaded.apply_chat_template(chat, tokenize=False)).ids
    for turn in turns:
        prompt = loaded.apply_chat_template(chat[:turn], tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(prompt).ids
        assert whole[: len(ids)] == ids
