"""What a cluster is set up with, each part in the hands of its own tool: systemd, dockerd, Slurm, kubectl's kustomize and Kubernetes'
schemas, shellcheck, redis-server with TLS. Nothing here starts a fleet.
"""

import getpass
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import docker
import kubernetes_validate
import pytest
import yaml

from infra import processes
from infra.serving import engine, router
from pipeline import keys
from tests.conftest import answers_ok, free_ports
from workers.docker.host import DockerHost
from workers.settings import disk_settings, docker_hosts, image_settings, worker_settings

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "infra/cluster"
KUBERNETES = CLUSTER / "kubernetes"
BATCH_FILES = sorted((CLUSTER / "slurm").glob("*.sbatch"))
SCRIPTS = sorted([*CLUSTER.rglob("*.sh"), *BATCH_FILES])
UNITS = sorted((CLUSTER / "systemd").iterdir())
COMPONENTS = sorted(path.name for path in (KUBERNETES / "components").iterdir())
OLDEST_KUBERNETES, NEWEST_KUBERNETES = "1.29", "1.37"


def tool(name: str) -> str:
    """A program out of a Python package of the development environment."""
    return str(ROOT / ".venv/bin" / name)


def run(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, **options)


def test_every_script_is_clean() -> None:
    checked = run(tool("shellcheck"), *SCRIPTS, cwd=ROOT)
    assert checked.returncode == 0, checked.stdout
    assert len(SCRIPTS) == 8


# systemd


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
    """What systemd has to say against our units."""
    names = [unit.name.replace("@.", "@1.") for unit in UNITS]
    checked = run("systemd-analyze", "verify", "--man=no", f"--root={host}", *names)
    return checked.stdout + checked.stderr


def test_systemd_finds_nothing_wrong_with_the_units(host: Path) -> None:
    assert len(UNITS) == 6
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
    assert command_line("swerve-worker@.service", {}) == []


# A node


SETUP = CLUSTER / "node_setup.sh"

# Stand-ins for what a container has no use for: they write down what they were asked and keep as much state as the script looks at.
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


@pytest.mark.docker
def test_a_node_is_set_up_once_and_then_left_alone(
    docker_client: docker.DockerClient, task_image: str
) -> None:
    script = "node; echo ==; node; echo ==; node --start; echo ==; node --start; echo ==; cat /etc/docker/daemon.json"
    first, again, start, again_after_start, daemon = in_a_container(docker_client, task_image, script).split(
        "==\n"
    )
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
    settings = json.loads(daemon)
    assert settings["registry-mirrors"] == ["https://mirror.example"], "what was there stays"
    assert settings["icc"] is False
    assert settings["data-root"] == "/var/lib/docker"


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
        (["--role", "trainer"], "no role is called trainer"),
        (["--role", "worker", "--workers", "many"], "--workers many: give a whole number"),
        (["--role", "engine", "--gpus", "0,11"], "--gpus 0,11: give digits"),
        (["--role", "worker", "--docker-tls", "/nowhere"], "ca.pem, cert.pem and key.pem must lie there"),
        (["--rol", "worker"], "unknown option --rol"),
    ],
)
def test_a_nodes_misuse_is_named(flags: list[str], said: str) -> None:
    refused = run("bash", SETUP, *flags)
    assert refused.returncode == 2
    assert said in refused.stderr


def parsed_by_dockerd(settings: str, directory: Path) -> str:
    """What dockerd says when given these settings and a note that it runs already; it starts nothing then."""
    (directory / "daemon.json").write_text(settings)
    (directory / "pidfile").write_text(str(os.getpid()))
    flags = [f"--{name}={directory / name}" for name in ("data-root", "exec-root", "pidfile")]
    flags += [f"--config-file={directory / 'daemon.json'}", f"--host=unix://{directory / 'docker.sock'}"]
    # It mounts its folder over itself before it looks whether it runs: in a name space that ends with it.
    started = run("unshare", "--net", "--mount", "dockerd", *flags)
    assert started.returncode != 0
    return started.stderr


@pytest.mark.docker
def test_dockerd_understands_its_settings(tmp_path: Path) -> None:
    settings = (CLUSTER / "daemon.json").read_text()
    assert re.search(r"pid file found|still running", parsed_by_dockerd(settings, tmp_path))
    assert "iccc" in parsed_by_dockerd(settings.replace('"icc"', '"iccc"'), tmp_path)
    assert "log-opts" in parsed_by_dockerd(settings.replace('"max-file": "2"', '"max-file": 2'), tmp_path)


# Slurm


SLURM_CONF = """
ClusterName=planned
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={node_port}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={place}/state
SlurmctldPidFile={place}/pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=INFINITE
NodeName=gpu[1-4] NodeAddr=127.0.0.1 CPUs=128 RealMemory=1000000 Gres=gpu:8 State=CLOUD
PartitionName=all Nodes=gpu[1-4] Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Slurm controller of nodes that do not exist: it plans jobs and runs none. What sbatch needs in its environment."""
    place, (port, node_port) = tmp_path_factory.mktemp("slurm"), free_ports(2)
    (place / "state").mkdir()
    places = {"host": socket.gethostname().split(".")[0], "user": getpass.getuser(), "place": place}
    settings = SLURM_CONF.format(port=port, node_port=node_port, **places)
    (place / "slurm.conf").write_text(settings)
    (place / "gres.conf").write_text("NodeName=gpu[1-4] Name=gpu Count=8\n")
    environment = dict(os.environ) | {"SLURM_CONF": str(place / "slurm.conf")}
    log = place / "log"
    with ExitStack() as cleanup:
        child = processes.start(
            "slurmctld", ["slurmctld", "-D", "-i", "-c"], log=log, environment=environment
        )
        cleanup.callback(child.stop, grace_s=5)

        def answers() -> bool:
            return " is UP" in run("scontrol", "ping", env=environment).stdout

        processes.wait_until(answers, child=child, timeout_s=30, log=log)
        yield environment


def planned(batch_file: Path, slurm: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return run("sbatch", "--test-only", batch_file, env=slurm, cwd=ROOT)


@pytest.mark.parametrize("batch_file", BATCH_FILES, ids=lambda path: path.stem)
def test_slurm_would_run_every_batch_file(batch_file: Path, slurm: dict[str, str]) -> None:
    plan = planned(batch_file, slurm)
    assert re.search(r"Job \d+ to start at", plan.stderr), plan.stderr


def test_slurm_would_not_run_what_it_does_not_understand(slurm: dict[str, str], tmp_path: Path) -> None:
    text = (CLUSTER / "slurm/worker.sbatch").read_text()
    for right, wrong, said in [
        ("--requeue", "--requeueing", "unrecognized option"),
        ("--signal=B:USR1@180", "--signal=B:USR9@180", "Invalid --signal"),
        ("--mem=64G", "--mem=64T", "not available"),
    ]:
        assert right in text
        (tmp_path / "wrong.sbatch").write_text(text.replace(right, wrong))
        assert said in planned(tmp_path / "wrong.sbatch", slurm).stderr


@pytest.mark.parametrize("batch_file", BATCH_FILES, ids=lambda path: path.stem)
def test_every_job_comes_back_after_its_time_is_up(batch_file: Path) -> None:
    text = batch_file.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", text, re.MULTILINE))
    assert {"requeue", "signal", "time", "output"} <= {*options}
    assert options["open-mode"] == "append", "or the second try would write over the first one's words"
    assert options["signal"].startswith("B:USR1@"), (
        "to the batch shell, and not to be taken for scancel's TERM"
    )
    assert "USR1" in re.findall(r"^trap .* (\w+)$", text, re.MULTILINE)


# Kubernetes


def rendered(directory: Path) -> list[dict[str, Any]]:
    """What kustomize makes of it."""
    made = run(tool("kubectl"), "kustomize", directory)
    assert made.returncode == 0, made.stderr
    return list(yaml.safe_load_all(made.stdout))


@pytest.fixture(scope="module")
def base() -> list[dict[str, Any]]:
    return rendered(KUBERNETES)


def with_components(names: list[str], directory: Path) -> list[dict[str, Any]]:
    shutil.copytree(KUBERNETES, directory / "base")
    overlay = {"resources": ["base"], "components": [f"base/components/{name}" for name in names]}
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    return rendered(directory)


def named(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [
        one
        for one in objects
        if one["kind"] == kind and re.sub(r"-[a-z0-9]{10}$", "", one["metadata"]["name"]) == name
    ]
    return found


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod templates by the name of what runs them."""
    return {
        one["metadata"]["name"]: one["spec"]["template"]
        for one in objects
        if one["kind"] in ("Deployment", "StatefulSet")
    }


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def check_against_schemas(objects: list[dict[str, Any]]) -> None:
    for one in objects:
        if not one["apiVersion"].startswith("keda.sh/"):
            for version in (OLDEST_KUBERNETES, NEWEST_KUBERNETES):
                kubernetes_validate.validate(one, version, strict=True)


def test_every_manifest_is_what_kubernetes_schemas_say(base: list[dict[str, Any]]) -> None:
    assert len(base) >= 20
    check_against_schemas(base)
    check_against_schemas(list(yaml.safe_load_all((KUBERNETES / "secret.example.yaml").read_text())))
    wrong = {**base[0], "metadata": {**base[0]["metadata"], "lables": {}}}
    with pytest.raises(kubernetes_validate.ValidationError, match="lables"):
        check_against_schemas([wrong])


@pytest.mark.parametrize("names", [*([name] for name in COMPONENTS), COMPONENTS], ids="+".join)
def test_every_component_fits(names: list[str], tmp_path: Path) -> None:
    objects = with_components(names, tmp_path)
    check_against_schemas(objects)
    check_references(objects)


def check_references(objects: list[dict[str, Any]]) -> None:
    """What pods name is there: config maps, volumes, variables; what selects pods selects some."""
    maps = {one["metadata"]["name"] for one in objects if one["kind"] == "ConfigMap"}
    labels = [pod["metadata"]["labels"]["app"] for pod in pods(objects).values()]
    for pod in pods(objects).values():
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])} | {"data"}
        used = {
            volume["configMap"]["name"] for volume in pod["spec"].get("volumes", []) if "configMap" in volume
        }
        for container in containers(pod):
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
            used |= {source["configMapRef"]["name"] for source in container.get("envFrom", [])}
            check_variables(container)
        assert used <= maps
    for one in objects:
        if one["kind"] == "Service":
            assert one["spec"]["selector"]["app"] in labels
        if one["kind"] == "PodDisruptionBudget":
            assert one["spec"]["selector"]["matchLabels"]["app"] in labels


def check_variables(container: dict[str, Any]) -> None:
    """$(NAME) is expanded only if NAME comes before."""
    known: set[str] = set()
    for variable in container.get("env", []):
        assert set(re.findall(r"\$\((\w+)\)", variable.get("value", ""))) <= known, variable["name"]
        known.add(variable["name"])


def test_every_reference_in_the_base_holds(base: list[dict[str, Any]]) -> None:
    check_references(base)
    settings = named(base, "ConfigMap", "swerve")["data"]
    assert int(settings["SWERVE_ENGINES"]) == named(base, "StatefulSet", "engine")["spec"]["replicas"]
    assert (
        named(base, "ConfigMap", "redis-conf")["data"]["redis.conf"]
        == (ROOT / "infra/redis/redis.conf").read_text()
    )
    trainer = named(base, "StatefulSet", "trainer")["spec"]
    (container,) = trainer["template"]["spec"]["containers"]
    given = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert given["NODES"] == str(trainer["replicas"])
    assert given["GPUS"] == container["resources"]["limits"]["nvidia.com/gpu"]


def test_the_worker_understands_its_environment_and_drains_in_time(
    base: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = pods(base)["worker"]["spec"]
    given = {
        variable["name"]: variable["value"] for variable in pod["containers"][0]["env"] if "value" in variable
    }
    for name, value in (named(base, "ConfigMap", "swerve")["data"] | given).items():
        monkeypatch.setenv(name, value)
    settings = worker_settings()
    assert settings.slots == 16
    assert settings.router_url == "http://router:30000"
    assert settings.drain_s < pod["terminationGracePeriodSeconds"]
    assert docker_hosts() == (DockerHost("unix:///run/docker/docker.sock"),)
    assert disk_settings().min_free_bytes == 10_000_000_000
    mounts = {one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    assert "/var/lib/docker" in mounts, "where the engine's data is, to see how much room there is"
    assert image_settings().prefetch, "nobody else brings images to an engine that begins empty"


def test_only_the_workers_docker_engine_is_privileged(base: list[dict[str, Any]], tmp_path: Path) -> None:
    def privileged(objects: list[dict[str, Any]]) -> list[str]:
        every = [container for pod in pods(objects).values() for container in containers(pod)]
        return [one["name"] for one in every if one.get("securityContext", {}).get("privileged")]

    assert privileged(base) == ["docker"]
    assert privileged(with_components(["host-docker"], tmp_path)) == []


def test_workers_are_counted_by_the_queue(tmp_path: Path) -> None:
    objects = with_components(["keda"], tmp_path)
    scaled = named(objects, "ScaledObject", "worker")
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"]["listName"] == keys.QUEUE
    assert trigger["metadata"]["listLength"] == named(objects, "ConfigMap", "swerve")["data"]["SWERVE_SLOTS"]
    assert "replicas" not in named(objects, "Deployment", "worker")["spec"]


def test_the_routers_probes_ask_what_it_answers(base: list[dict[str, Any]], tmp_path: Path) -> None:
    port, metrics_port = free_ports(2)
    command = [
        tool("python"),
        "-m",
        "infra.serving.router",
        f"--port={port}",
        f"--metrics-port={metrics_port}",
    ]
    (container,) = pods(base)["router"]["spec"]["containers"]
    paths = {
        probe: container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")
    }
    with ExitStack() as cleanup:
        child = processes.start("router", command, log=tmp_path / "log")
        cleanup.callback(child.stop, grace_s=1)
        alive = f"http://127.0.0.1:{port}{paths['liveness']}"
        processes.wait_until(lambda: answers_ok(alive), child=child, timeout_s=60, log=tmp_path / "log")
        assert answers_ok(f"http://127.0.0.1:{port}{paths['startup']}")
        with pytest.raises(urllib.error.HTTPError, match="503"):  # and not 404: it has no engine
            urllib.request.urlopen(f"http://127.0.0.1:{port}{paths['readiness']}", timeout=5)
