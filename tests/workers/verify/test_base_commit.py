"""A task's base commit is what the repository in its image is at, or the task is not what it says."""

from collections.abc import Iterator

import docker
import pytest
from msgspec.structs import replace

from pipeline.task import Task
from pipeline.taskfile import Gold, gold_path, write_gold, write_tasks
from tests.workers.conftest import RepoImage, built
from tests.workers.verify.spans import FILES, FIX, FIXED, TaskFile

pytestmark = pytest.mark.docker

LATER = """ && git commit -q --allow-empty -m builder && git branch builder && git branch sideways HEAD~1 \\
 && echo more >more.txt && git add -A && git commit -qm later && git tag v1 HEAD && git checkout -q -b aside sideways \\
 && echo other >other.txt && git add -A && git commit -qm aside && git checkout -q master"""


@pytest.fixture(scope="module")
def grown(docker_client: docker.DockerClient, task_image: str) -> Iterator[RepoImage]:
    """The base commit, an empty commit on it, and HEAD with one more file; on branch `aside` something else."""
    dockerfile = FILES["Dockerfile"].replace("git init -q .", "git init -q -b master .")
    dockerfile = dockerfile.replace("git commit -qm base", f"git commit -qm base{LATER}")
    dockerfile = dockerfile.replace(" && cp -r /workspace /testbed", "")  # a copy would be a leak
    with built(docker_client, FILES | {"Dockerfile": dockerfile}, task_image) as image:
        yield image


def told(file: TaskFile, image: RepoImage, *tasks: Task) -> dict[str, tuple[bool, str]]:
    """Whether each task is ok, and the reason or the warning, with the image's name and commit left out."""
    write_tasks(file.path, tasks)
    write_gold(gold_path(file.path), [Gold(id=task.id, patch=FIX) for task in tasks])
    lines = file.verify()[1].values()
    return {
        line["task"].removeprefix("test:"): (
            line["ok"],
            (line["reason"] or line["warning"])
            .replace(image.tag, "IMAGE")
            .replace(image.commit[:12], "HEAD")
            .removesuffix(": check out base_commit in the image, or set base_commit to what the image has"),
        )
        for line in lines
    }


@pytest.mark.slow
def test_a_base_commit_that_is_not_what_the_image_has_is_refused(file: TaskFile, grown: RepoImage) -> None:
    task = file.add("any", FIXED, image=grown.tag)
    script = "git checkout -q --force sideways~0 && echo built >built.txt\n"
    found = told(
        file,
        grown,
        replace(task, id="test:none", base_commit=""),
        replace(task, id="test:head", base_commit=grown.commit),
        replace(task, id="test:symbolic", base_commit="v1"),
        replace(task, id="test:short", base_commit=grown.commit[:10]),
        replace(task, id="test:absent", base_commit="a" * 40),
        replace(task, id="test:earlier", base_commit="HEAD~1"),
        replace(task, id="test:aside", base_commit="aside"),
        replace(task, id="test:set-up", base_commit="sideways", setup_script=script),
        replace(task, id="test:set-up-wrong", base_commit="v1", setup_script=script),
    )
    at = "base_commit: the repository at /workspace of IMAGE has HEAD checked out"
    wrong = {name: said for name, said in found.items() if said != (True, "")}
    sideways = wrong.pop("set-up-wrong")
    assert wrong == {
        "absent": (
            False,
            f"base_commit: {'a' * 40} is not a commit there; {at.removeprefix('base_commit: ')}",
        ),
        "earlier": (False, f"{at}, not HEAD~1, 1 commits before it"),
        "aside": (False, f"{at}, not aside, which is not in its history"),
    }
    assert not sideways[0]
    assert sideways[1].endswith("checked out, not v1, which is not in its history")


@pytest.mark.slow
def test_commits_of_an_images_builder_and_equal_files_are_worth_a_warning(
    file: TaskFile, grown: RepoImage
) -> None:
    task = file.add("any", FIXED, image=grown.tag)
    by_builder = replace(task, builder_commits=True)
    found = told(
        file,
        grown,
        replace(by_builder, id="test:earlier", base_commit="HEAD~1"),
        replace(by_builder, id="test:base", base_commit="HEAD~2"),
        replace(by_builder, id="test:aside", base_commit="aside"),
        replace(task, id="test:same-files", base_commit="builder", setup_script="git checkout -q sideways\n"),
    )
    assert found["earlier"] == (True, "base_commit: HEAD of the image is 1 commit of its builder later")
    assert found["base"] == (True, "base_commit: HEAD of the image is 2 commits of its builder later")
    assert found["aside"][0] is False
    assert found["same-files"][0] is True
    assert found["same-files"][1].endswith("checked out, which has the same files")
