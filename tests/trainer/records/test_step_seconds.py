"""Where the time of a run's steps went."""

import msgspec
import pytest

from trainer.records.journal import StepRow
from trainer.records.step_seconds import PARTS, lines_of, step_seconds


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


def test_the_parts_of_all_steps_add_up_to_their_wall_time() -> None:
    assert {*PARTS} < {*StepRow.__struct_fields__}
    rows = [
        row(1, wall_s=10.0, wait_s=4.0, forward_s=2.0, backward_s=4.0, train_s=6.0, num_sample_tokens=600),
        row(2, wall_s=30.0, wait_s=18.0, export_s=2.0, other_s=10.0, train_s=4.0, num_sample_tokens=400),
    ]
    found = step_seconds(rows)
    assert found.wall_s == sum(found.parts_s.values()) == 40
    assert (found.parts_s["wait"], found.tokens_per_s, found.utilisation) == (22, 100, None)
    assert next(lines_of(found)).startswith("40.0 s: wait 55.0%, forward 5.0%, backward 10.0%")
    known = step_seconds(
        [row(1, wall_s=1.0, train_s=1.0, utilisation=0.4), row(2, wall_s=3.0, train_s=3.0, utilisation=0.2)]
    )
    assert known.utilisation == pytest.approx(0.25)


def test_older_journals_say_nothing_of_it() -> None:
    assert list(lines_of(step_seconds([row(1, wait_s=3.0, train_s=1.0)]))) == []
