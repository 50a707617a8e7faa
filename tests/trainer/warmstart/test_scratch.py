"""The warm start: what counts in its loss, and that a seed fixes its result."""

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from trainer.demo.lessons import EpisodeMessage
from trainer.warmstart.scratch import (
    WarmStart,
    build_policy,
    build_tokenizer,
    encode,
    repeat_batch,
    save_policy,
    train_policy,
)

BRIEF = WarmStart(
    num_lessons=512, num_repeat_steps=2, batch_tokens=8_192, hidden_size=32, num_layers=1, mlp_size=32
)


def trained(directory: Path) -> LlamaForCausalLM:
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    policy = build_policy(tokenizer, BRIEF)
    train_policy(policy, tokenizer, BRIEF, 0)
    save_policy(policy, tokenizer, directory)
    return LlamaForCausalLM.from_pretrained(directory)


def test_only_what_the_assistant_writes_counts_in_full() -> None:
    tokenizer = build_tokenizer()
    ids, weights = encode(tokenizer, [EpisodeMessage("user", "4"), EpisodeMessage("assistant", "done.")], 0.1)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|user|>4<|end|><|assistant|>done.<|end|>"
    assert weights == [0.1, 0.1, 0.1, 0.1, 1.0, 1.0]


def test_a_repeat_counts_from_its_second_round() -> None:
    batch = repeat_batch(random.Random(0), WarmStart(), range(5, 500))
    for ids, weights in zip(batch.ids, batch.weights, strict=True):
        length = weights.index(1.0)
        assert ids[length : 2 * length] == ids[:length][: len(ids) - length]
        assert weights == [0.0] * length + [1.0] * (len(ids) - length)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_policy(tmp_path: Path) -> None:
    first, second = trained(tmp_path / "a"), trained(tmp_path / "b")
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
