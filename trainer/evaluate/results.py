"""The directory of an evaluation: what each episode came to, written as it ends, and files made of all of it.

`results.jsonl` is the record: a line for each episode, appended and synced before the next file is touched, so that a kill
loses no result and at most the last line is torn. All other files are made of it. The last line about an episode counts.

    OUT/evaluation.json                what was asked, to refuse a resumption that asks something else
    OUT/results.jsonl                  one line for each episode
    OUT/summary.json                   rates, pass@k, totals
    OUT/preds.json                     the patch of each task's first episode, as the official harness reads it
    OUT/exit_statuses_TIME.yaml        ids by exit status, of this session
    OUT/rollouts/                      all trajectories, as docs/rollouts.md describes them
    OUT/ID/ID.traj.json, patch.diff    of the first episode; of the others in OUT/ID/sample-N/
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from pipeline import artefacts
from pipeline.task import Task
from pipeline.taskfile import fingerprint
from pipeline.trajectory import Failed, Trajectory

RECORD = "results.jsonl"
MANIFEST = "evaluation.json"

EpisodeKey = tuple[str, int]  # task id, sample


class EpisodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `results.jsonl`."""

    instance_id: str
    task_id: str
    sample: int
    resolved: bool | None  # None: an infrastructure failure kept it from a verdict
    reward: float | None
    decided_by: str
    control: str
    exit_status: str
    patch_source: str
    n_steps: int
    error: str
    elapsed: float  # s of wall time, from its start to its verdict
    prompt_tokens: int
    completion_tokens: int
    run_dir: str  # of its files, within the directory of the evaluation
    task: str  # fingerprint of the task that was played

    @property
    def key(self) -> EpisodeKey:
        return self.task_id, self.sample


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked. Two sessions in one directory must agree in all of it but where the server is."""

    run_id: str
    model: str
    agent: str  # hash of the merged files
    sampling: dict[str, Any]
    limits: dict[str, Any]


@dataclass(slots=True)
class EvaluationDirectory:
    """The results in `path`. `known` has the last result of each episode."""

    path: Path
    model: str
    started_at: float = field(default_factory=time.time)
    known: dict[EpisodeKey, EpisodeResult] = field(default_factory=dict[EpisodeKey, EpisodeResult])
    predictions: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def open(self) -> None:
        """Read what is there. A line that a kill tore is cut off. Raises ValueError for another damage."""
        self.path.mkdir(parents=True, exist_ok=True)
        record = self.path / RECORD
        if record.exists():
            self._cut_torn_line(record)
            for number, line in enumerate(record.read_bytes().splitlines(), start=1):
                try:
                    row = msgspec.json.decode(line, type=EpisodeResult)
                except msgspec.DecodeError as error:
                    raise ValueError(
                        f"{record}:{number}: {error}; remove the line, or give another --out"
                    ) from error
                self.known[row.key] = row
        predictions = self.path / "preds.json"
        if predictions.exists():
            try:
                self.predictions = msgspec.json.decode(
                    predictions.read_bytes(), type=dict[str, dict[str, Any]]
                )
            except msgspec.DecodeError as error:
                raise ValueError(f"{predictions}: {error}; remove it, or give another --out") from error

    def agree(self, manifest: Manifest) -> Manifest:
        """The manifest of this directory, which `manifest` must agree with; if there is none, `manifest`. Raises ValueError."""
        file = self.path / MANIFEST
        if not file.exists():
            self._write(file, msgspec.json.format(msgspec.json.encode(manifest)))
            return manifest
        try:
            found = msgspec.json.decode(file.read_bytes(), type=Manifest)
        except msgspec.DecodeError as error:
            raise ValueError(f"{file}: {error}; give another --out") from error
        for name in ("model", "agent", "sampling", "limits"):
            if getattr(found, name) != getattr(manifest, name):
                raise ValueError(
                    f"{self.path} holds results with another {name} ({getattr(found, name)}): give another --out"
                )
        return found

    def has(self, task: Task, sample: int) -> bool:
        """Whether this very task was played and judged."""
        row = self.known.get((task.id, sample))
        return row is not None and row.resolved is not None and row.task == fingerprint(task)

    def record(self, trajectory: Trajectory) -> EpisodeResult:
        """Write the episode's files, then its line."""
        folder = self._folder(trajectory)
        name = f"{quoted(artefacts.instance_id(trajectory.claim.request.task.id))}.traj.json"
        text = artefacts.dump(artefacts.trajectory_json(trajectory))
        self._write(folder / name, text.encode())
        self._write(folder / "patch.diff", artefacts.patch_of(trajectory.outcome))
        row = result_of(trajectory, str(folder.relative_to(self.path)))
        self._append(row)
        if row.sample == 0:
            self.predictions[row.instance_id] = artefacts.prediction(trajectory, model=self.model)
        return row

    def record_loss(self, task: Task, sample: int, error: str) -> EpisodeResult:
        """The line of an episode that left no trajectory."""
        row = EpisodeResult(
            **_identity(task, sample),
            **_verdict(None, None, "", ""),
            exit_status="WorkerError",
            patch_source="",
            n_steps=0,
            error=error,
            elapsed=0.0,
            prompt_tokens=0,
            completion_tokens=0,
            run_dir="",
        )
        self._append(row)
        return row

    def write_overviews(self, summary: Mapping[str, Any], chosen: Sequence[EpisodeResult]) -> None:
        """`summary.json`, `preds.json` and the exit statuses of `chosen`."""
        self._write(self.path / "summary.json", artefacts.dump(dict(summary)).encode())
        self._write(self.path / "preds.json", artefacts.dump(self.predictions).encode())
        by_status = defaultdict[str, list[str]](list)
        for row in chosen:
            by_status[row.exit_status].append(row.instance_id)
        listing = msgspec.yaml.encode({"instances_by_exit_status": dict(sorted(by_status.items()))})
        self._write(self.path / f"exit_statuses_{self.started_at:.0f}.yaml", listing)

    def _append(self, row: EpisodeResult) -> None:
        with (self.path / RECORD).open("ab") as record:
            record.write(msgspec.json.encode(row) + b"\n")
            record.flush()
            os.fsync(record.fileno())
        self.known[row.key] = row

    def _folder(self, trajectory: Trajectory) -> Path:
        request = trajectory.claim.request
        folder = self.path / quoted(artefacts.instance_id(request.task.id))
        return folder / f"sample-{request.member}" if request.member else folder

    def _cut_torn_line(self, record: Path) -> None:
        data = record.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.truncate(record, whole)

    def _write(self, file: Path, data: bytes) -> None:
        """All of it or nothing."""
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f"{file.name}.new")
        draft.write_bytes(data)
        draft.replace(file)


def result_of(trajectory: Trajectory, run_dir: str) -> EpisodeResult:
    request, outcome, reward = trajectory.claim.request, trajectory.outcome, trajectory.reward
    usages = [turn.usage for turn in trajectory.turns if turn.usage is not None]
    return EpisodeResult(
        **_identity(request.task, request.member),
        **(
            _verdict(None, None, "", "")
            if reward is None
            else _verdict(reward.resolved, reward.value, reward.decided_by, reward.control)
        ),
        exit_status=artefacts.exit_status(outcome),
        patch_source=artefacts.patch_source(outcome),
        n_steps=len(trajectory.turns),
        error=outcome.message if isinstance(outcome, Failed) else "",
        elapsed=round(trajectory.finished_at - trajectory.started_at, 2),
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        run_dir=run_dir,
    )


def _identity(task: Task, sample: int) -> dict[str, Any]:
    instance = artefacts.instance_id(task.id)
    return {"instance_id": instance, "task_id": task.id, "sample": sample, "task": fingerprint(task)}


def _verdict(resolved: bool | None, reward: float | None, decided_by: str, control: str) -> dict[str, Any]:
    return {"resolved": resolved, "reward": reward, "decided_by": decided_by, "control": control}


def quoted(instance: str) -> str:
    """The id as the name of a file or folder, and no way out of the directory."""
    name = quote(instance, safe=":+@,= ")
    return name.replace(".", "%2E") if name in (".", "..") else name


def graded_runs(rows: Iterable[EpisodeResult]) -> dict[str, list[bool]]:
    """For each task whether each of its graded episodes resolved it."""
    runs: dict[str, list[bool]] = {}
    for row in sorted(rows, key=lambda row: row.key):
        runs.setdefault(row.task_id, [])
        if row.resolved is not None:
            runs[row.task_id].append(row.resolved)
    return runs
