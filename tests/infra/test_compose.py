"""docker-compose.yml as compose itself reads it."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "infra/docker/compose.sh"


def shell(*words: str, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A command of a user with this home directory."""
    inherited = {name: value for name, value in os.environ.items() if name != "DOCKER_CONFIG"}
    environment = inherited | {"HOME": str(home)} | more
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


def hide_compose(directory: Path) -> str:
    """A PATH on which `docker` sees no plugins but those of the user, as on a Debian machine without the package."""
    (directory / "docker").write_text(
        f'#!/bin/sh\n[ "$1" != compose ] || [ -e "${{DOCKER_CONFIG:-$HOME/.docker}}/cli-plugins/docker-compose" ] || exit 1\n'
        f'exec {shutil.which("docker")} "$@"\n'
    )
    (directory / "docker").chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


@pytest.mark.parametrize("variable", ["HOME", "DOCKER_CONFIG"])
def test_compose_works_from_a_plain_shell_once_it_is_installed(tmp_path: Path, variable: str) -> None:
    home, programs = tmp_path / "home", tmp_path / "programs"
    for directory in (home, programs):
        directory.mkdir()
    more = {"PATH": hide_compose(programs)}
    folder = home / ".docker"
    if variable == "DOCKER_CONFIG":
        folder = tmp_path / "config"
        more["DOCKER_CONFIG"] = str(folder)
    plain = ("docker", "compose", "version")
    assert shell(*plain, home=home, **more).returncode != 0
    first = shell("bash", str(COMPOSE), "install", home=home, **more)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith(
        f"compose: installed for this user: {folder}/cli-plugins/docker-compose -> "
    )
    used = shell(*plain, home=home, **more)
    assert (used.returncode, used.stdout.split()[:2]) == (0, ["Docker", "Compose"]), used.stderr
    again = shell("bash", str(COMPOSE), "install", home=home, **more)
    assert again.stdout == "compose: docker compose is there\n"


def test_a_plugin_whose_target_is_gone_is_installed_again(tmp_path: Path) -> None:
    plugin = tmp_path / ".docker/cli-plugins/docker-compose"
    plugin.parent.mkdir(parents=True)
    plugin.symlink_to(tmp_path / "an earlier checkout/docker-compose")
    (tmp_path / "programs").mkdir()
    path = hide_compose(tmp_path / "programs")
    assert shell("bash", str(COMPOSE), "install", home=tmp_path, PATH=path).returncode == 0
    assert shell("docker", "compose", "version", home=tmp_path, PATH=path).returncode == 0


def test_make_images_installs_compose_before_it_builds() -> None:
    told = shell("make", "--dry-run", "images", home=ROOT, MAKEFLAGS="")
    lines = told.stdout.splitlines()
    (install,) = (number for number, line in enumerate(lines) if "compose.sh install" in line)
    (build,) = (number for number, line in enumerate(lines) if "compose.sh build" in line)
    assert install < build


def services(profiles: str) -> dict[str, Any]:
    run = subprocess.run(
        ["bash", COMPOSE, "config", "--format=json"],
        env=dict(os.environ) | {"COMPOSE_PROFILES": profiles},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)["services"]


@pytest.mark.parametrize(("profiles", "engine"), [("cpu", "engine"), ("gpu", "engine-gpu")])
def test_workers_start_all_that_they_need_and_no_more(profiles: str, engine: str) -> None:
    found = services(profiles)
    assert set(found) == {"redis", "router", "workers", engine}
    assert set(found["workers"]["depends_on"]) == {"redis", "router"}
    assert found["router"]["depends_on"][engine]["condition"] == "service_healthy"


def test_judges_start_with_or_without_a_model_and_have_no_docker() -> None:
    found = services("cpu,judge")
    assert set(found) == {"redis", "router", "workers", "engine", "judges"}
    assert not found["judges"]["depends_on"]["judge-router"]["required"]
    assert "volumes" not in found["judges"]
    with_model = services("cpu,judge,judge-model")
    assert set(with_model) - set(found) == {"judge-engine", "judge-router"}
    assert with_model["judges"]["environment"]["SWERVE_JUDGE_ROUTER_URL"] == "http://judge-router:30000"


def test_only_the_gpu_engine_reserves_devices() -> None:
    found = services("cpu,gpu,trainer,otel")
    assert [name for name, service in found.items() if "deploy" in service] == ["engine-gpu"]


def test_nothing_but_the_pages_is_published_to_the_host() -> None:
    assert not any(
        "ports" in service for service in services("cpu,gpu,judge,judge-model,trainer,otel").values()
    )


@pytest.mark.parametrize(("profiles", "name"), [("cpu,delta", ""), ("gpu,delta-gpu", "-gpu")])
def test_a_receiver_is_found_at_its_engines_name_and_keeps_versions_where_the_engine_finds_them(
    profiles: str, name: str
) -> None:
    found = services(profiles)
    receiver, engine = found[f"receiver{name}"], found[f"engine{name}"]
    assert receiver["network_mode"] == f"service:engine{name}"
    kept = {volume["target"] for volume in receiver["volumes"] if volume["source"] == "received"}
    read = {volume["target"] for volume in engine["volumes"] if volume["source"] == "received"}
    assert kept == read == {"/received"}
    assert receiver["entrypoint"][2:5] == ["infra.serving.receiver", "--directory", "/received"]


def test_the_pages_are_published_to_this_machine_only_and_need_a_token() -> None:
    found = services("cpu,web")
    assert set(found) - set(services("cpu")) == {"web"}
    (port,) = found["web"]["ports"]
    assert (port["host_ip"], port["published"], port["target"]) == ("127.0.0.1", "8090", 8090)
    assert found["web"]["command"][1:6] == ["-m", "infra.web", "--host", "0.0.0.0", "--token-file"]
    (secret,) = found["web"]["secrets"]
    assert found["web"]["command"][6] == f"/run/secrets/{secret['source']}"
    assert all(volume["read_only"] for volume in found["web"]["volumes"])


def test_every_service_that_is_built_has_its_dockerfile() -> None:
    built = [service["build"] for service in services("cpu,trainer").values() if "build" in service]
    assert len(built) == 4
    assert all((ROOT / build["dockerfile"]).is_file() for build in built)
