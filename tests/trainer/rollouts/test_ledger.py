"""The ledger: what is settled, and what of it a checkpoint holds."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.journal.reading import read
from pipeline.journal.rows import EpisodeRow
from tests.trainer.trajectories import head, member
from trainer.records.journal_writer import Journal
from trainer.rollouts.groups import Group
from trainer.rollouts.ledger import Ledger, LedgerState, SinceStep, decode_state, encode_state


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path) as opened:
        yield opened


def group(cursor: int) -> Group:
    members = {n: member(cursor, n, group_size=2, reward=float(n)) for n in range(2)}
    return Group(cursor, 2, 0, f"t{cursor}", members)


def test_a_settled_trajectory_waits_for_the_checkpoint_that_holds_it(journal: Journal) -> None:
    ledger = Ledger(journal)
    ledger.close_group(group(0), {0: "trained", 1: "trained"})
    first = ledger.state(step=1, version=0, cursor=1)
    ledger.close_group(group(1), {0: "zero_variance", 1: "zero_variance"})
    assert first.pending == (("0-0", "r0.0"), ("0-1", "r0.1"))
    ledger.acknowledged(first)
    second = ledger.state(step=2, version=1, cursor=2)
    assert second.pending == (("1-0", "r1.0"), ("1-1", "r1.1"))
    assert [row.fate for row in read(journal.directory, EpisodeRow)] == ["trained"] * 2 + [
        "zero_variance"
    ] * 2


def test_every_delivery_of_one_trajectory_is_acknowledged(journal: Journal) -> None:
    ledger = Ledger(journal)
    ledger.settle(head(0, 0), ["5-0", "9-0"], "trained", cursor=0)
    assert ledger.state(step=1, version=0, cursor=1).pending == (("5-0", "r0.0"), ("9-0", "r0.0"))


@given(st.lists(st.integers(0, 30), unique=True))
def test_closed_groups_survive_the_checkpoint_whatever_order_they_closed_in(
    tmp_path_factory: pytest.TempPathFactory, cursors: list[int]
) -> None:
    with Journal(tmp_path_factory.mktemp("journal")) as journal:
        ledger = Ledger(journal)
        for cursor in cursors:
            ledger.close(cursor)
        state = decode_state(encode_state(ledger.state(step=0, version=0, cursor=31)))
        resumed = Ledger(journal, state)
    assert [cursor for cursor in range(31) if resumed.is_closed(cursor)] == sorted(cursors)
    assert resumed.open_cursors(31) == sorted(set(range(31)) - set(cursors))
    assert resumed.end == max(cursors, default=-1) + 1


def test_dropped_groups_are_counted_until_a_step_reports_them(journal: Journal) -> None:
    ledger = Ledger(journal)
    same = Group(0, 2, 0, "t0", {n: member(0, n, group_size=2, reward=1.0) for n in range(2)})
    ledger.drop_group(same, "zero_variance")
    assert ledger.since_step == SinceStep(zero_variance=1, reward_sum=2.0, num_rewards=2)
    assert ledger.groups_without_signal == 1
    state = ledger.state(step=0, version=0, cursor=1)
    assert Ledger(journal, state).since_step == ledger.since_step


def test_a_blank_state_is_a_run_that_has_not_begun() -> None:
    state = LedgerState()
    assert (state.step, state.version, state.cursor) == (0, -1, 0)
