"""One worker process's machine settings: read from the environment, once."""

import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    name: str  # unique in the fleet
    slots: int  # episodes at once
    router_url: str
    max_starting: int  # containers in the act of starting at once; beyond about 4 an engine only queues
    reap_every_s: float
    drain_s: float  # grace after SIGTERM before running episodes are handed back


def worker_settings() -> WorkerSettings:
    """Raises ValueError naming the variable that does not make sense."""
    return WorkerSettings(
        name=os.environ.get("SWERVE_WORKER_NAME", f"{socket.gethostname()}/{os.getpid()}"),
        slots=_positive("SWERVE_SLOTS", 4),
        router_url=os.environ.get("SWERVE_ROUTER_URL", "http://127.0.0.1:30000").rstrip("/"),
        max_starting=_positive("SWERVE_MAX_STARTING", 4),
        reap_every_s=float(_positive("SWERVE_REAP_EVERY_S", 15)),
        drain_s=float(_positive("SWERVE_DRAIN_S", 5)),
    )


def _positive(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{variable}={text!r}: give a whole number of at least 1")
    return int(text)
