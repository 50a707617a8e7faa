"""The addresses of Redis and of the receivers of spans and metrics, read from the environment once per process. Also the names of all our
variables, because a mistyped one would silently become a default.
"""

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PREFIX = "SWERVE_"

VARIABLES = frozenset(
    f"{PREFIX}{name}"
    for name in [
        "BASE_IMAGE",
        "COLLECTOR_IMAGE",
        "CONTAINER_RUNTIME",
        "CPU_SHIM",
        "DOCKER_CERTS",
        "DOCKER_HOSTS",
        "DRAIN_S",
        "ENGINES",
        "ENGINE_DEVICE",
        "ENGINE_FLAGS",
        "ENGINE_GPUS",
        "ENGINE_HOST",
        "FOR",
        "GPU_ENGINE_IMAGE",
        "GRAFANA_IMAGE",
        "GRAFANA_PASSWORD",
        "GRAFANA_PORT",
        "IMAGE_BUDGET",
        "IMAGE_PROXIES",
        "JUDGE_ENGINES",
        "JUDGE_ENGINE_GPUS",
        "JUDGE_FUNCTIONS",
        "JUDGE_MAX_VOTES",
        "JUDGE_MODEL",
        "JUDGE_NAME",
        "JUDGE_ROUTER_URL",
        "JUDGE_SLOTS",
        "MAX_STARTING",
        "MAX_WRITTEN_BYTES",
        "METRICS_HOST",
        "METRICS_PORT",
        "MIN_FREE_BYTES",
        "MODEL",
        "OTLP_ENDPOINT",
        "OTLP_METRICS",
        "PREFETCH",
        "PROMETHEUS_IMAGE",
        "PROMETHEUS_PORT",
        "PYTHON",
        "REAP_EVERY_S",
        "RECEIVER_DIRECTORY",
        "RECEIVER_FLAGS",
        "RECEIVER_HOST",
        "RECIPE",
        "REDIS_IMAGE",
        "REDIS_PASSWORD",
        "REDIS_URL",
        "ROUTER_FLAGS",
        "ROUTER_HOST",
        "ROUTER_URL",
        "RUN_DIR",
        "SHARED",
        "SLOTS",
        "STATE_DIR",
        "TEMPO_IMAGE",
        "TORCH_INDEX",
        "TRACE_FILE",
        "WEB_PORT",
        "WEB_TOKEN_FILE",
        "WORKER_NAME",
    ]
)
"""Every variable that a program, a script or a Compose file of ours reads, because the environment of one part of the system may contain
the variables of another.
"""

_OF_KUBERNETES = re.compile(r"(\w+?)_(SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_\d+_\w+)")


def check_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Raises ValueError for an unknown variable with our prefix, and names the most similar known one.

    Kubernetes sets variables for each Service; those for a Service named swerve-... would have our prefix.
    """
    for name in environment:
        if not name.startswith(PREFIX) or name in VARIABLES:
            continue
        service = _OF_KUBERNETES.fullmatch(name)
        if service and f"{service[1]}_SERVICE_HOST" in environment:
            continue
        near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.75)
        fix = (
            f"did you mean {near[0]}?"
            if near
            else f"names that begin with {PREFIX} are Swerve's; workers/README.md has them"
        )
        raise ValueError(f"{name}: no program of Swerve reads this variable; {fix}")


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """`url` is in the format of `connection.connection_settings`; rediss:// uses TLS."""

    url: str


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """Spans go to an OTLP/HTTP collector, to a file of JSON lines, to both, or nowhere."""

    otlp_endpoint: str | None  # e.g. http://collector:4318
    trace_file: Path | None
    is_measured: bool = False  # whether the durations of spans become metrics that Prometheus reads

    @property
    def is_tracing(self) -> bool:
        """Whether spans are recorded."""
        return self.is_measured or self.otlp_endpoint is not None or self.trace_file is not None


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Metrics are pushed to an OTLP/HTTP collector, served to Prometheus, both, or neither."""

    otlp_endpoint: str | None
    port: int | None  # the first port to try; the processes of one machine take one port each
    host: str


def redis_settings() -> RedisSettings:
    return RedisSettings(url=os.environ.get("SWERVE_REDIS_URL", "redis://127.0.0.1:6379/0"))


def telemetry_settings() -> TelemetrySettings:
    file = os.environ.get("SWERVE_TRACE_FILE")
    return TelemetrySettings(
        otlp_endpoint=os.environ.get("SWERVE_OTLP_ENDPOINT"),
        trace_file=Path(file) if file else None,
        is_measured=bool(os.environ.get("SWERVE_METRICS_PORT")),
    )


def metrics_settings() -> MetricsSettings:
    """The settings of metrics in the environment. Raises ValueError naming the variable if one is invalid."""
    pushed = os.environ.get("SWERVE_OTLP_METRICS", "1")
    if pushed not in ("0", "1"):
        raise ValueError(f"SWERVE_OTLP_METRICS={pushed!r}: give 0 to push no metrics, or 1")
    port = os.environ.get("SWERVE_METRICS_PORT", "")
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"SWERVE_METRICS_PORT={port!r}: give a port from 1 to 65535, or remove it")
    return MetricsSettings(
        otlp_endpoint=os.environ.get("SWERVE_OTLP_ENDPOINT") if pushed == "1" else None,
        port=int(port) if port else None,
        host=os.environ.get("SWERVE_METRICS_HOST") or "127.0.0.1",
    )
