"""Whatever becomes of an episode, its process reports a trajectory."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.scripted_fleet import played
from pipeline.frames import EpisodeReport, read_frame
from pipeline.request import Claim, RolloutRequest
from pipeline.trajectory import Failed, Trajectory, Turn, Usage
from tests.workers.agent.episode import claim
from workers.episodes import EpisodePlayer

TURN = Turn(kept_tokens=0, fed=b"", sampled=b"", logprobs=b"", versions=(), stop="stop", text="")
UNTELLABLE = {
    "half of a surrogate pair": replace(TURN, text="\ud800"),
    "a number of more than 64 bits": replace(TURN, usage=Usage(completion_tokens=2**70)),
    "a number that no count may have": replace(TURN, usage=Usage(completion_tokens=2**60)),
    "more than a body may hold": replace(TURN, text="x" * 2**20),
}


@dataclass(frozen=True, slots=True)
class Player(EpisodePlayer):
    """Ends each episode with `turn`, or with an error that is `turn`."""

    turn: Turn | Exception

    async def play(self, request: RolloutRequest) -> Trajectory:
        if isinstance(self.turn, Exception):
            raise self.turn
        whole = played(Claim(request=request, attempt=1, worker="w", claimed_at=1.0), 1.0)
        return replace(whole, turns=(self.turn,))


async def reported(turn: Turn | Exception) -> Trajectory | None:
    unused: Any = None
    player = Player(unused, unused, unused, "w", unused, turn)
    reader = asyncio.StreamReader()
    reader.feed_data(await player.frame(claim().request))
    report = await read_frame(reader, EpisodeReport)
    assert report is not None
    assert report.request_id == claim().request.id
    return report.trajectory


@pytest.mark.parametrize("turn", UNTELLABLE.values(), ids=list(UNTELLABLE))
async def test_a_trajectory_that_cannot_be_written_is_reported_as_a_failed_one(
    turn: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.message.MAX_BODY_BYTES", 2**20)
    trajectory = await reported(turn)
    assert trajectory is not None
    assert isinstance(trajectory.outcome, Failed)
    assert (trajectory.outcome.boundary, trajectory.reward) == ("worker", None)


async def test_any_error_is_reported_as_a_failed_trajectory() -> None:
    trajectory = await reported(KeyError("\ud800"))
    assert trajectory is not None
    assert isinstance(trajectory.outcome, Failed)
    assert trajectory.outcome.message.startswith("KeyError: ")


async def test_a_trajectory_that_can_be_written_is_reported_as_it_is() -> None:
    trajectory = await reported(replace(TURN, text="hello"))
    assert trajectory is not None
    assert [turn.text for turn in trajectory.turns] == ["hello"]
