"""Images end up under the name that tasks use, whole or not at all, and what cannot be had is told with its reason."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.taskfile import write_tasks
from tests.workers.claims import make_task
from tests.workers.images.conftest import Place
from tests.workers.images.registry import PATIENCE_S, Gate, Registry, broken_proxy, layer
from workers.images.names import Proxy, parse_name, parse_proxy

pytestmark = pytest.mark.docker

BIG = 24 * 1024**2  # more than sockets hold


def proxies(*hosts: str) -> tuple[Proxy, ...]:
    return tuple(map(parse_proxy, hosts))


@pytest.fixture
def gate(registry: Registry) -> Iterator[Gate]:
    gate = Gate(registry)
    yield gate
    gate.close()


def test_an_image_is_pulled_once_and_then_left_alone(place: Place) -> None:
    image = place.publish("one")
    first, second = place.puller().pull(image), place.puller().pull(image)
    assert (first.state, first.reason, second.state) == ("pulled", "", "present")
    assert place.api.find(image) is not None
    assert place.shelf.entries()[image].digest.startswith("sha256:")


def test_a_proxy_stands_in_for_a_registry_and_the_image_gets_the_tasks_name(place: Place) -> None:
    by_proxy = place.publish("two:v1")
    outcome = place.puller(proxies=proxies(place.registry.host)).pull(f"docker.io/{place.hub}/two:v1")
    assert (outcome.state, outcome.via) == ("pulled", by_proxy)
    found = place.api.find(f"{place.hub}/two:v1")
    assert found is not None
    assert found.tags == (f"{place.hub}/two:v1",)


def test_proxies_that_refuse_or_are_broken_are_passed_over(place: Place) -> None:
    place.publish("three")
    with socket.create_server(("127.0.0.1", 0)) as taken, broken_proxy() as broken:
        dead = f"127.0.0.1:{taken.getsockname()[1]}"
        taken.close()
        plan = proxies(dead, broken, place.registry.host)
        outcome = place.puller(proxies=plan).pull(f"{place.hub}/three")
    assert (outcome.state, outcome.reason) == ("pulled", "")
    assert place.registry.host in outcome.via


def test_what_a_proxy_lacks_is_asked_of_the_registry_itself(place: Place) -> None:
    image = place.publish("four")
    source = f"{place.registry.host}={place.registry.host}/elsewhere"
    outcome = place.puller(proxies=proxies(source)).pull(image)
    assert (outcome.state, outcome.via) == ("pulled", image)


def test_what_no_registry_has_fails_at_once_whatever_the_retries(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    puller = place.puller(retries=1000)
    waits: list[str] = []
    monkeypatch.setattr(puller.observer, "remark", lambda image, text: waits.append(text))
    outcome = puller.pull(f"{place.registry.host}/{place.hub}/nowhere")
    assert (outcome.state, waits) == ("failed", [])
    assert "not found" in outcome.reason
    assert place.shelf.entries() == {}


def test_what_may_mend_itself_is_asked_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.images.pulling.PAUSE_S", 0.01)
    with broken_proxy() as broken:
        puller = place.puller(retries=2)
        waits: list[str] = []
        monkeypatch.setattr(puller.observer, "remark", lambda image, text: waits.append(text))
        outcome = puller.pull(f"{broken}/{place.hub}/five")
    assert (outcome.state, len(waits)) == ("failed", 2)


def test_an_image_for_another_platform_is_refused_and_taken_away(place: Place) -> None:
    image = place.publish("six", architecture="s390x")
    outcome = place.puller().pull(image)
    assert (outcome.state, outcome.reason) == (
        "failed",
        "the image that arrived is for linux/s390x, not for linux/amd64",
    )
    assert place.api.find(image) is None


def test_an_image_that_is_there_for_another_platform_is_told_and_left_alone(place: Place) -> None:
    image = place.publish("seven", architecture="s390x")
    assert place.puller(platform="linux/s390x").pull(image).state == "pulled"
    outcome = place.puller().pull(image)
    assert (outcome.state, outcome.reason) == (
        "failed",
        "the image that is there is for linux/s390x, not for linux/amd64",
    )
    assert place.api.find(image) is not None


def test_a_name_with_a_digest_stands_for_that_very_manifest(place: Place) -> None:
    image = place.publish("eight")
    digest = place.registry.publish(f"{place.hub}/eight", [layer("file", b"of a digest")])
    name = f"{image.removesuffix(':latest')}@{digest}"
    assert place.puller().pull(name).state == "pulled"
    assert place.puller().pull(name).state == "present"


def test_a_manifest_that_is_not_what_its_digest_says_is_refused(place: Place) -> None:
    image = place.publish("nine")
    digest = place.registry.publish(f"{place.hub}/nine", [layer("file", b"the right one")])
    other = place.registry.publish(f"{place.hub}/nine", [layer("file", b"another one")])
    place.registry.blob_path(digest).write_bytes(place.registry.blob_path(other).read_bytes())
    name = f"{image.removesuffix(':latest')}@{digest}"
    outcome = place.puller(retries=3).pull(name)
    assert outcome.state == "failed"
    assert "digest" in outcome.reason
    assert place.api.find(name) is None


def test_a_pull_that_is_killed_leaves_nothing_broken_and_the_next_one_completes_it(
    place: Place, gate: Gate
) -> None:
    place.publish("big", layer("small", b"small" + bytes(64)), layer("big", bytes(BIG)))
    command = ("pull", "--image", f"{place.hub}/big", "--proxy", gate.host)
    with place.start(*command) as killed:
        assert gate.reached.wait(PATIENCE_S)
        killed.kill()
    assert place.api.find(f"{place.hub}/big") is None
    gate.opened.set()
    again = place.run(*command)
    assert (again.status, again.stdout.strip()) == (0, "1 pulled, 0 failed")
    assert place.api.find(f"{place.hub}/big") is not None


@pytest.mark.slow
def test_a_registry_that_is_killed_in_the_middle_is_asked_again_when_it_is_back(
    place: Place, tmp_path: Path
) -> None:
    registry = Registry(tmp_path)
    registry.start()
    registry.publish(f"{place.hub}/long", [layer("big", bytes(BIG))])
    gate = Gate(registry)
    command = ("pull", "--image", f"{place.hub}/long", "--proxy", gate.host)
    with place.start(*command) as pull:
        assert gate.reached.wait(PATIENCE_S)
        registry.kill()
        registry.start()
        gate.opened.set()
        assert pull.wait(PATIENCE_S) == 0
    assert place.api.find(f"{place.hub}/long") is not None
    gate.close()
    registry.kill()


def test_the_images_of_a_task_file_are_pulled_and_failures_can_be_fed_back(
    place: Place, tmp_path: Path
) -> None:
    there, missing = place.publish("task-1"), f"{place.registry.host}/{place.hub}/task-2:latest"
    images = [there, missing, there]
    tasks = [make_task(image, id=f"test:{number}") for number, image in enumerate(images)]
    file, failures = tmp_path / "tasks.jsonl", tmp_path / "failures.txt"
    write_tasks(file, tasks)
    first = place.run("pull", str(file), "--failures", str(failures))
    assert (first.status, first.stdout.splitlines()[0]) == (1, "1 pulled, 1 failed")
    assert failures.read_text().startswith(f"{missing}\t")
    place.publish("task-2")
    again = place.run("pull", f"@{failures}", "--failures", str(failures))
    assert (again.status, again.stdout.strip(), failures.read_text()) == (0, "1 pulled, 0 failed", "")
    assert place.run("pull", str(file)).stdout.strip() == "2 present, 0 failed"


def test_only_the_first_images_are_pulled_when_told_so(place: Place) -> None:
    images = [place.publish("first"), place.publish("second")]
    assert place.run("pull", "--first", "1", "--image", *images).stdout.strip() == "1 pulled, 0 failed"
    assert place.api.find(images[1]) is None


def test_misuse_is_refused_before_anything_is_asked(place: Place, tmp_path: Path) -> None:
    bad = tmp_path / "tasks.jsonl"
    write_tasks(bad, [make_task("Not An Image")])
    for arguments, says in (
        ((), "give tasks.jsonl"),
        ((str(bad),), "test:task: image: image 'Not An Image'"),
        (("--image", "UPPER/case"), "is not a repository name"),
        ((str(tmp_path / "absent.jsonl"),), "absent.jsonl"),
        (("--image", "x", "--budget-bytes", "much"), "give a size"),
    ):
        done = place.run("pull", *arguments)
        assert (done.status, says in done.stderr) == (2, True), done.stderr


def test_names_are_read_as_docker_reads_them() -> None:
    spelled = {
        "python": "python:latest",
        "docker.io/library/python:3": "python:3",
        "index.docker.io/team/image": "team/image:latest",
        "localhost/image": "localhost/image:latest",
        "mirror:5000/team/image:v1": "mirror:5000/team/image:v1",
        f"team/image:v1@sha256:{'a' * 64}": f"team/image@sha256:{'a' * 64}",
    }
    assert {text: str(parse_name(text)) for text in spelled} == spelled


def test_a_proxy_stands_for_the_hub_or_for_what_it_is_told() -> None:
    hub, part = parse_proxy("mirror:5000/"), parse_proxy("ghcr.io/team=mirror:5000/hub/team")
    assert str(hub.name_of(parse_name("python:3"))) == "mirror:5000/library/python:3"
    assert str(part.name_of(parse_name("ghcr.io/team/image:1"))) == "mirror:5000/hub/team/image:1"
    assert hub.name_of(parse_name("ghcr.io/team/image")) is None
    assert hub.name_of(parse_name(f"team/image@sha256:{'a' * 64}")) is None
