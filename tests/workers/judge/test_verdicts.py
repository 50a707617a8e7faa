r"""The last \boxed{+1} or \boxed{-1} of a reply is its vote; anything else abstains."""

import pytest

from workers.judge.votes import vote_value

VOTES = {
    r"good. \boxed{+1}": 1.0,
    r"\boxed{1}": 1.0,
    r"\boxed{-1}": -1.0,
    r"$\boxed{ -1 }$.": -1.0,
    r"not \boxed{+1}, so \boxed{-1}": -1.0,
    r"\boxed{-1}, no: \boxed{+1}, done": 1.0,
    "": None,
    "no box": None,
    r"\boxed{0}": None,
    r"\boxed{+2}": None,
    r"\boxed{0.5}": None,
    r"\boxed{good}": None,
    r"\boxed{}": None,
    r"\boxed{+1": None,
    r"\boxed+1}": None,
    r"\boxed{\text{+1}}": None,
    r"\boxed{-1} or \boxed{?}": None,
    r"\boxed{+1} and \boxed": None,
}


@pytest.mark.parametrize(("content", "value"), VOTES.items())
def test_the_last_box_is_the_vote(content: str, value: float | None) -> None:
    assert vote_value(content) == value


def test_a_reply_of_a_million_boxes_is_read_in_one_pass() -> None:
    assert vote_value("\\boxed{" * 1_000_000 + "-1}") == -1.0
