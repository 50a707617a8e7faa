"""Which tasks of a file are evaluated, chosen as mini-swe-agent chooses instances: shuffle, then filter, then slice."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.artefacts import instance_id
from pipeline.task import Task

SHUFFLE_SEED = 42  # mini-swe-agent's, so that the same options choose the same instances


@dataclass(frozen=True, slots=True)
class TaskSelection:
    """Empty or None: no restriction."""

    shuffle: bool = False
    pattern: str = ""  # regular expression that an id begins with; with or without its source
    part: str = ""  # START:STOP or START:STOP:STEP, as Python slices
    max_instances: int | None = None

    def of(self, tasks: Sequence[Task]) -> list[Task]:
        """Raises ValueError for an option that cannot be read, or that leaves no task."""
        pattern, part = self._compiled(), self._slice()
        if self.max_instances is not None and self.max_instances < 1:
            raise ValueError(f"--max-instances {self.max_instances}: give 1 or more")
        chosen = list(tasks)
        if self.shuffle:
            chosen.sort(key=lambda task: instance_id(task.id))
            random.Random(SHUFFLE_SEED).shuffle(chosen)
        chosen = [task for task in chosen if pattern.match(instance_id(task.id)) or pattern.match(task.id)]
        chosen = chosen[part][: self.max_instances]
        if not chosen:
            raise ValueError(
                f"no task is left of {len(tasks)}: loosen --filter {self.pattern!r} or --slice {self.part!r}"
            )
        return chosen

    def _compiled(self) -> re.Pattern[str]:
        try:
            return re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"--filter {self.pattern!r} is not a regular expression: {error}") from error

    def _slice(self) -> slice:
        parts = self.part.split(":")
        try:
            if len(parts) > 3 or (self.part and len(parts) == 1):
                raise ValueError
            return (
                slice(*(int(part) if part.strip() else None for part in parts)) if self.part else slice(None)
            )
        except ValueError:
            raise ValueError(f"--slice {self.part!r}: give START:STOP, as in 0:5") from None
