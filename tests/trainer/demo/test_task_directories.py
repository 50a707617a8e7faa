"""The written family: swe-task-generator's fields, reproducible commits, and grading that tells right from
wrong.
"""

import json
import subprocess
from pathlib import Path

import docker
import pytest

from trainer.demo.family import make_task
from trainer.demo.task_directories import build_images, write_family, write_task

PREFIX = "swerve-demo-test"
FIELDS = {
    "instance_id",
    "repo",
    "base_commit",
    "head_commit",
    "problem_statement",
    "gold_patch",
    "fix_patch",
    "test_patch",
    "test_files",
    "changed_files",
    "image_name",
    "eval_script",
}


def graded(record: dict[str, str], *patches: str) -> int:
    """The exit status of the eval script in a fresh container, after the patches."""
    script = (
        "".join(f"git apply - <<'PATCH' || exit 99\n{patch}PATCH\n" for patch in patches)
        + record["eval_script"]
    )
    client = docker.from_env()
    container = client.containers.run(
        record["image_name"], ["bash", "-c", script], detach=True, network_mode="none"
    )
    try:
        return int(container.wait()["StatusCode"])
    finally:
        container.remove(force=True)
        client.close()


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("family")
    assert write_family(directory, seed=9, counts={"train": 2, "heldout": 1}, image_prefix=PREFIX) == 3
    return directory


@pytest.fixture(scope="module")
def record(family: Path) -> dict[str, str]:
    build_images(family)
    return json.loads((family / "train" / "task_001" / "task.json").read_bytes())


def test_a_task_folder_has_the_layouts_files_and_fields(family: Path) -> None:
    for folder in sorted(family.glob("*/task_*")):
        task = json.loads((folder / "task.json").read_bytes())
        assert task.keys() >= FIELDS
        assert all(task[field] for field in FIELDS)
        assert task["eval_script"] == (folder / "eval_script.sh").read_text()
        assert (folder / "Dockerfile").exists()


def test_the_commits_depend_on_the_seed_alone(tmp_path: Path) -> None:
    task = make_task(1, "train", 0)
    records = []
    for name in ("one", "two"):
        write_task(task, tmp_path / name, PREFIX)
        records.append(json.loads((tmp_path / name / "task.json").read_bytes()))
    assert records[0] == records[1]


def test_the_repository_holds_neither_the_fix_nor_the_tests(family: Path) -> None:
    repo = family / "train" / "task_001" / "repo"
    task = json.loads((repo.parent / "task.json").read_bytes())
    objects = subprocess.run(
        ["git", "cat-file", "--batch-all-objects", "--batch-check"],
        cwd=repo,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert task["base_commit"] in objects
    assert task["head_commit"] not in objects
    assert not (repo / "tests").exists()


def test_a_directory_in_use_is_refused(family: Path) -> None:
    with pytest.raises(ValueError, match="exists already"):
        write_family(family, seed=9, counts={"train": 1, "heldout": 1}, image_prefix=PREFIX)


def test_images_present_are_not_made_again(family: Path, record: dict[str, str]) -> None:
    assert build_images(family) == (0, 3)


def test_an_empty_directory_has_no_images_to_make(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no task_"):
        build_images(tmp_path)


@pytest.mark.slow
def test_the_fix_passes_and_the_broken_code_fails(record: dict[str, str]) -> None:
    assert graded(record, record["fix_patch"], record["test_patch"]) == 0
    assert graded(record, record["gold_patch"]) == 0
    assert graded(record, record["test_patch"]) == 1


def test_ending_the_interpreter_early_does_not_pass(record: dict[str, str]) -> None:
    path = json.loads(json.dumps(record["changed_files"]))[0]
    client = docker.from_env()
    script = f"git apply - <<'PATCH'\n{record['test_patch']}PATCH\n"
    script += f"sed -i '1i import os; os._exit(0)' {path}\n{record['eval_script']}"
    container = client.containers.run(
        record["image_name"], ["bash", "-c", script], detach=True, network_mode="none"
    )
    try:
        assert container.wait()["StatusCode"] == 1
    finally:
        container.remove(force=True)
        client.close()
