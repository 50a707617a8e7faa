"""Where a running episode is. The stage writes it; claim.py sends it along whenever it renews the lease."""

from dataclasses import dataclass

PHASES = ("opening", "pulling", "agent", "grading", "judging", "publishing")


@dataclass(slots=True)
class EpisodeStatus:
    """`phase` is one of PHASES; `turn` counts finished turns: played, or judged."""

    phase: str = "opening"
    turn: int = 0
