"""One parquet file with a row for each rollout."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import artefacts
from pipeline.judge import Judgement
from pipeline.trajectory import Trajectory
from trainer.learner import directories
from trainer.rollouts.export_files import step_scores

ROWS_IN_GROUP = 200  # largest number of rows in a group of rows
BYTES_IN_GROUP = 32 * 1024**2  # size of text after which a group of rows is written

_MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("reasoning_content", pa.string()),
        ("tool_calls", pa.string()),  # JSON
        ("tool_call_id", pa.string()),
    ]
)

SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("run_id", pa.string()),
        ("purpose", pa.string()),
        ("task_id", pa.string()),
        ("instance_id", pa.string()),
        ("repo", pa.string()),
        ("group_id", pa.string()),
        ("member", pa.int32()),
        ("model", pa.string()),
        ("outcome", pa.string()),
        ("exit_status", pa.string()),
        ("error", pa.string()),
        ("reward", pa.float64()),
        ("resolved", pa.bool_()),
        ("decided_by", pa.string()),
        ("patch", pa.string()),
        ("patch_source", pa.string()),
        ("version_first", pa.int64()),
        ("version_last", pa.int64()),
        ("num_turns", pa.int32()),
        ("num_cuts", pa.int32()),
        ("sampled_tokens", pa.int64()),
        ("attempt", pa.int32()),
        ("started_at", pa.float64()),
        ("finished_at", pa.float64()),
        ("problem", pa.string()),
        ("messages", pa.list_(_MESSAGE)),
        # One score for each turn, null where the judge abstains; null as a whole where there is no judgement.
        ("step_scores", pa.list_(pa.float64())),
    ]
)


class RolloutTable:
    """`rollouts.parquet`, which appears when it is complete."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.place = directory / "rollouts.parquet"
        self._partial = self.place.with_name(".rollouts.parquet.partial")
        self._writer = pq.ParquetWriter(self._partial, SCHEMA, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._flush()
        self._writer.close()
        if error is None:
            self._partial.replace(self.place)
            directories.sync(self.place.parent)
        else:
            self._partial.unlink(missing_ok=True)

    def write(self, trajectory: Trajectory, judgement: Judgement | None) -> bool:
        row = _row(trajectory, judgement)
        self._rows.append(row)
        self._num_bytes += sum(len(message["content"]) for message in row["messages"])
        if len(self._rows) >= ROWS_IN_GROUP or self._num_bytes >= BYTES_IN_GROUP:
            self._flush()
        return True

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
        self._rows, self._num_bytes = [], 0


def _row(trajectory: Trajectory, judgement: Judgement | None) -> dict[str, Any]:
    info = artefacts.trajectory_json(trajectory)["info"]
    request, reward = trajectory.claim.request, trajectory.reward
    row = artefacts.rollout_facts(trajectory) | {
        "instance_id": artefacts.instance_id(request.task.id),
        "repo": request.task.repo,
        "model": artefacts.model_name(trajectory),
        "exit_status": info["exit_status"],
        "error": info.get("exception_str"),
        "decided_by": None if reward is None else reward.decided_by,
        "patch": info["submission"],
        "num_turns": len(trajectory.turns),
        "problem": request.task.problem,
        "messages": [_message(message) for message in artefacts.chat(trajectory.turns)],
        "step_scores": None if judgement is None else step_scores(trajectory, judgement),
    }
    return {name: row[name] for name in SCHEMA.names}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {name: message.get(name) for name in ("role", "content", "reasoning_content", "tool_call_id")} | {
        "tool_calls": json.dumps(calls) if calls else None
    }
