from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.learner.tiny import make_batch, make_samples
from trainer.batching.batch import Batch, Sample
from trainer.feed import STOP, decode, encode


def assert_same(left: Sample, right: Sample) -> None:
    for name in ("request_id", "group_id", "branch"):
        assert getattr(left, name) == getattr(right, name)
    for name in ("tokens_T", "trained_T", "behaviour_logprobs_T", "advantages_T", "versions_T"):
        assert getattr(left, name).dtype == getattr(right, name).dtype
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))


def test_a_batch_reaches_the_other_ranks_as_it_was() -> None:
    batch = make_batch(make_samples(), step=9, temperature=0.7)
    name, (heard,) = decode(encode("step", batch))
    assert name == "step"
    assert isinstance(heard, Batch)
    assert (heard.step, heard.temperature, heard.request_ids) == (9, 0.7, batch.request_ids)
    for sent, received in zip(batch.samples, heard.samples, strict=True):
        assert_same(sent, received)


def test_the_experts_that_engines_reported_are_not_sent_to_every_rank() -> None:
    """They would be nearly all of what is sent: 384 bytes a token for Qwen3-30B-A3B."""
    plain = make_samples()
    reported = tuple(replace(one, routing=np.zeros((one.num_tokens - 1) * 384, np.uint8)) for one in plain)
    for name in ("step", "accumulate"):
        with_routing, without = encode(name, make_batch(reported)), encode(name, make_batch(plain))
        assert len(with_routing) - len(without) < 10 * len(plain)
    with_routing, without = encode("logprobs", reported, 1.0), encode("logprobs", plain, 1.0)
    assert len(with_routing) - len(without) < 10 * len(plain)
    _, (heard,) = decode(encode("step", make_batch(reported)))
    assert all(one.routing is not None for one in heard.samples), "they know that there are some"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("apply", [7]),
        ("snapshot", [3]),
        ("export", [Path("a/b")]),
        ("begin_save", [Path("c"), b"\x00\xff"]),
        ("finish_save", []),
        ("restore", [Path("d")]),
        (STOP, []),
    ],
)
def test_a_call_is_heard_as_it_was_made(name: str, arguments: list[object]) -> None:
    assert decode(encode(name, *arguments)) == (name, arguments)


def test_a_question_about_past_weights_is_heard_with_their_version() -> None:
    name, (version, samples, temperature) = decode(encode("logprobs_under", 4, make_samples((4,)), 1.0))
    assert (name, version, temperature) == ("logprobs_under", 4, 1.0)
    assert_same(samples[0], make_samples((4,))[0])


@pytest.mark.parametrize("name", ["dance", "_begin", "__init__", "versions_held"])
def test_what_is_no_method_of_the_learner_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"no method '{name}'"):
        decode(encode(name))


def test_a_call_with_other_arguments_than_the_method_takes_is_refused() -> None:
    for arguments in ((), (1, 2), ("3",)):
        with pytest.raises(ValueError, match=r"zip\(\)|Expected"):
            decode(encode("snapshot", *arguments))
