"""What a judge is worth: computed by hand, and when there is a warning."""

import random

import pytest
from msgspec.structs import replace

from tests.trainer.judge.journals import episode, judged_run, judgement
from trainer.judge import JudgeQuality, judge_quality


def quality(rollouts: list[tuple[float, float]], *, versions: int = 1) -> JudgeQuality:
    found = judge_quality(*judged_run(rollouts, versions=versions))
    assert found is not None
    return found


def test_a_run_without_a_judge_has_no_quality() -> None:
    assert judge_quality([], [episode("r0", 1.0)]) is None


def test_requests_turns_and_votes_are_counted() -> None:
    found = judge_quality(
        [
            judgement("r0", 1.0, None, 0.5, votes=(1.0, None), waited_s=1.0),
            judgement("r1", -1.0, fate="late", votes=(-1.0, -1.0), waited_s=3.0),
            judgement("r2", fate="failed", error="engine: connection refused"),
            judgement("r3", fate="unneeded"),
        ],
        [episode("r0", 1.0), episode("r1", 0.0), episode("r2", 1.0)],
    )
    assert found is not None
    assert found.fates == {"joined": 1, "late": 1, "failed": 1, "unneeded": 1}
    assert found.errors == {"engine: connection refused": 1}
    assert found.judges == {"rule:commands": 2}
    assert (found.waited_s_mean, found.waited_s_max) == (2.0, 3.0), "of those that arrived"
    assert (found.num_turns, found.num_scored_turns, found.unscored) == (4, 3, {"no_valid_vote": 1})
    assert (found.num_votes, found.num_valid_votes) == (8, 5)
    assert (found.agreement.num_turns, found.agreement.pairs) == (1, 1.0)
    assert found.num_rollouts == 2, "also the one that came too late to be trained with"
    assert found.auc is not None
    assert found.auc.value == 1.0


def test_a_rollout_without_a_reward_or_without_a_score_is_compared_with_nothing() -> None:
    found = judge_quality(
        [judgement("r0", 1.0), judgement("r1", None), judgement("r2", 0.5)],
        [episode("r0", None), episode("r1", 1.0), episode("r2", 1.0)],
    )
    assert found is not None
    assert (found.num_rollouts, found.auc) == (1, None)
    assert [one.num for one in found.reliability] == [1]


def test_reliability_is_success_by_score() -> None:
    found = quality([(-1.0, 0.0), (-0.9, 0.0), (0.1, 1.0), (0.0, 0.0), (1.0, 1.0), (0.9, 1.0)])
    assert [(one.label, one.num, one.success.value) for one in found.reliability] == [
        ("-1.0 to -0.6", 2, 0.0),
        ("-0.2 to +0.2", 2, 0.5),
        ("+0.6 to +1.0", 2, 1.0),
    ]
    assert found.reliability[1].score_mean == pytest.approx(0.05)


def test_scores_are_shown_by_turn_and_by_length() -> None:
    found = judge_quality(
        [judgement("r0", 1.0, 0.5, 0.0, -0.5), judgement("r1", -1.0, None)],
        [episode("r0", 1.0), episode("r1", 0.0)],
    )
    assert found is not None
    assert [(one.label, one.num, one.score_mean) for one in found.by_turn] == [
        ("0", 2, 0.0),
        ("1", 1, 0.5),
        ("2-3", 2, -0.25),
    ]
    assert [(one.label, one.num, one.score_mean) for one in found.by_length] == [
        ("2-3", 1, -1.0),
        ("4-7", 1, 0.25),
    ]


def test_versions_share_a_line_when_there_are_many_and_have_an_auc_each() -> None:
    rollouts = [(1.0, 1.0), (-1.0, 0.0)] * 8 + [(-1.0, 1.0), (1.0, 0.0)] * 8
    found = quality(rollouts, versions=16)
    assert [one.label for one in found.by_version][:2] == ["0-1", "2-3"]
    assert [one.auc for one in found.by_version] == [1.0] * 4 + [0.0] * 4


def test_a_judge_that_does_not_tell_solved_from_unsolved_rollouts_brings_about_a_warning() -> None:
    draw = random.Random(5)
    by_chance = quality([(draw.uniform(-1, 1), float(draw.random() < 0.5)) for _ in range(200)])
    assert len(by_chance.warnings) == 1
    assert "AUC" in by_chance.warnings[0]
    assert quality([(reward - 0.5, reward) for reward in [0.0, 1.0] * 100]).warnings == ()


def test_a_judge_most_of_whose_votes_are_invalid_brings_about_a_warning() -> None:
    def warnings(votes: tuple[float | None, ...]) -> tuple[str, ...]:
        found = judge_quality([judgement(f"r{n}", None, votes=votes) for n in range(10)], [])
        assert found is not None
        return found.warnings

    assert warnings((None, 1.0, 1.0, -1.0)) == ()
    assert warnings((None, 1.0)) == (), "too few votes to tell"
    (warning,) = warnings((None, None, None, 1.0))
    assert "10 of 40 votes are valid" in warning


def test_few_rollouts_or_few_of_one_kind_bring_about_none() -> None:
    assert quality([(-1.0, 1.0), (1.0, 0.0)] * 10).warnings == ()
    assert quality([(-1.0, 1.0)] * 5 + [(1.0, 0.0)] * 95).warnings == ()


def test_scores_that_rise_while_success_falls_bring_about_a_warning() -> None:
    draw = random.Random(7)
    rollouts: list[tuple[float, float]] = []
    for number in range(300):
        reward = float(draw.random() < 0.8 - 0.6 * number / 300)
        # It tells right from wrong all along, and is pleased more and more.
        rollouts.append((min(1.0, 0.8 * number / 300 - 0.5 + 0.5 * reward + draw.uniform(-0.1, 0.1)), reward))
    gamed = quality(rollouts, versions=30)
    assert len(gamed.warnings) == 1
    assert "gaming" in gamed.warnings[0]
    honest = quality([(score, 1 - reward) for score, reward in rollouts], versions=30)
    assert [text for text in honest.warnings if "gaming" in text] == []


def test_there_is_no_trend_within_one_weight_version() -> None:
    assert quality([(1.0, 0.0)] * 20).trend is None
    judgements, episodes = judged_run([(-0.5, 1.0), (0.5, 0.0)] * 9, versions=3)
    found = judge_quality(judgements, [replace(row, version_first=None) for row in episodes])
    assert found is not None
    assert found.trend is None
