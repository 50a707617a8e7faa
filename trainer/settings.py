"""The trainer's machine settings: read from the environment, once per process."""

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """The router of the engines, and the rank of this process among the learner's, as torchrun sets it."""

    router_url: str
    rank: int
    world_size: int
    local_rank: int


def trainer_settings() -> TrainerSettings:
    """Raises ValueError naming the variable that cannot be used."""
    return TrainerSettings(
        router_url=os.environ.get("SWERVE_ROUTER_URL", "http://127.0.0.1:30000"),
        rank=_whole("RANK", 0),
        world_size=_whole("WORLD_SIZE", 1),
        local_rank=_whole("LOCAL_RANK", 0),
    )


def _whole(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdigit():
        raise ValueError(f"{variable}={text!r}: give a whole number; torchrun sets it")
    return int(text)
