"""A token run is what an engine held: every turn of it saw all that lies before it in the run, and nothing else."""

from dataclasses import dataclass, field
from typing import Self

from hypothesis import given
from hypothesis import strategies as st

from pipeline.message import pack_int32s, unpack_int32s
from pipeline.trajectory import FIRST_IN_CONTEXT, Turn, runs_of
from tests.pipeline import samples


@dataclass
class Ids:
    ids: list[int] = field(default_factory=list[int])
    ends: dict[int, int] = field(default_factory=dict[int, int])  # by turn

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def prefix(self, num_tokens: int) -> Self:
        return type(self)(self.ids[:num_tokens])

    def extend(self, number: int, turn: Turn) -> None:
        self.ids += [*unpack_int32s(turn.fed), *unpack_int32s(turn.sampled)]
        self.ends[number] = len(self.ids)


@st.composite
def episodes(draw: st.DrawFn) -> tuple[list[Turn], list[list[int]]]:
    """Turns that follow any earlier turn and keep any part of its sequence, and the sequence of each. Each token is there once."""
    turns, sequences, num_drawn = list[Turn](), list[list[int]](), 0
    for number in range(draw(st.integers(1, 6))):
        after = draw(st.integers(FIRST_IN_CONTEXT, number - 1))
        before = sequences[after] if after != FIRST_IN_CONTEXT else []
        num_kept = draw(st.sampled_from([len(before), draw(st.integers(0, len(before)))]))
        fed, sampled = [num_drawn + 1], [num_drawn + 2, num_drawn + 3]
        num_drawn += 3
        sequences.append([*before[:num_kept], *fed, *sampled])
        turns.append(
            samples.turn(
                kept_tokens=num_kept, fed=pack_int32s(fed), sampled=pack_int32s(sampled), after=after
            )
        )
    return turns, sequences


@given(episodes())
def test_a_turn_ends_its_own_sequence_in_one_run_and_begins_one_only_where_there_is_none_to_continue(
    episode: tuple[list[Turn], list[list[int]]],
) -> None:
    turns, sequences = episode
    runs = runs_of(turns, Ids)
    held = [(number, run.ids[:end]) for run in runs for number, end in run.ends.items()]
    assert sorted(held) == list(enumerate(sequences))
    continued = set[int]()
    for number, turn in enumerate(turns):
        assert turn.after is not None
        kept_all = turn.after != FIRST_IN_CONTEXT and turn.kept_tokens == len(sequences[turn.after])
        continues = kept_all and turn.after not in continued
        continued |= {turn.after} if continues else set()
        assert any(min(run.ends) == number for run in runs) is not continues
