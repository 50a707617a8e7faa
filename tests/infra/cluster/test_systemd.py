"""The units as systemd reads them, and the programs that they start."""

import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from infra.serving import engine, router
from tests.infra.cluster.programs import CLUSTER, run
from workers.judge.__main__ import judge_settings
from workers.settings import disk_settings, docker_hosts, image_settings, worker_settings

UNITS = sorted((CLUSTER / "systemd").iterdir())


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """The root of a host with our units, systemd's own targets, and the programs that the units start."""
    units = tmp_path / "etc/systemd/system"
    shutil.copytree(CLUSTER / "systemd", units)
    for kind in ("target", "slice"):
        for path in Path("/lib/systemd/system").glob(f"*.{kind}"):
            theirs = tmp_path / "usr/lib/systemd/system" / path.name
            theirs.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, theirs, follow_symlinks=False)
    for program in ("opt/swerve/.venv/bin/python", "usr/bin/redis-server", "usr/bin/otelcol-contrib"):
        (tmp_path / program).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    return tmp_path


def verified(host: Path) -> str:
    """What systemd finds wrong with our units."""
    names = [unit.name.replace("@.", "@1.") for unit in UNITS]
    checked = run("systemd-analyze", "verify", "--man=no", f"--root={host}", *names)
    return checked.stdout + checked.stderr


def test_systemd_finds_nothing_wrong_with_the_units(host: Path) -> None:
    assert len(UNITS) == 8
    assert verified(host) == ""


def test_systemd_would_find_a_wrong_key_and_a_wrong_value(host: Path) -> None:
    unit = host / "etc/systemd/system/swerve-worker@.service"
    unit.write_text(unit.read_text().replace("TasksMax", "TaskMax").replace("MemoryMax=4G", "MemoryMax=4Q"))
    said = verified(host)
    assert "TaskMax" in said
    assert "4Q" in said


def command_line(unit: str, variables: Mapping[str, str]) -> list[str]:
    """The arguments after `python -m MODULE` in ExecStart, as systemd expands them."""
    text = (CLUSTER / "systemd" / unit).read_text().replace("\\\n", " ").replace("%i", "2")
    (line,) = re.findall(r"^ExecStart=\S+ -m \S+(.*)$", text, re.MULTILINE)
    words: list[str] = []
    for word in line.split():
        if word.startswith("$") and not word.startswith("${"):
            words += shlex.split(variables[word[1:]])  # unbraced: split at spaces
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda match: variables[match[1]], word))
    return words


def test_a_worker_understands_the_settings_of_a_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = (CLUSTER / "swerve.env").read_text()
    given = dict(re.findall(r"^(SWERVE_\w+)=(.*)$", text, re.MULTILINE))
    offered = dict(re.findall(r"^# (SWERVE_DOCKER_\w+)=(.*)$", text, re.MULTILINE))
    certificates = tmp_path / "node2.example"
    certificates.mkdir()
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (certificates / name).touch()
    for name, value in (given | offered | {"SWERVE_DOCKER_CERTS": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    assert worker_settings().slots == 16
    assert judge_settings().slots == 8
    assert judge_settings().router_url == "", "a judge that is no model needs no router"
    assert image_settings().prefetch
    assert disk_settings().min_free_bytes > disk_settings().max_written_bytes
    assert [host.slots for host in docker_hosts()] == [8, 24]
    assert docker_hosts()[1].certificates == certificates


def test_the_units_start_programs_that_understand_them() -> None:
    variables = {
        "SWERVE_MODEL": "/srv/model",
        "SWERVE_ENGINE_DEVICE": "cuda",
        "SWERVE_ENGINE_HOST": "0.0.0.0",
    }
    variables["SWERVE_ENGINE_FLAGS"] = "--tensor-parallel 4 -- --mem-fraction-static 0.8"
    started = engine.parse_arguments(command_line("swerve-engine@.service", variables))
    assert (started.port, started.tensor_parallel, started.model) == (30102, 4, "/srv/model")
    assert started.passed_on == ["--mem-fraction-static", "0.8"]
    variables = {
        "SWERVE_ROUTER_HOST": "0.0.0.0",
        "SWERVE_ROUTER_FLAGS": "--engine http://a:1 --engine http://b:2",
    }
    assert router.parse_arguments(command_line("swerve-router.service", variables)).engine == [
        "http://a:1",
        "http://b:2",
    ]
    assert command_line("swerve-worker@.service", {}) == command_line("swerve-judge@.service", {}) == []


def test_a_judge_may_not_use_docker() -> None:
    text = (CLUSTER / "systemd/swerve-judge@.service").read_text()
    assert "workers.judge" in text
    assert "PrivateDevices" in text
    assert not re.search("^[^#]*docker", text, re.MULTILINE)
