"""The journal of a run, row by row, as tests of its report write it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeline.journal.rows import EndRow, EpisodeRow, EvaluationRow, Fate, Row, StepRow
from trainer.records.journal_writer import Journal
from trainer.report import __main__ as report


@dataclass
class Run:
    """A run's rows; `write` puts them where the report looks."""

    directory: Path
    rows: list[Row] = field(default_factory=list)
    episodes: int = 0

    def group(
        self,
        cursor: int,
        rewards: list[float | None],
        *,
        fate: Fate = "trained",
        missing: int = 0,
        control: str = "",
        outcome: str = "submitted",
    ) -> list[str]:
        ids: list[str] = []
        for member, reward in enumerate(rewards):
            self.episodes += 1
            ids.append(f"{cursor}-{member}")
            self.rows.append(
                EpisodeRow(
                    request_id=ids[-1],
                    group_id=f"group-{cursor}",
                    task_id="task",
                    purpose="train",
                    member=member,
                    group_size=len(rewards) + missing,
                    fate=fate if reward is not None else "failed",
                    cursor=cursor,
                    outcome=outcome if reward is not None else "failed:sandbox",
                    reward=reward,
                    finished_at=float(self.episodes),
                    control=control,
                )
            )
        return ids

    def step(self, number: int, ids: list[str], **numbers: Any) -> None:
        row: dict[str, Any] = {
            "step": number,
            "version": number - 1,
            "loss": 0.0,
            "grad_norm": 1.0,
            "lr": 1e-5,
            "reward_mean": 0.5,
            "num_trajectories": len(ids),
            "request_ids": tuple(ids),
            "num_trained_tokens": 10 * len(ids),
            "num_unique_sampled_tokens": 10 * len(ids),
        }
        self.rows.append(StepRow(**(row | numbers)))

    def evaluation(self, name: str, success: float, *, greedy: bool, **fields: Any) -> None:
        self.rows.append(
            EvaluationRow(
                **{
                    "name": name,
                    "version": 0,
                    "greedy": greedy,
                    "success": success,
                    "num_episodes": 20,
                    "num_failed": 0,
                    "at": 1.0,
                    **fields,
                }
            )
        )

    def end(self, step: int, reason: str = "finished") -> None:
        self.rows.append(EndRow(step=step, version=step, reason=reason))

    def write(self) -> None:
        with Journal(self.directory / "journal") as journal:
            for row in self.rows:
                journal.append(row)


def reported(run: Run, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    run.write()
    status = report.main([str(run.directory), "--json"])
    return status, json.loads(capsys.readouterr().out)
