"""The directory of a run with a hundred thousand rollouts, as the pages of a run read it."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec import structs

from benchmarks import scripted_fleet
from pipeline.journal.rows import StepRow
from pipeline.request import Claim
from pipeline.rollout_store import record, segment
from pipeline.rollout_store.record import StoredHead, StoredRollout
from pipeline.trajectory import Trajectory, TrajectoryHead, head_of

NUM_ROLLOUTS = 100_000
ROLLOUTS_PER_STEP = 72
RUN = "long"


def write(run_dir: Path, num_rollouts: int = NUM_ROLLOUTS, *, run_id: str = RUN) -> None:
    """Every rollout is in the store and, but for the last hundred, settled; each step trained 72 of them."""
    (run_dir / "journal").mkdir(parents=True)
    (run_dir / "rollouts").mkdir()
    (run_dir / "run.json").write_text(json.dumps({"run_id": run_id}))
    example = _example()
    body = record.pack_body(StoredRollout(trajectory=example))
    head = head_of(example, len(body))
    with segment.path_of(run_dir / "rollouts", 0).open("wb") as store:
        for number in range(num_rollouts):
            store.write(record.pack(StoredHead(head=structs.replace(head, **told(number))), body))
    line = _trained(head)
    _append(run_dir, "steps", (_step(first) for first in range(0, num_rollouts, ROLLOUTS_PER_STEP)))
    _append(run_dir, "episodes", (line | told(number) for number in range(num_rollouts - 100)))


def append_step(run_dir: Path, first: int) -> None:
    """One more step, which trained the rollouts from the number `first` on."""
    line = _trained(head_of(_example(), 0))
    _append(run_dir, "steps", [_step(first)])
    _append(run_dir, "episodes", (line | told(first + number) for number in range(ROLLOUTS_PER_STEP)))


def _example() -> Trajectory:
    claim = Claim(request=scripted_fleet.request(RUN), attempt=1, worker="host/1", claimed_at=1500.0)
    return scripted_fleet.played(claim, 1.0)


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
    """The row of a step in which every number that a step can have is there."""
    number = first // ROLLOUTS_PER_STEP + 1
    ids = [request_id(one) for one in range(first, first + ROLLOUTS_PER_STEP)]
    fields = structs.fields(StepRow)
    numbers = {
        one.name: round(math.sin(number / 7) + 2, 4) for one in fields if one.type in (float, float | None)
    }
    counts = {one.name: 100 + number % 7 for one in fields if one.type in (int, int | None)}
    place = {"step": number, "version": first // 1000 + 1, "at": 2000.0 + first}
    return {**numbers, **counts, **place, "request_ids": ids}
