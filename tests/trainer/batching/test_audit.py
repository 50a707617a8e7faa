"""The audit takes a fair share of a step, and says where the gap is."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from pipeline.journal.rows import Drift
from tests.trainer.learner.tiny import make_batch, make_samples
from trainer.batching.audit import Gap, drawn, drift_by_kind, drift_by_position, drift_by_version, measure_gap
from trainer.batching.batch import ReplyPart, Sample, SampledReply

LENGTHS = tuple(range(10, 60))


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_the_share_is_reached_and_exceeded_by_less_than_one_sample(share: float) -> None:
    batch = make_batch(make_samples(LENGTHS))
    part = drawn(batch, share, seed=1)
    wanted = share * batch.num_trained_tokens
    smallest = min(sample.num_trained_tokens for sample in part.samples)
    assert part.num_trained_tokens >= wanted
    assert part.num_trained_tokens - max(s.num_trained_tokens for s in part.samples) < wanted
    assert smallest > 0


def test_all_of_it_or_nothing_can_be_drawn() -> None:
    batch = make_batch(make_samples(LENGTHS))
    assert drawn(batch, 1.0, seed=1).num_trained_tokens == batch.num_trained_tokens
    assert drawn(batch, 0.0, seed=1).samples == ()


def test_the_draw_depends_on_seed_and_step_and_not_on_the_order_of_arrival() -> None:
    samples = make_samples(LENGTHS)
    one = drawn(make_batch(samples), 0.2, seed=1)
    again = drawn(make_batch(samples[::-1]), 0.2, seed=1)
    assert [sample.request_id for sample in one.samples] == [sample.request_id for sample in again.samples]
    others = [drawn(make_batch(samples), 0.2, seed=2), drawn(make_batch(samples, step=2), 0.2, seed=1)]
    for other in others:
        assert {s.request_id for s in other.samples} != {s.request_id for s in one.samples}


def test_over_many_steps_every_token_is_drawn_about_as_often() -> None:
    samples = make_samples((5, 10, 20, 40))
    counts = dict.fromkeys((sample.request_id for sample in samples), 0)
    for step in range(2000):
        for sample in drawn(make_batch(samples, step=step), 0.01, seed=0).samples:
            counts[sample.request_id] += 1
    assert all(count == pytest.approx(500, rel=0.2) for count in counts.values())


def gap(differences: list[float], *, versions: list[int], positions: list[int]) -> Gap:
    return Gap(
        differences_N=np.array(differences, np.float32),
        versions_N=np.array(versions, np.int32),
        samples_N=np.zeros(len(differences), np.int32),
        positions_N=np.array(positions, np.int32),
        num_unmeasured=0,
        num_positions=0,
    )


def test_drift_is_told_apart_by_version_and_by_position() -> None:
    found = gap([0.5, -1.0, 0.25], versions=[3, 4, 4], positions=[1, 255, 1024])
    assert drift_by_version(found) == {
        "3": Drift(num_tokens=1, mean=0.5, max=0.5, bias=0.5),
        "4": Drift(num_tokens=2, mean=0.625, max=1.0, bias=-0.375),
    }
    assert drift_by_position(found) == {
        "0-255": Drift(num_tokens=2, mean=0.75, max=1.0, bias=-0.25),
        "1024-2047": Drift(num_tokens=1, mean=0.25, max=0.25, bias=0.25),
    }


@pytest.mark.parametrize(
    ("position", "span"),
    [(0, "0-255"), (256, "256-511"), (511, "256-511"), (512, "512-1023"), (32767, "16384-32767")],
)
def test_positions_are_told_apart_by_powers_of_two(position: int, span: str) -> None:
    assert list(drift_by_position(gap([0.1], versions=[0], positions=[position]))) == [span]


def too_sure_of_the_end(version: int, samples: Sequence[Sample], _: float) -> list[npt.NDArray[np.float32]]:
    """A learner that agrees with the engine but for the last token of each sample."""
    answers = [sample.behaviour_logprobs_T.copy() for sample in samples]
    for answer in answers:
        answer[-1] += 0.5
    return answers


def test_a_gap_in_one_kind_of_token_is_found_there() -> None:
    (sample,) = make_samples((6,))
    trained_T = np.array([False, False, True, True, True, True])
    reply = SampledReply(0, 2, 6, b"", (ReplyPart("thought", 1), ReplyPart("text", 3)), is_ended=True)
    sample = replace(
        sample, trained_T=trained_T, versions_T=np.where(trained_T, 0, -1).astype(np.int32), replies=(reply,)
    )
    batch = make_batch((sample,))
    found = drift_by_kind(measure_gap(batch, (0,), too_sure_of_the_end), batch, lambda ids: "x" * len(ids))
    assert {kind: (drift.num_tokens, drift.max) for kind, drift in found.items()} == {
        "thought": (1, 0.0),
        "text": (2, 0.0),
        "end": (1, 0.5),
    }
