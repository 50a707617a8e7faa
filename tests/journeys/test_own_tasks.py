"""docs/tasks.md, walked through: every command in it is run on a copy of examples/, and prints what stands there."""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import docker
import pytest

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(1400)]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/tasks.md"
IMAGE = "local/pricing"
ELLIPSIS = "..."  # stands for any lines
PROGRESS = "...  "  # begins a line that only says how far a task is, which depends on the machine


@pytest.fixture
def checkout(
    tmp_path: Path, docker_client: docker.DockerClient, task_image: str
) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """A directory with a copy of examples/ whose images have names of their own; and by what the page has, what is there instead."""
    mark = secrets.token_hex(4)
    image, clone = f"swerve-test/pricing-{mark}", f"shop-{mark}"
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "trainer").symlink_to(ROOT / "trainer")
    for file in (tmp_path / "examples").glob("mytasks/*/task.json"):
        file.write_text(file.read_text().replace(IMAGE, image))
    yield tmp_path, {IMAGE: image, "runs/shop": f"runs/{clone}"}
    for made in docker_client.images.list():
        for tag in (tag for tag in made.tags if tag.startswith((image, f"swerve-git/{clone}"))):
            docker_client.images.remove(tag, force=True)


def sessions() -> list[tuple[str, list[str]]]:
    """Each command of the page after a `$`, with the lines under it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```\n(\$ .*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
    return found


def masked(line: str) -> str:
    """`line` without what differs from machine to machine: times, sizes, versions, random names, widths."""
    line = re.sub(r"\d+(\.\d+)+(\+\w+)?|\d+ MB|swerve_[0-9a-f]+", "#", line)
    return re.sub(r"[\s=]+", " ", line).strip()


def test_the_page_on_own_tasks_prints_what_it_says(checkout: tuple[Path, Mapping[str, str]]) -> None:
    directory, names = checkout
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    for command, shown in sessions():
        for name, ours in names.items():
            command = command.replace(name, ours)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        text = done.stdout.replace(f"{directory}/runs/mytasks", "RUN")
        for name, ours in names.items():
            text = text.replace(ours, name)
        printed = Counter(masked(line) for line in text.splitlines() if not line.startswith(PROGRESS))
        expected = Counter(masked(line) for line in shown if line != ELLIPSIS)
        assert expected <= printed, f"$ {command}\n{text}"
        if ELLIPSIS not in shown:
            assert printed == expected, f"$ {command}\n{text}"


def test_the_page_has_all_commands_of_the_way() -> None:
    commands = " ".join(command for command, _ in sessions())
    for words in (
        "workers.tasksets from-git",
        "workers.tasksets plant",
        "workers.tasksets join",
        "workers.tasksets split",
        "workers.tasksets import",
        "workers.images build",
        "workers.verify",
        "workers.leaks",
        "trainer.run",
        "workers.tasksets export",
    ):
        assert f"python -m {words} " in commands


@pytest.mark.parametrize("task", sorted((ROOT / "examples/mytasks").iterdir()), ids=lambda task: task.name)
def test_an_example_has_the_files_that_the_page_names(task: Path) -> None:
    record = json.loads((task / "task.json").read_text())
    assert record["eval_script"] == (task / "eval_script.sh").read_text()
    assert record["gold_patch"] == record["fix_patch"] + record["test_patch"]
    fields = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert set(record) <= set(fields)
