"""What an evaluation says while it goes on: a line for each episode that has ended."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from pipeline.frames import EpisodeReport
from pipeline.visible import visible_line
from trainer.evaluate.results import EpisodeResult

SILENT_S = 30.0  # after which a line says where the running episodes are


@dataclass(slots=True)
class ProgressLines:
    """Lines on `output`, for people and logs alike."""

    output: TextIO
    num_all: int
    num_ended: int
    running: dict[str, EpisodeReport] = field(default_factory=dict[str, EpisodeReport])
    last_at: float = field(default_factory=time.monotonic)

    def begin(self, directory: Path) -> None:
        known = f", {self.num_ended} of them are in {directory} already" if self.num_ended else ""
        self._say(f"{self.num_all} episodes{known}")

    def result(self, row: EpisodeResult) -> None:
        self.num_ended += 1
        verdict = {True: "resolved", False: "not resolved", None: "infrastructure"}[row.resolved]
        why = row.error or row.decided_by
        self._say(
            f"{self.num_ended}/{self.num_all} {row.instance_id} sample {row.sample}: {verdict}, {row.exit_status}, "
            f"{row.n_steps} turns, {row.elapsed:.0f} s{f' ({why})' if why else ''}"
        )

    def progress(self, report: EpisodeReport) -> None:
        if report.trajectory is not None:
            self.running.pop(report.request_id, None)
            return
        self.running[report.request_id] = report
        if time.monotonic() - self.last_at > SILENT_S:
            newest = max(self.running.values(), key=lambda one: one.turn)
            self._say(f"... under way; the furthest is at turn {newest.turn}, {newest.phase}")

    def _say(self, line: str) -> None:
        self.last_at = time.monotonic()
        print(visible_line(line), file=self.output, flush=True)
