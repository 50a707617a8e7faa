"""The directory of a run with a hundred thousand rollouts, as the pages of a run read it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec import structs

from benchmarks import scripted_fleet
from pipeline.request import Claim
from pipeline.rollout_store import record, segment
from pipeline.rollout_store.record import StoredHead, StoredRollout
from pipeline.trajectory import TrajectoryHead, head_of

NUM_ROLLOUTS = 100_000
RUN = "long"


def write(run_dir: Path, num_rollouts: int = NUM_ROLLOUTS) -> None:
    """Every rollout is in the store and, but for the last hundred, settled; a step trained each eight of them."""
    (run_dir / "journal").mkdir(parents=True)
    (run_dir / "rollouts").mkdir()
    (run_dir / "run.json").write_text(json.dumps({"run_id": RUN}))
    claim = Claim(request=scripted_fleet.request(RUN), attempt=1, worker="host/1", claimed_at=1500.0)
    example = scripted_fleet.played(claim, 1.0)
    body = record.pack_body(StoredRollout(trajectory=example))
    head = head_of(example, len(body))
    with segment.path_of(run_dir / "rollouts", 0).open("wb") as store:
        for number in range(num_rollouts):
            store.write(record.pack(StoredHead(head=structs.replace(head, **told(number))), body))
    line = _trained(head)
    _append(run_dir, "steps", (_step(first) for first in range(0, num_rollouts, 8)))
    _append(run_dir, "episodes", (line | told(number) for number in range(num_rollouts - 100)))


def _append(run_dir: Path, name: str, rows: Iterable[dict[str, Any]]) -> None:
    with (run_dir / "journal" / f"{name}.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _trained(head: TrajectoryHead) -> dict[str, Any]:
    names = ("purpose", "member", "group_size", "outcome", "sampled_tokens")
    return {name: getattr(head, name) for name in names} | {"fate": "trained", "at": 2001.0}


def request_id(number: int) -> str:
    return f"01M820H99E{number:016d}"


def told(number: int) -> dict[str, Any]:
    """What differs from one rollout to the next."""
    names = {"request_id": request_id(number), "group_id": f"g{number // 8:08d}"}
    counts = {"num_turns": number % 40, "version_first": number // 1000, "reward": float(number % 2)}
    times = {"enqueued_at": 1000.0 + number, "claimed_at": 1001.5 + number, "finished_at": 1100.0 + number}
    return {
        **names,
        **counts,
        **times,
        "task_id": f"demo:task-{number % 50:02d}",
        "worker": f"host/{number % 20}",
    }


def _step(first: int) -> dict[str, Any]:
    ids = [request_id(number) for number in range(first, first + 8)]
    zeros = dict.fromkeys(("loss", "grad_norm", "lr", "reward_mean"), 0.0)
    counts = dict.fromkeys(("num_trajectories", "num_trained_tokens", "num_unique_sampled_tokens"), 8)
    place = {"step": first // 8 + 1, "version": first // 1000 + 1, "at": 2000.0 + first}
    return {**zeros, **counts, **place, "request_ids": ids}
