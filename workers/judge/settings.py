"""Settings of a judge process, read from the environment once. Every reader raises ValueError that names the variable and the fix."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from workers.judge.functions import StepFunction, load_functions
from workers.settings import positive

FUNCTIONS_VARIABLE = "SWERVE_JUDGE_FUNCTIONS"
ROUTER_VARIABLE = "SWERVE_JUDGE_ROUTER_URL"


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    name: str  # unique in the fleet
    slots: int  # rollouts judged at once
    router_url: str  # "": no engines, only requests that need none are judged
    max_votes: int  # requests to engines and endpoints at once, of all rollouts together
    functions: Mapping[str, StepFunction]  # that requests may name
    drain_s: float  # after SIGTERM, before unfinished requests return to the queue


def judge_settings() -> JudgeSettings:
    try:
        functions = load_functions(os.environ.get(FUNCTIONS_VARIABLE, "").split())
    except ValueError as error:
        raise ValueError(f"{FUNCTIONS_VARIABLE}: {error}") from error
    return JudgeSettings(
        name=os.environ.get("SWERVE_JUDGE_NAME") or f"judge/{socket.gethostname()}/{os.getpid()}",
        slots=positive("SWERVE_JUDGE_SLOTS", 8),
        router_url=os.environ.get(ROUTER_VARIABLE, "").rstrip("/"),
        max_votes=positive("SWERVE_JUDGE_MAX_VOTES", 64),
        functions=functions,
        drain_s=float(positive("SWERVE_DRAIN_S", 5)),
    )
