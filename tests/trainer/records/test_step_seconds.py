"""How fast the learner was."""

import msgspec
import pytest

from pipeline.journal.rows import PARTS, StepRow
from trainer.report.__main__ import speed_line
from trainer.report.summary import learner_speed


def row(number: int, **fields: float | None) -> StepRow:
    whole = {
        "step": number,
        "version": number,
        "loss": 0.0,
        "grad_norm": 1.0,
        "lr": 1e-6,
        "reward_mean": 0.5,
        "num_trajectories": 1,
        "request_ids": (),
        "num_trained_tokens": 10,
        "num_unique_sampled_tokens": 10,
    }
    return msgspec.convert(whole | fields, StepRow)


def test_the_speed_of_the_learner_is_over_the_time_that_it_trained() -> None:
    assert {*PARTS} < {*StepRow.__struct_fields__}
    rows = [
        row(1, wall_s=10.0, wait_s=4.0, forward_s=2.0, backward_s=4.0, train_s=6.0, num_sample_tokens=600),
        row(2, wall_s=30.0, wait_s=18.0, export_s=2.0, other_s=10.0, train_s=4.0, num_sample_tokens=400),
    ]
    found = learner_speed(rows)
    assert (found.tokens_per_s, found.utilisation) == (100, None)
    known = learner_speed(
        [row(1, wall_s=1.0, train_s=1.0, utilisation=0.4), row(2, wall_s=3.0, train_s=3.0, utilisation=0.2)]
    )
    assert known.utilisation == pytest.approx(0.25)
    assert speed_line(known).endswith(", 25.0% of the devices' peak")


def test_older_journals_say_nothing_of_it() -> None:
    assert learner_speed([row(1, wait_s=3.0, train_s=1.0)]).tokens_per_s == 0
