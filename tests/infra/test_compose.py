"""docker-compose.yml as compose itself reads it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def services(profiles: str) -> dict[str, Any]:
    run = subprocess.run(
        ["bash", ROOT / "infra/docker/compose.sh", "config", "--format=json"],
        env=dict(os.environ) | {"COMPOSE_PROFILES": profiles},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)["services"]


@pytest.mark.parametrize(("profiles", "engine"), [("cpu", "engine"), ("gpu", "engine-gpu")])
def test_workers_pull_up_all_they_need_and_no_more(profiles: str, engine: str) -> None:
    found = services(profiles)
    assert set(found) == {"redis", "router", "workers", engine}
    assert set(found["workers"]["depends_on"]) == {"redis", "router"}
    assert found["router"]["depends_on"][engine]["condition"] == "service_healthy"


def test_only_the_gpu_engine_asks_for_devices() -> None:
    found = services("cpu,gpu,trainer,otel")
    assert [name for name, service in found.items() if "deploy" in service] == ["engine-gpu"]


def test_nothing_is_published_to_the_host() -> None:
    assert not any("ports" in service for service in services("cpu,gpu,trainer,otel").values())


def test_every_service_that_is_built_has_its_dockerfile() -> None:
    built = [service["build"] for service in services("cpu,trainer").values() if "build" in service]
    assert len(built) == 4
    assert all((ROOT / build["dockerfile"]).is_file() for build in built)
