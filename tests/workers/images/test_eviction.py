"""What goes under a byte budget is Swerve's own, not needed, and the least recently used."""

import io
import json
import secrets
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from pipeline.taskfile import write_tasks
from tests.workers.claims import make_task
from tests.workers.images.conftest import Place
from tests.workers.images.registry import layer
from workers.docker.host import SOURCE
from workers.images import eviction
from workers.images.eviction import evict, our_images, taken_bytes

pytestmark = pytest.mark.docker

MB = 1_000_000


def pulled(place: Place, name: str, *layers: bytes, used_at: float) -> str:
    """An image of one megabyte unless its layers are given, last used at `used_at` seconds from now."""
    image = place.publish(name, *(layers or (layer(name, secrets.token_bytes(MB)),)))
    outcome = place.puller().pull(image)
    assert outcome.state == "pulled", outcome.reason
    _set_used(place, image, time.time() + used_at)
    return image


def _set_used(place: Place, image: str, at: float) -> None:
    with place.shelf._database() as database:
        database.execute("INSERT OR REPLACE INTO uses VALUES (?, ?)", (image, at))


def present(place: Place, *images: str) -> list[bool]:
    return [place.api.find(image) is not None for image in images]


@pytest.fixture
def container(docker_client: docker.DockerClient) -> Iterator[list[str]]:
    """Ids put here are removed at the end."""
    made: list[str] = []
    yield made
    for container_id in made:
        docker_client.api.remove_container(container_id, force=True)


def test_the_least_recently_used_go_first_and_no_more_than_must(place: Place) -> None:
    new = pulled(place, "new", used_at=-10)
    oldest = pulled(place, "oldest", used_at=-30)
    old = pulled(place, "old", used_at=-20)
    found = evict(place.api, place.shelf, 2 * MB + MB // 2)
    assert [image.names for image in found.evicted] == [(oldest,)]
    assert found.within
    assert present(place, oldest, old, new) == [False, True, True]


def test_a_use_makes_an_image_the_last_to_go(place: Place) -> None:
    first, second = pulled(place, "first", used_at=-30), pulled(place, "second", used_at=-20)
    place.shelf.note_used(first)
    evict(place.api, place.shelf, MB + MB // 2)
    assert present(place, first, second) == [True, False]


def test_an_image_of_a_container_stays_though_it_does_not_run(
    place: Place, docker_client: docker.DockerClient, container: list[str]
) -> None:
    used, unused = pulled(place, "used", used_at=-30), pulled(place, "unused", used_at=-20)
    container.append(docker_client.api.create_container(used, command="none")["Id"])
    found = evict(place.api, place.shelf, 0)
    assert present(place, used, unused) == [True, False]
    assert not found.within


def test_an_image_that_an_episode_holds_stays_until_it_is_released(place: Place) -> None:
    image = pulled(place, "held", used_at=-30)
    place.shelf.hold(image, "request/1", until=time.time() + 60)
    place.shelf.hold(image, "request/2", until=time.time() - 1)
    assert evict(place.api, place.shelf, 0).evicted == ()
    place.shelf.release(image, "request/1")
    assert len(evict(place.api, place.shelf, 0).evicted) == 1
    assert present(place, image) == [False]


def test_what_others_put_on_the_docker_host_is_never_touched(
    place: Place, docker_client: docker.DockerClient
) -> None:
    theirs = f"{place.hub}/theirs:latest"
    docker_client.api.import_image_from_data(layer("file", b"theirs"), repository=f"{place.hub}/theirs")
    shared = pulled(place, "shared", used_at=-30)
    docker_client.api.tag(shared, f"{place.hub}/also-theirs")
    assert our_images(place.api, place.shelf) == []
    assert evict(place.api, place.shelf, 0).evicted == ()
    assert present(place, theirs, shared, f"{place.hub}/also-theirs") == [True, True, True]


def test_layers_that_images_share_count_once_and_are_free_with_the_last(place: Place) -> None:
    base = layer("base", secrets.token_bytes(3 * MB))
    one = pulled(place, "one", base, layer("one", secrets.token_bytes(MB)), used_at=-30)
    two = pulled(place, "two", base, layer("two", secrets.token_bytes(MB)), used_at=-20)
    ours = our_images(place.api, place.shelf)
    assert taken_bytes(ours) == 5 * MB
    assert taken_bytes(ours[:1]) == 4 * MB
    assert [image.names for image in ours] == [(one,), (two,)]


def test_an_agents_image_goes_with_the_uses_of_the_task_and_before_its_source(
    place: Place, docker_client: docker.DockerClient, container: list[str]
) -> None:
    source, other = pulled(place, "source", used_at=-10), pulled(place, "other", used_at=-20)
    made = docker_client.api.create_container(source, command="none")["Id"]
    container.append(made)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo("more")
        entry.size = MB
        tar.addfile(entry, io.BytesIO(bytes(MB)))
    docker_client.api.put_archive(made, "/", archive.getvalue())
    labels = {"Labels": {eviction.AGENT_IMAGE: "1", SOURCE: source}}
    docker_client.api.commit(made, repository=f"{place.hub}/agent", tag="1", conf=labels)
    docker_client.api.remove_container(container.pop())
    agent = f"{place.hub}/agent:1"
    assert [image.names for image in our_images(place.api, place.shelf)] == [(other,), (agent,), (source,)]
    assert [image.names for image in evict(place.api, place.shelf, MB + MB // 2).evicted] == [
        (other,),
        (agent,),
    ]
    assert present(place, other, agent, source) == [False, False, True]


def test_a_budget_that_is_full_makes_room_for_a_pull_by_what_was_used_least(
    place: Place, tmp_path: Path
) -> None:
    old, kept = pulled(place, "old", used_at=-30), pulled(place, "kept", used_at=-40)
    new = place.publish("new", layer("new", secrets.token_bytes(MB)))
    file = tmp_path / "tasks.jsonl"
    write_tasks(file, [make_task(new, id="test:new"), make_task(kept, id="test:kept")])
    done = place.run("pull", str(file), "--budget-bytes", "2.5MB")
    assert (done.status, done.stdout.strip()) == (0, "1 pulled, 1 present, 0 failed")
    assert present(place, old, kept, new) == [False, True, True]


def test_a_pull_that_no_eviction_makes_room_for_is_told_and_taken_away(place: Place) -> None:
    kept = pulled(place, "kept", used_at=-30)
    new, next_one = (place.publish(name, layer(name, secrets.token_bytes(MB))) for name in ("new", "next"))
    puller = place.puller(budget_bytes=MB + MB // 2, keep=frozenset([kept, new, next_one]))
    outcomes = [puller.pull(new), puller.pull(next_one)]
    assert [outcome.state for outcome in outcomes] == ["failed", "failed"]
    assert outcomes[0].reason.startswith("the budget of 1.5 MB is full")
    assert present(place, kept, new, next_one) == [True, False, False]


def test_the_command_says_what_would_go_and_what_went(place: Place, tmp_path: Path) -> None:
    old, new = pulled(place, "old", used_at=-30), pulled(place, "new", used_at=-20)
    keep = tmp_path / "keep.jsonl"
    write_tasks(keep, [make_task(new)])
    command = ("evict", "--budget-bytes", "1.5MB", "--keep", str(keep), "--json")
    would, did = place.run(*command, "--dry-run"), place.run(*command)
    assert json.loads(would.stdout) | {"dry_run": False} == json.loads(did.stdout)
    assert json.loads(did.stdout)["evicted"] == [old]
    assert (would.status, did.status, present(place, old, new)) == (0, 0, [False, True])


def test_a_listing_tells_what_is_there_and_what_is_missing(place: Place, tmp_path: Path) -> None:
    there, missing = pulled(place, "there", used_at=-30), f"{place.hub}/missing:latest"
    file = tmp_path / "tasks.jsonl"
    write_tasks(file, [make_task(there, id="test:there"), make_task(missing, id="test:missing")])
    done = place.run("ls", str(file), "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.status == 1
    assert [(row["image"], row["present"], row["managed"]) for row in rows] == [
        (there, True, True),
        (missing, False, False),
    ]
    assert rows[0]["size_bytes"] == MB
    assert rows[0]["digest"] == place.shelf.entries()[there].digest
    assert "1 missing" in place.run("ls", str(file)).stdout
