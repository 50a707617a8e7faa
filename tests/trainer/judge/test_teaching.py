"""What the report of a teacher's run says: how far the policy is from it, and whether that shrinks."""

import pytest
from msgspec.structs import replace

from pipeline.intervals import t_mean
from pipeline.journal.rows import JudgementRow
from tests.trainer.judge.journals import judgement
from trainer.judge import judge_quality, short_lines


def taught(number: int, reverse_kl: float, num_tokens: int) -> JudgementRow:
    """A rollout of a group of two, each group sampled by weights of its own."""
    row = judgement(f"r{number}", None, group=number // 2, version=number // 2)
    return replace(row, reverse_kl_sum=reverse_kl * num_tokens, num_taught_tokens=num_tokens)


def test_the_reverse_kl_of_a_run_is_the_mean_over_tokens_with_groups_as_draws() -> None:
    values = [0.5, 0.7, 0.4, 0.2, 0.1, 0.1]
    rows = [taught(number, value, 2 + number) for number, value in enumerate(values)]
    late = judgement("r9", None, group=9, fate="late")
    found = judge_quality([*rows[::-1], late], [])
    assert found is not None
    assert found.teaching is not None
    expected = t_mean([[values[g]] * (2 + g) + [values[g + 1]] * (3 + g) for g in (0, 2, 4)])
    assert expected is not None
    assert found.teaching.reverse_kl.value == pytest.approx(expected.value)
    assert found.teaching.reverse_kl.low == pytest.approx(expected.low)
    assert (found.teaching.num_rollouts, found.teaching.num_tokens) == (6, sum(range(2, 8)))
    first, last = found.teaching.first_third, found.teaching.last_third
    assert first is not None
    assert last is not None
    assert (first.value, last.value) == (pytest.approx(0.62), pytest.approx(0.1))
    names = [line[:22].strip() for line in short_lines(found)]
    assert names == ["judge requests", "reverse KL", "reverse KL, drift"], "nothing is said of scores"


def test_a_judge_that_gives_scores_teaches_nothing() -> None:
    found = judge_quality([judgement("r0", 1.0)], [])
    assert found is not None
    assert found.teaching is None
