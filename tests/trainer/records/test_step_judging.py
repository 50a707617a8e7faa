"""What judging did to the steps of a run, added up."""

import pytest
from msgspec.structs import replace

from tests.trainer.records.test_console import JUDGED
from trainer.report.summary import summed


def test_steps_are_weighted_with_what_their_means_were_taken_over() -> None:
    other = replace(
        JUDGED,
        num_judged=2,
        num_scored=1,
        num_unjudged=6,
        num_replies=120,
        num_tokens=800,
        score_mean=-0.55,
        outcome_size=0.1,
    )
    found = summed([JUDGED, other])
    assert found is not None
    assert (found.num_judged, found.num_scored, found.num_unjudged) == (9, 7, 7)
    assert (found.num_scored_replies, found.num_replies, found.num_tokens) == (60, 160, 1200)
    assert found.score_mean == pytest.approx((6 * 0.25 - 0.55) / 7)
    assert found.outcome_size == pytest.approx((400 * 0.5 + 800 * 0.1) / 1200)


def test_a_step_without_a_score_has_no_mean_and_lowers_none() -> None:
    silent = replace(JUDGED, num_judged=0, num_scored=0, num_scored_replies=0, score_mean=None)
    assert summed([silent, JUDGED]) is not None
    assert getattr(summed([silent, JUDGED]), "score_mean", None) == 0.25
    assert "mean score" not in silent.sentence
    assert summed([]) is None
