"""A run's directory to look at, written as a trainer writes it, and the reply to a request."""

import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient
from msgspec import structs

from pipeline.chat import ChatMessage
from pipeline.journal.rows import FILES, StepJudging
from pipeline.message import pack_float32s
from pipeline.request import Claim
from pipeline.rollout_store.record import REASONS, StoredRollout, TrainedHead, TrainedTokens, TrainedTurn
from pipeline.trajectory import Trajectory, head_of
from tests.pipeline import samples
from tests.pipeline.journal_rows import made, write
from trainer.records.rollout_writer import RolloutWriter

NO_REDIS = "redis://127.0.0.1:1/0"
HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[2J\u202egnp.exe\x00"
Client = TestClient[web.Request, web.Application]
Serve = Callable[..., Awaitable[Client]]
"""Starts a server for directories of runs."""


def finished(request_id: str, *, reward: float, **fields: Any) -> Trajectory:
    """A trajectory whose every text is hostile."""
    request = samples.request(id=request_id, enqueued_at=1400.0, **fields)
    claim = Claim(request=request, attempt=1, worker="host/1", claimed_at=1500.0)
    turn = samples.turn(
        told=(ChatMessage("user", HOSTILE),),
        text=HOSTILE,
        actions=(samples.action("cat calc.py", HOSTILE),),
        asked_at=1550.0,
    )
    verdict = samples.reward(value=reward, resolved=bool(reward))
    return samples.trajectory(claim, turns=(turn,), reward=verdict, finished_at=1900.0)


def store(run_dir: Path, *trajectories: Trajectory) -> None:
    writer = RolloutWriter(run_dir / "rollouts", max_bytes=10**9)
    for trajectory in trajectories:
        writer.add(head_of(trajectory, 0), StoredRollout(trajectory=trajectory))
    writer.close()


def store_tokens(run_dir: Path, request_id: str, *, step: int, num_tokens: int = 3) -> None:
    """What a step did with the tokens of the only turn; the second one was masked."""
    turn = TrainedTurn(
        turn=0,
        logprobs=pack_float32s([-0.5, -0.75, -3.0][:num_tokens]),
        advantages=pack_float32s([0.5, 0.5, 0.5][:num_tokens]),
        weights=struct.pack("<3e", 1.0, 0.5, 0.25)[: 2 * num_tokens],
        reasons=bytes([0, REASONS.index("masked"), 0])[:num_tokens],
    )
    writer = RolloutWriter(run_dir / "rollouts", max_bytes=10**9)
    writer.add_trained(
        TrainedHead(rollout_id=request_id, step=step, version=step - 1, num_tokens=num_tokens),
        TrainedTokens(step=step, version=step - 1, turns=(turn,)),
    )
    writer.close()


def append(run_dir: Path, name: str, *rows: dict[str, Any]) -> None:
    """Append rows to one file of the journal; what a row does not say is empty or 0."""
    kind = next(kind for kind, file in FILES.items() if file == f"{name}.jsonl")
    write(run_dir, *(made(kind, **row) for row in rows))


def step(number: int, request_ids: list[str]) -> dict[str, Any]:
    numbers = {"step": number, "version": 4, "loss": 0.25, "reward_mean": 0.5, "at": 1000.0 + 1000 * number}
    return {**numbers, "request_ids": request_ids}


def judging(**numbers: int) -> dict[str, Any]:
    """What judging did to a step, as a part of its row."""
    return structs.asdict(made(StepJudging, **numbers))


def settled(trajectory: Trajectory, fate: str) -> dict[str, Any]:
    head = head_of(trajectory, 0)
    names = ("request_id", "group_id", "task_id", "purpose", "member", "group_size", "worker", "outcome", "reward")
    numbers = ("num_turns", "sampled_tokens", "version_first", "enqueued_at", "claimed_at", "finished_at", "num_failed_commands")
    told = {name: getattr(head, name) for name in (*names, *numbers)}
    return {**told, "fate": fate, "at": 2001.0}


async def read(client: Client, path: str, **query: str | int) -> Any:
    """The JSON of a reply that is as it should be."""
    async with client.get(path, params=query) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "application/json"
        return await response.json()
