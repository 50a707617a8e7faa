"""Where a running episode is. The stage writes it; claim.py sends it along whenever it renews the lease."""

from dataclasses import dataclass


@dataclass(slots=True)
class EpisodeStatus:
    """`phase` is "opening", "pulling", "agent", "grading" or "publishing"; `turn` counts finished turns."""

    phase: str = "opening"
    turn: int = 0
