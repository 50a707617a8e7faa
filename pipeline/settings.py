"""Where Redis and telemetry are: read from the environment, once per process."""

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


def redis_settings() -> RedisSettings:
    return RedisSettings(url=os.environ.get("SWERVE_REDIS_URL", "redis://127.0.0.1:6379/0"))


def telemetry_settings() -> TelemetrySettings:
    file = os.environ.get("SWERVE_TRACE_FILE")
    return TelemetrySettings(
        otlp_endpoint=os.environ.get("SWERVE_OTLP_ENDPOINT"), trace_file=Path(file) if file else None
    )
