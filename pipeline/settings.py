"""Where Redis is, and where spans and metrics go: read from the environment, once per process."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """`url` as `redis_url.connection_settings` takes it; rediss:// for TLS."""

    url: str


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """Spans go to an OTLP/HTTP collector, to a file of JSON lines, to both, or nowhere."""

    otlp_endpoint: str | None  # e.g. http://collector:4318
    trace_file: Path | None
    is_measured: bool = False  # the durations of spans are metrics that Prometheus reads

    @property
    def is_tracing(self) -> bool:
        """Whether spans are made."""
        return self.is_measured or self.otlp_endpoint is not None or self.trace_file is not None


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Metrics are pushed to an OTLP/HTTP collector, served to Prometheus, both, or neither."""

    otlp_endpoint: str | None
    port: int | None  # the first that is tried; several processes of one machine take one after the other
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
    """Raises ValueError naming the variable."""
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
