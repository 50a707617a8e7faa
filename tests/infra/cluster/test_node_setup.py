"""node_setup.sh in a container, and the settings that it gives to dockerd."""

import json
import os
import re
import sys
from pathlib import Path

import docker
import pytest

from tests.infra.cluster.programs import CLUSTER, ROOT, run
from workers.sandbox.first_process import BUILT

SETUP = CLUSTER / "node_setup.sh"

# Stand-ins for programs that do nothing useful in a container: they record their calls, and keep the state that the script reads.
STAND_INS = r"""
set -e
mkdir /stubs && cd /stubs
stub() { { echo '#!/bin/sh'; echo 'echo "'$1' $*" >>/calls'; cat; } >$1; chmod +x $1; }
stub apt-get <<<'case "$*" in *install*) touch /stubs/installed;; esac'
stub dpkg-query <<<'[ ! -e /stubs/installed ] || printf installed'
stub sysctl <<<''
stub musl-gcc <<<''
stub useradd <<<'echo swerve:x:990:990::/var/lib/swerve:/bin/false >>/etc/passwd; echo swerve:x:990: >>/etc/group'
stub usermod <<<'echo docker:x:991:swerve >>/etc/group'
stub systemctl <<<'for unit; do :; done
case "$*" in
*is-enabled*) grep -qx $unit /stubs/enabled 2>/dev/null;;
*is-active*) grep -qx $unit /stubs/active 2>/dev/null;;
enable*) echo $unit >>/stubs/enabled;;
start*) echo $unit >>/stubs/active;;
esac'
stub python <<<'case "$2" in
venv) mkdir -p $3/bin; printf "#!/bin/sh\necho pip \"\$*\" >>/calls\n" >$3/bin/python; chmod +x $3/bin/python;;
*) exec python3 "$@";;
esac'
mkdir -p /etc/docker && echo '{"registry-mirrors": ["https://mirror.example"], "icc": true}' >/etc/docker/daemon.json
export PATH=/stubs:$PATH
node() { bash /source/infra/cluster/node_setup.sh --role worker --role redis --python /stubs/python --workers 2 "$@"; }
"""


def in_a_container(client: docker.DockerClient, image: str, script: str) -> str:
    # What .dockerignore lets through, so neither runs/ nor .venv.
    folders = ("constraints.txt", "pyproject.toml", "infra", "pipeline", "workers", "trainer")
    volumes = {str(ROOT / name): {"bind": f"/source/{name}", "mode": "ro"} for name in folders}
    output = client.containers.run(
        image,
        ["bash", "-c", STAND_INS + script],
        volumes=volumes,
        network_mode="none",
        remove=True,
        stderr=True,
    )
    return output.decode()


@pytest.mark.slow
@pytest.mark.docker
def test_a_node_is_set_up_once_and_then_left_alone(
    docker_client: docker.DockerClient, task_image: str
) -> None:
    script = "node; echo ==; node; echo ==; node --start; echo ==; node --start; echo ==; cat /etc/docker/daemon.json"
    parts = in_a_container(docker_client, task_image, f"{script}; echo ==; cat /calls").split("==\n")
    first, again, start, again_after_start, daemon, calls = parts
    assert (
        "install ca-certificates python3 python3-venv iptables gcc musl-tools docker.io redis-server" in first
    )
    assert "enable swerve-worker@2.service" in first
    assert "start swerve" not in first
    assert "nothing to do" in again
    assert [line.split()[-1] for line in start.splitlines() if ": start" in line] == [
        "swerve-worker@1.service",
        "swerve-worker@2.service",
        "swerve-redis.service",
    ]
    assert "nothing to do" in again_after_start
    (compiled,) = (line for line in calls.splitlines() if line.startswith("musl-gcc"))
    assert f" -o /opt/swerve/.venv/{BUILT.relative_to(sys.prefix)} " in compiled, "workers look for it there"
    settings = json.loads(daemon)
    assert settings["registry-mirrors"] == ["https://mirror.example"], "what was there stays"
    assert settings["icc"] is False
    assert settings["data-root"] == "/var/lib/docker"


@pytest.mark.slow
@pytest.mark.docker
def test_a_trainer_gets_an_environment_of_its_own_and_no_unit(
    docker_client: docker.DockerClient, task_image: str
) -> None:
    script = (
        "trainer() { bash /source/infra/cluster/node_setup.sh --role trainer --python /stubs/python; }; "
        "trainer; echo ==; trainer; echo ==; cat /calls"
    )
    first, again, calls = in_a_container(docker_client, task_image, script).split("==\n")
    assert "make /opt/swerve/.venv-trainer with the learner" in first
    assert "enable swerve" not in first
    assert "nothing to do" in again
    (install,) = (line for line in calls.splitlines() if ".requirements-trainer" in line)
    assert "--constraint /opt/swerve/constraints.txt" in install


@pytest.mark.docker
def test_a_dry_run_touches_nothing(docker_client: docker.DockerClient, task_image: str) -> None:
    listing = "find / -xdev -newer /stubs -type f -not -path '/proc/*' | sort"
    script = (
        f"node --help >/dev/null; {listing} >/tmp/before; node --dry-run; {listing} >/tmp/after; echo ==; "
    )
    said, changed = in_a_container(
        docker_client, task_image, script + "diff /tmp/before /tmp/after | grep -v -e /tmp/ -e /calls || true"
    ).split("==\n")
    assert all(line.startswith("node: would ") for line in said.splitlines())
    assert "would restart Docker" in said
    assert [line for line in changed.splitlines() if line.startswith(("<", ">"))] == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "give at least one --role"),
        (["--role", "learner"], "no role is called learner"),
        (["--role", "worker", "--workers", "many"], "--workers many: give a whole number"),
        (["--role", "judge", "--judges", "0"], "--judges 0: give a whole number"),
        (["--role", "engine", "--gpus", "0,11"], "--gpus 0,11: give digits"),
        (["--role", "worker", "--docker-tls", "/nowhere"], "it must hold ca.pem, cert.pem and key.pem"),
        (["--rol", "worker"], "unknown option --rol"),
    ],
)
def test_a_nodes_misuse_is_named(flags: list[str], said: str) -> None:
    refused = run("bash", SETUP, *flags)
    assert refused.returncode == 2
    assert said in refused.stderr


def test_a_judges_node_gets_no_docker() -> None:
    planned = run("bash", SETUP, "--dry-run", "--role", "judge", "--judges", "2")
    assert planned.returncode == 0, planned.stderr
    assert "would enable swerve-judge@2.service" in planned.stdout
    assert "make /opt/swerve/.venv with base workers" in planned.stdout
    assert not re.search("docker", planned.stdout, re.IGNORECASE)


def parsed_by_dockerd(settings: str, directory: Path) -> str:
    """What dockerd prints for these settings when its pid file says that it runs already; then it starts nothing."""
    (directory / "daemon.json").write_text(settings)
    (directory / "pidfile").write_text(str(os.getpid()))
    flags = [f"--{name}={directory / name}" for name in ("data-root", "exec-root", "pidfile")]
    flags += [f"--config-file={directory / 'daemon.json'}", f"--host=unix://{directory / 'docker.sock'}"]
    # It mounts its directory over itself before it checks whether it runs; the mount namespace ends with it.
    started = run("unshare", "--net", "--mount", "dockerd", *flags)
    assert started.returncode != 0
    return started.stderr


@pytest.mark.docker
def test_dockerd_understands_its_settings(tmp_path: Path) -> None:
    settings = (CLUSTER / "daemon.json").read_text()
    assert re.search(r"pid file found|still running", parsed_by_dockerd(settings, tmp_path))
    assert "iccc" in parsed_by_dockerd(settings.replace('"icc"', '"iccc"'), tmp_path)
    assert "log-opts" in parsed_by_dockerd(settings.replace('"max-file": "2"', '"max-file": 2'), tmp_path)
