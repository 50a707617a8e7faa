"""Images of task directories: built where they lack, anew when what goes into them has changed, else left alone."""

import json
from pathlib import Path

import pytest

from pipeline.taskfile import write_tasks
from tests.workers.claims import make_task
from tests.workers.images.conftest import Place
from workers.images.names import parse_name
from workers.images.pulling import content_digest

pytestmark = pytest.mark.docker


def write_task(place: Place, family: Path, number: int, dockerfile: str) -> str:
    """A task directory; returns the name of its image."""
    directory = family / f"task_{number:03d}"
    directory.mkdir(parents=True)
    image = f"{place.hub}/task-{number}:latest"
    (directory / "Dockerfile").write_text(dockerfile)
    (directory / "task.json").write_text(json.dumps({"image_name": image}))
    (directory / "file.txt").write_text("one")
    return image


@pytest.fixture
def family(tmp_path: Path) -> Path:
    return tmp_path / "family"


SCRATCH = "FROM scratch\nCOPY file.txt /\n"


def test_what_is_there_and_unchanged_is_not_built_again(place: Place, family: Path) -> None:
    image = write_task(place, family, 1, SCRATCH)
    assert place.run("build", str(family)).stdout.strip() == "1 built, 0 failed"
    first = place.api.find(image)
    assert place.run("build", str(family)).stdout.strip() == "1 present, 0 failed"
    (family / "task_001/file.txt").write_text("two")
    assert place.run("build", str(family)).stdout.strip() == "1 built, 0 failed"
    second = place.api.find(image)
    assert first is not None
    assert second is not None
    assert first.id != second.id
    assert place.shelf.entries()[image].id == second.id


def test_an_image_that_somebody_else_made_is_kept_unless_forced(place: Place, family: Path) -> None:
    image = write_task(place, family, 1, SCRATCH)
    published = place.publish("task-1")
    assert place.puller().pull(published).state == "pulled"
    found = place.api.find(published)
    assert found is not None
    place.api.tag(found.id, parse_name(image))
    kept = place.run("build", str(family))
    assert (kept.stdout.strip(), "--force" in kept.stderr) == ("1 present, 0 failed", True)
    assert place.run("build", str(family), "--force").stdout.strip() == "1 built, 0 failed"


def test_a_build_that_fails_keeps_its_log_and_its_name_can_be_fed_back(
    place: Place, family: Path, tmp_path: Path, task_image: str
) -> None:
    broken = write_task(place, family, 1, f"FROM {task_image}\nRUN echo it is broken && false\n")
    write_task(place, family, 2, SCRATCH)
    failures, logs = tmp_path / "failures.txt", tmp_path / "logs"
    options = ("--failures", str(failures), "--logs", str(logs), "--network", "none")
    done = place.run("build", str(family), *options)
    assert (done.status, done.stdout.splitlines()[0]) == (1, "1 built, 1 failed")
    assert [log.read_text().count("it is broken\n") for log in logs.iterdir()] == [1]
    assert str(logs) in failures.read_text()
    (family / "task_001/Dockerfile").write_text(SCRATCH)
    again = place.run("build", str(family), *options, "--only", f"@{failures}")
    assert (again.status, again.stdout.strip(), list(logs.iterdir())) == (0, "1 built, 0 failed", [])
    assert place.api.find(broken) is not None


def test_build_arguments_reach_the_build(place: Place, family: Path) -> None:
    image = write_task(place, family, 1, "FROM scratch\nARG WORD=none\nCOPY file.txt /\nLABEL word=$WORD\n")
    assert place.run("build", str(family), "--build-arg", "WORD=given").status == 0
    found = place.api.find(image)
    assert found is not None
    assert found.labels["word"] == "given"


def test_only_the_images_of_a_task_file_are_built_when_told_so(
    place: Place, family: Path, tmp_path: Path
) -> None:
    first, second = (write_task(place, family, number, SCRATCH) for number in (1, 2))
    file = tmp_path / "tasks.jsonl"
    write_tasks(file, [make_task(second)])
    assert place.run("build", str(family), "--only", str(file)).stdout.strip() == "1 built, 0 failed"
    assert place.api.find(first) is None


def test_task_directories_that_cannot_be_built_are_refused_by_name(
    place: Place, family: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    write_task(place, family, 1, SCRATCH)
    for change, says in (
        ('{"image_name": "Not Good"}', "image_name: image 'Not Good'"),
        ('{"image_name": 3}', "image_name: give the name"),
        ("{", "not JSON"),
    ):
        (family / "task_001/task.json").write_text(change)
        done = place.run("build", str(family))
        assert (done.status, "task_001/task.json" in done.stderr, says in done.stderr) == (2, True, True)
    assert place.run("build", str(empty)).status == 2
    write_task(place, family, 2, SCRATCH)
    (family / "task_002/Dockerfile").unlink()
    (family / "task_001/task.json").unlink()
    assert "no Dockerfile" in place.run("build", str(family)).stderr


def test_the_content_digest_tells_content_and_modes_and_not_times_or_what_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(SCRATCH)
    (tmp_path / ".dockerignore").write_text("# comment\nignored\n")
    file, ignored = tmp_path / "file.txt", tmp_path / "ignored"
    file.write_text("one")
    first = content_digest(tmp_path, {}, None)
    ignored.write_text("anything")
    file.write_text("one")
    assert content_digest(tmp_path, {}, None) == first
    file.chmod(0o755)
    assert content_digest(tmp_path, {}, None) != first
    assert content_digest(tmp_path, {"A": "1"}, None) != content_digest(tmp_path, {}, None)
