"""The directory of an evaluation: the result of each episode, written when it ends, and files made from all results.

`results.jsonl` is the record: a line for each episode, appended and synced before the next file is touched, so that a kill loses no result
and at most the last line is torn. The last line about an episode counts if the patch on the disk is the one that it names: after a kill
between the two writes, the episode is played again. All other files are made from lines and patches.

    OUT/evaluation.json                the settings, so that a session with other settings is refused
    OUT/results.jsonl                  one line for each episode
    OUT/summary.json                   rates, pass@k, totals
    OUT/preds.json                     the patch of each task's first episode, once it has a verdict, as the official harness reads it;
                                       written after each episode
    OUT/exit_statuses_TIME.yaml        ids by exit status, of this session: each task once, by its first episode
    OUT/rollouts/                      all trajectories, as docs/rollouts.md describes them
    OUT/ID/ID.traj.json, patch.diff    of the first episode; of the others in OUT/ID/sample-N/
"""

import hashlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

import msgspec

from pipeline import artefacts
from pipeline.intervals import Estimate, pass_at, share
from pipeline.screen import visible_line
from pipeline.task import Task
from pipeline.taskfile import fingerprint
from pipeline.trajectory import Failed, Trajectory

RECORD = "results.jsonl"
MANIFEST = "evaluation.json"
PATCH = "patch.diff"  # name in the directory of each episode

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
    run_dir: str  # directory of its files, within that of the evaluation
    task: str  # fingerprint of the task that was played
    patch: str  # digest of its patch; an empty patch has the digest of no bytes

    @property
    def key(self) -> EpisodeKey:
        return self.task_id, self.sample


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an evaluation. Two sessions in one directory must agree in all of them but the server's address."""

    run_id: str
    model: str
    agent: str  # hash of the merged files
    options: dict[str, Any]  # options of requests to the server
    limits: dict[str, Any]


@dataclass(slots=True)
class EvaluationDirectory:
    """The results in `path`. `known` contains the last result of each episode."""

    path: Path
    model: str
    started_at: float = field(default_factory=time.time)
    known: dict[EpisodeKey, EpisodeResult] = field(default_factory=dict[EpisodeKey, EpisodeResult])
    _predictions: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    # Episodes that end at the same time are recorded one after another.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self) -> None:
        """Reads the existing results. A line that a kill tore is cut off. Raises ValueError for other damage."""
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

    def go_on(self) -> None:
        """Uses the existing results in this session, too: checks their patches, and writes the predictions."""
        for row in list(self.known.values()):
            if row.resolved is None:
                continue
            try:
                patch = (self.path / row.run_dir / PATCH).read_bytes()
            except FileNotFoundError:
                patch = None
            if patch is None or digest_of(patch) != row.patch:
                del self.known[row.key]
            elif row.sample == 0:
                self._predictions[row.instance_id] = artefacts.prediction(
                    row.instance_id, patch, model=self.model
                )
        if self._predictions:
            self._write_predictions()

    def agree(self, manifest: Manifest) -> Manifest:
        """The manifest of this directory, or `manifest` if it has none. Raises ValueError if the two disagree."""
        file = self.path / MANIFEST
        if not file.exists():
            self._write(file, msgspec.json.format(msgspec.json.encode(manifest)))
            return manifest
        try:
            found = msgspec.json.decode(file.read_bytes(), type=Manifest)
        except msgspec.DecodeError as error:
            raise ValueError(f"{file}: {error}; give another --out") from error
        for name in ("model", "agent", "options", "limits"):
            if getattr(found, name) != getattr(manifest, name):
                raise ValueError(
                    f"{self.path} holds results of another evaluation, with {name} {getattr(found, name)!r}: give another --out"
                )
        return found

    def has(self, task: Task, sample: int) -> bool:
        """Whether this task in its present form was played and judged."""
        row = self.known.get((task.id, sample))
        return row is not None and row.resolved is not None and row.task == fingerprint(task)

    def record(self, trajectory: Trajectory) -> EpisodeResult:
        """Write the episode's files, then its line."""
        folder = self._folder(trajectory)
        name = f"{quoted(artefacts.instance_id(trajectory.claim.request.task.id))}.traj.json"
        text = artefacts.dump(artefacts.trajectory_json(trajectory))
        patch = artefacts.patch_of(trajectory.outcome)
        row = result_of(trajectory, str(folder.relative_to(self.path)))
        with self._lock:
            self._write(folder / PATCH, patch)
            self._write(folder / name, text.encode())
            self._append(row)
            self._predict(row, patch)
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
            patch=digest_of(b""),
        )
        with self._lock:
            self._append(row)
            self._predict(row, b"")
        return row

    def write_overviews(self, summary: Mapping[str, Any], chosen: Sequence[EpisodeResult]) -> None:
        """`summary.json`, `preds.json` and the exit statuses of `chosen`."""
        self._write(self.path / "summary.json", artefacts.dump(dict(summary)).encode())
        self._write_predictions()
        by_status = defaultdict[str, list[str]](list)
        for row in chosen:
            if row.sample == 0:
                by_status[row.exit_status].append(row.instance_id)
        listing = msgspec.yaml.encode({"instances_by_exit_status": dict(sorted(by_status.items()))})
        self._write(self.path / f"exit_statuses_{self.started_at:.0f}.yaml", listing)

    def _predict(self, row: EpisodeResult, patch: bytes) -> None:
        """Adds the prediction of an episode.

        One without a verdict is left out: the harness would consider its empty patch a wrong answer.
        """
        if row.sample != 0:
            return
        if row.resolved is None:
            self._predictions.pop(row.instance_id, None)
        else:
            self._predictions[row.instance_id] = artefacts.prediction(
                row.instance_id, patch, model=self.model
            )
        self._write_predictions()

    def _write_predictions(self) -> None:
        self._write(self.path / "preds.json", artefacts.dump(self._predictions).encode())

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
        """Writes the file as a whole or not at all."""
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
        patch=digest_of(artefacts.patch_of(outcome)),
    )


def digest_of(patch: bytes) -> str:
    return hashlib.sha256(patch).hexdigest()


def _identity(task: Task, sample: int) -> dict[str, Any]:
    instance = artefacts.instance_id(task.id)
    return {"instance_id": instance, "task_id": task.id, "sample": sample, "task": fingerprint(task)}


def _verdict(resolved: bool | None, reward: float | None, decided_by: str, control: str) -> dict[str, Any]:
    return {"resolved": resolved, "reward": reward, "decided_by": decided_by, "control": control}


def quoted(instance: str) -> str:
    """The id as the name of a file or folder, which cannot lead out of the directory."""
    name = quote(instance, safe=":+@,= ")
    return name.replace(".", "%2E") if name in (".", "..") else name


def graded_runs(rows: Iterable[EpisodeResult]) -> dict[str, list[bool]]:
    """Whether each graded episode resolved its task, by the task's id."""
    runs: dict[str, list[bool]] = {}
    for row in sorted(rows, key=lambda row: row.key):
        runs.setdefault(row.task_id, [])
        if row.resolved is not None:
            runs[row.task_id].append(row.resolved)
    return runs


def summary_of(
    rows: Sequence[EpisodeResult], *, model: str, data: str, samples: int, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """`total`, `graded`, `resolved` and `resolve_rate` count tasks by their first episode, as the older systems do; `success` is the
    mean over all graded episodes of a task, then over tasks. Every rate and mean is over episodes that have a verdict; None if none has.
    """
    firsts = [row for row in rows if row.sample == 0]
    graded = [row for row in rows if row.resolved is not None]
    num_graded = sum(row.resolved is not None for row in firsts)
    runs = graded_runs(rows)
    success = share([fmean(each) for each in runs.values() if each], len(graded))
    num_resolved = sum(row.resolved is True for row in firsts)
    pass_k = {f"pass@{k}": pass_at(runs, k) for k in range(1, samples + 1)}
    return {
        "model": model,
        "data": data,
        "total": len(firsts),
        "graded": num_graded,
        "resolved": num_resolved,
        "resolve_rate": round(num_resolved / num_graded, 4) if num_graded else None,
        "episodes": len(rows),
        "errors": len(rows) - len(graded),
        "no_patch": sum(not row.patch_source for row in graded),
        "avg_steps": _mean([row.n_steps for row in graded]),
        "avg_elapsed_s": _mean([row.elapsed for row in graded]),
        "success": _told(success),
        **{name: _told(one) for name, one in pass_k.items()},
        "prompt_tokens": sum(row.prompt_tokens for row in rows),
        "completion_tokens": sum(row.completion_tokens for row in rows),
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "args": dict(arguments),
    }


def table(summary: Mapping[str, Any]) -> str:
    """The printed summary; rates in percent."""
    without = summary["total"] - summary["graded"]
    lines = [
        f"{visible_line(summary['model'])}: {summary['resolved']} of {summary['graded']} tasks resolved by their first episode"
        + (f"; {without} more without a verdict" if without else ""),
        f"episodes      {summary['episodes']}, of them {summary['errors']} without a verdict, {summary['no_patch']} without a patch",
        f"success       {_percent(summary['success'])}",
    ]
    lines += [f"{name:14}{_percent(one)}" for name, one in summary.items() if name.startswith("pass@")]
    means = (
        f"{summary['avg_steps']:.1f} turns, {summary['avg_elapsed_s']:.1f} s"
        if summary["avg_steps"] is not None
        else "-"
    )
    lines.append(
        f"per episode   {means}; in all {summary['prompt_tokens']:,} tokens in, {summary['completion_tokens']:,} out"
    )
    return "\n".join(lines)


def _told(one: Estimate | None) -> dict[str, Any] | None:
    return None if one is None else asdict(one)


def _percent(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return "-"
    value, low, high = (100 * one[name] for name in ("value", "low", "high"))
    return f"{value:.1f} % ({low:.1f} to {high:.1f}, 95 %; {one['num_draws']} tasks)"


def _mean(values: Sequence[float]) -> float | None:
    return round(fmean(values), 2) if values else None
