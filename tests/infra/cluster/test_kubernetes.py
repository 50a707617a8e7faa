"""The manifests, rendered by kustomize and checked against Kubernetes' schemas."""

import re
import shutil
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from infra import processes
from pipeline import keys
from tests.conftest import answers_ok, free_ports
from tests.infra.cluster.programs import CLUSTER, ROOT, run, tool
from workers.docker.host import DockerHost
from workers.judge.__main__ import judge_settings
from workers.settings import disk_settings, docker_hosts, image_settings, worker_settings

KUBERNETES = CLUSTER / "kubernetes"
COMPONENTS = sorted(path.name for path in (KUBERNETES / "components").iterdir())
OLDEST_KUBERNETES, NEWEST_KUBERNETES = "1.29", "1.37"


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


@pytest.mark.slow
def test_every_manifest_is_what_kubernetes_schemas_say(base: list[dict[str, Any]]) -> None:
    assert len(base) >= 20
    check_against_schemas(base)
    check_against_schemas(list(yaml.safe_load_all((KUBERNETES / "secret.example.yaml").read_text())))
    wrong = {**base[0], "metadata": {**base[0]["metadata"], "lables": {}}}
    with pytest.raises(kubernetes_validate.ValidationError, match="lables"):
        check_against_schemas([wrong])


@pytest.mark.slow_but_for("redis-tls")
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
    assert "/var/lib/docker" in mounts, "where Docker's data is, to see how much space is free"
    assert image_settings().prefetch, "a Docker host that starts empty gets its images in no other way"


def test_only_the_workers_docker_host_is_privileged(base: list[dict[str, Any]], tmp_path: Path) -> None:
    def privileged(objects: list[dict[str, Any]]) -> list[str]:
        every = [container for pod in pods(objects).values() for container in containers(pod)]
        return [one["name"] for one in every if one.get("securityContext", {}).get("privileged")]

    assert privileged(base) == ["docker"]
    assert privileged(with_components(["host-docker"], tmp_path)) == []


def test_a_judge_understands_its_environment_and_drains_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = with_components(["judges", "judge-model"], tmp_path)
    pod = pods(objects)["judge"]["spec"]
    given = {one["name"]: one["value"] for one in pod["containers"][0]["env"] if "value" in one}
    for name, value in (named(objects, "ConfigMap", "swerve")["data"] | given).items():
        monkeypatch.setenv(name, value)
    assert judge_settings().router_url == "http://judge-router:30000"
    assert judge_settings().drain_s < pod["terminationGracePeriodSeconds"]
    assert "docker" not in str(pod)


def test_a_judge_reaches_redis_and_its_router_only(tmp_path: Path) -> None:
    objects = with_components(["judges", "judge-model"], tmp_path)

    def reached_by(app: str) -> set[str]:
        """The pods that let `app` connect to them."""
        policies = [one["spec"] for one in objects if one["kind"] == "NetworkPolicy"]
        return {
            policy["podSelector"]["matchLabels"]["app"]
            for policy in policies
            for rule in policy.get("ingress", [])
            if app in str(rule["from"])
        }

    assert reached_by("'judge'") == {"redis", "judge-router"}
    assert reached_by("judge-router") == {"judge-engine"}
    settings = named(objects, "ConfigMap", "swerve")["data"]
    engines = named(objects, "StatefulSet", "judge-engine")["spec"]["replicas"]
    assert settings["SWERVE_JUDGE_ENGINES"] == str(engines)


def test_workers_are_counted_by_the_queue(tmp_path: Path) -> None:
    objects = with_components(["keda"], tmp_path)
    scaled = named(objects, "ScaledObject", "worker")
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"]["listName"] == keys.queue()
    assert trigger["metadata"]["listLength"] == named(objects, "ConfigMap", "swerve")["data"]["SWERVE_SLOTS"]
    assert "replicas" not in named(objects, "Deployment", "worker")["spec"]


@pytest.mark.slow
def test_the_router_has_the_paths_that_its_probes_request(base: list[dict[str, Any]], tmp_path: Path) -> None:
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
        processes.wait_until(lambda: answers_ok(alive), child=child, timeout_s=240, log=tmp_path / "log")
        assert answers_ok(f"http://127.0.0.1:{port}{paths['startup']}")
        with pytest.raises(urllib.error.HTTPError, match="503"):  # and not 404: it has no engine
            urllib.request.urlopen(f"http://127.0.0.1:{port}{paths['readiness']}", timeout=60)


def test_a_receiver_shares_its_directory_with_the_engine_of_its_pod_and_only_the_trainer_reaches_it(
    tmp_path: Path,
) -> None:
    objects = with_components(["receivers"], tmp_path)
    engine, receiver = pods(objects)["engine"]["spec"]["containers"]
    mounts = [
        {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "received"}
        for container in (engine, receiver)
    ]
    assert mounts == [{"/received"}, {"/received"}]
    assert receiver["command"][-4:] == ["--directory", "/received", "--host", "0.0.0.0"]
    rules = named(objects, "NetworkPolicy", "engine")["spec"]["ingress"]
    (rule,) = (rule for rule in rules if rule["ports"] == [{"port": 30300}])
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app": "trainer"}}}]
