"""What is to be trained is what the engine sampled, or it is rejected."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from msgspec.structs import replace as with_fields

from pipeline.message import pack_float32s, pack_int32s
from tests.trainer.trajectories import trajectory, turn
from trainer.batching.batch import Sample
from trainer.batching.samples import AlteredReply, check_provenance, samples_of

TURNS = (turn([1, 2], [3, 4], kept=0), turn([5], [6], kept=4), turn([9], [7], kept=2))


def made() -> tuple[Sample, ...]:
    return samples_of(trajectory(*TURNS), vocab_size=100, max_tokens=100)


def with_token(sample: Sample, place: int, token: int) -> Sample:
    tokens_T = sample.tokens_T.copy()
    tokens_T[place] = token
    return replace(sample, tokens_T=tokens_T)


def with_logprob(sample: Sample, place: int, logprob: float) -> Sample:
    logprobs_T = sample.behaviour_logprobs_T.copy()
    logprobs_T[place] = logprob
    return replace(sample, behaviour_logprobs_T=logprobs_T)


def training_less(sample: Sample) -> Sample:
    trained_T = sample.trained_T.copy()
    trained_T[-1] = False
    return replace(sample, trained_T=trained_T)


def test_samples_of_a_cut_context_are_proved_reply_by_reply() -> None:
    first, second = made()
    check_provenance((first, second))
    assert [(reply.turn, reply.start, reply.end) for reply in (*first.replies, *second.replies)] == [
        (0, 2, 4),
        (1, 5, 6),
        (2, 3, 4),
    ]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda sample: with_token(sample, 3, 9), "turn 0 is not what the engine sampled"),
        (lambda sample: with_token(sample, 1, 9), "turn 0 is not what the engine sampled"),
        (lambda sample: with_token(sample, 4, 9), "turn 1 is not what the engine sampled"),
        (lambda sample: with_logprob(sample, 5, -0.50000006), "turn 1 is not what the engine sampled"),
        (lambda sample: replace(sample, replies=sample.replies[1:]), "trains other tokens"),
        (lambda sample: replace(sample, replies=sample.replies[:1]), "trains other tokens"),
        (training_less, "trains other tokens"),
        (
            lambda sample: replace(sample, replies=(replace(sample.replies[0], digest=b""),)),
            "turn 0 has no digest: its worker is older",
        ),
    ],
)
def test_a_sample_that_differs_from_what_was_sampled_is_rejected(
    change: Callable[[Sample], Sample], complaint: str
) -> None:
    first, _ = made()
    with pytest.raises(AlteredReply, match=complaint):
        check_provenance([change(first)])


@pytest.mark.parametrize(
    "changes",
    [
        {"sampled": pack_int32s([6])},
        {"fed": pack_int32s([1])},
        {"logprobs": pack_float32s([-0.25])},
        {"kept_tokens": 3},
    ],
)
def test_a_turn_changed_on_its_way_is_not_made_into_a_sample(changes: dict[str, object]) -> None:
    whole = trajectory(turn([1, 2], [3, 4], kept=0), turn([5], [7], kept=4))
    first, second = whole.turns
    altered = with_fields(whole, turns=(first, with_fields(second, **changes)))
    with pytest.raises(AlteredReply, match="turn 1 is not what the engine sampled"):
        samples_of(altered, vocab_size=100, max_tokens=100)


def test_the_first_reply_that_differs_is_named_also_behind_sound_samples() -> None:
    first, second = made()
    with pytest.raises(AlteredReply, match="turn 2"):
        check_provenance((first, with_token(second, 0, 8)))
