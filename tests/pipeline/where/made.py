"""Rows of a journal made for tests of where the time went."""

from typing import Any

from pipeline.journal.rows import EndRow, EpisodeRow, EpisodeStamps, FleetRow, StartRow, StepRow
from pipeline.trajectory import EpisodeSeconds


def start(at: float, **seconds: float) -> StartRow:
    return StartRow(step=0, at=at, seconds=seconds)


def step(number: int, at: float, *ids: str, began_at: float = 0.0, **seconds: Any) -> StepRow:
    """Its wall is the sum of the parts in `seconds`, but for what is no part."""
    row: dict[str, Any] = {
        "step": number,
        "version": number - 1,
        "loss": 0.0,
        "grad_norm": 1.0,
        "lr": 1e-5,
        "reward_mean": 0.5,
        "num_trajectories": len(ids),
        "request_ids": ids,
        "num_trained_tokens": 10,
        "num_unique_sampled_tokens": 10,
        "at": at,
        "began_at": began_at,
        "wall_s": sum(seconds.values()),
    }
    return StepRow(**(row | seconds))


def end(at: float, **seconds: float) -> EndRow:
    return EndRow(step=1, version=1, reason="finished", at=at, seconds=seconds)


def episode(request_id: str, **fields: Any) -> EpisodeRow:
    """A trained rollout that was enqueued at 100 and waited for everything there is."""
    row: dict[str, Any] = {
        "request_id": request_id,
        "group_id": "g0",
        "task_id": "task",
        "purpose": "train",
        "member": 0,
        "group_size": 1,
        "fate": "trained",
        "reward": 1.0,
        "enqueued_at": 100.0,
        "claimed_at": 101.0,
        "finished_at": 129.0,
        "at": 200.0,
        "stamps": EpisodeStamps(
            published_at=129.5, read_at=129.8, joined_at=130.0, closed_at=145.0, released_at=150.0
        ),
        "seconds": EpisodeSeconds(
            open_s=1.0,
            engine_wait_s=2.0,
            generate_s=3.0,
            command_s=4.0,
            close_s=5.0,
            grade_s=6.0,
            other_s=7.0,
        ),
    }
    return EpisodeRow(**(row | fields))


def fleet(**fields: Any) -> FleetRow:
    row: dict[str, Any] = {
        "span_s": 5.0,
        "num_workers": 2,
        "slots": 4,
        "running": 4,
        "paused": 0,
        "closed_by": "",
        "is_waiting": True,
        "at": 1.0,
    }
    return FleetRow(**(row | fields))
