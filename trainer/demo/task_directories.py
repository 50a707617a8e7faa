"""The family on disk, a directory per task in swe-task-generator's layout, and its images.

``DIR/{train,heldout,unseen}/task_NNN/`` holds task.json, Dockerfile, eval_script.sh and ``repo/``, a git repository with one commit.
Author and date are fixed, so commit hashes are a function of the seed. The hidden tests are in task.json's ``test_patch``
alone: neither the image nor the repository contains them.

There is one image per task: the shared base image plus one layer with the repository. A family is a hundred images that differ by a few
kilobytes. They are loaded as one archive whose manifests name the base's layers without containing them, which takes milliseconds per image
where a build takes half a second. A Docker host that requires every layer in the archive refuses it; then the images are built one by one
from the equivalent Dockerfiles.
"""

import hashlib
import io
import itertools
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, BuildError, DockerException, ImageLoadError, ImageNotFound

from trainer.demo.family import DemoTask, Split, make_tasks

BASE_IMAGE = "swerve/task-base:1"
CREATED_AT = "2025-01-01T00:00:00+00:00"
WORKDIR = "/workspace"
# Python reuses a bytecode file if its source has the same size and was changed in the same second, as edits here may be.
ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1"}
# COPY comes last, so that all images share every step but one.
DOCKERFILE = "\n".join([
    f"FROM {BASE_IMAGE}",
    *(f"ENV {key}={value}" for key, value in ENVIRONMENT.items()),
    f"WORKDIR {WORKDIR}",
    f"COPY repo {WORKDIR}",
    "",
])  # fmt: skip
_GIT = ("git", "-c", "user.name=demo", "-c", "user.email=demo@example.invalid", "-c", "core.autocrlf=false",
        "-c", "commit.gpgsign=false", "-c", "init.defaultBranch=main")  # fmt: skip


def write_family(directory: Path, *, seed: int, counts: Mapping[Split, int], image_prefix: str) -> int:
    """Write the given number of tasks of each split, and return the total.

    Raises ValueError if `directory` already holds something else.
    """
    for split, count in counts.items():
        if (directory / split).exists():
            raise ValueError(f"out: {directory / split} exists already; name a new directory")
        tasks = make_tasks(seed, split, count)
        folders = [directory / split / f"task_{number:03d}" for number in range(1, count + 1)]
        # What takes the time is ten processes of git for each task.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(write_task, tasks, folders, itertools.repeat(image_prefix)))
    return sum(counts.values())


def write_task(task: DemoTask, directory: Path, image_prefix: str) -> None:
    """Write one task's directory."""
    tests = hidden_tests(task)
    script = eval_script(tests)
    repo = directory / "repo"
    base_commit = _commit_base(task, repo)
    head_commit, fix_patch, test_patch = _derive_patches(task, repo, tests)
    record = {
        "instance_id": task.name,
        "repo": "swerve/demo",
        "base_commit": base_commit,
        "head_commit": head_commit,
        "problem_statement": task.issue,
        "gold_patch": fix_patch + test_patch,
        "fix_patch": fix_patch,
        "test_patch": test_patch,
        "test_files": list(tests),
        "changed_files": [task.path, *tests],
        # The tag names the content, so that an image of another version of the family is never used in its place.
        "image_name": f"{image_prefix}:{task.name}-{base_commit[:12]}",
        "eval_script": script,
        "pr_number": 1,
        "pr_title": f"Mend {task.function}",
        "merged": True,
        "created_at": CREATED_AT,
        "generation_method": "generated",
        "kind": task.kind,
    }
    (directory / "task.json").write_text(json.dumps(record, indent=2) + "\n")
    (directory / "Dockerfile").write_text(DOCKERFILE)
    (directory / "eval_script.sh").write_text(script)


def hidden_tests(task: DemoTask) -> dict[str, str]:
    """The test file by path: one test for each of the task's checks."""
    module = task.path.removesuffix(".py").rsplit("/", 1)[1]
    tests = [
        f"    def test_{task.function}_{number}(self):\n        self.assertEqual({call}, {value})\n"
        for number, (call, value) in enumerate(task.checks, 1)
    ]
    head = f"import unittest\n\nfrom {task.module} import {task.function}\n\n\n"
    name = task.function.title().replace("_", "")
    return {f"tests/test_{module}.py": f"{head}class {name}(unittest.TestCase):\n" + "\n".join(tests)}


def eval_script(tests: Iterable[str]) -> str:
    """The grading script: exit status 0 only when unittest ran the test files and its last line is OK.

    The script looks for that line because a patched module could end the interpreter early with status 0.
    """
    modules = " ".join(path.removesuffix(".py").replace("/", ".") for path in tests)
    run = f"python3 -m unittest {modules} 2>&1 | tee /dev/stderr | tail -n 1 | grep -qx OK"
    return "\n".join(["#!/bin/bash", "set -eo pipefail", f"cd {WORKDIR}", run, ""])


def _commit_base(task: DemoTask, repo: Path) -> str:
    _write_files(repo, {**task.files, ".gitignore": "__pycache__/\n"})
    _git(repo, "init", "-q", "--template=")
    return _commit(repo, "Small sums")


def _derive_patches(task: DemoTask, repo: Path, tests: dict[str, str]) -> tuple[str, str, str]:
    """(head commit, fix patch, test patch), made in a copy, so that the task's repository never contains the fix."""
    with tempfile.TemporaryDirectory() as scratch:
        clone = Path(scratch) / "repo"
        shutil.copytree(repo, clone)
        _write_files(clone, {task.path: task.fixed_files()[task.path]})
        fix_patch = _git(clone, "diff")
        _git(clone, "add", "-A")
        _write_files(clone, tests)
        _git(clone, "add", "-A", "-N")
        test_patch = _git(clone, "diff")
        return _commit(clone, f"Mend {task.function}"), fix_patch, test_patch


def _commit(repo: Path, message: str) -> str:
    _git(repo, "add", "-A")
    _git(repo, "commit", "-q", "-m", message)
    return _git(repo, "rev-parse", "HEAD").strip()


def _write_files(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def _git(repo: Path, *arguments: str) -> str:
    # The caller's git configuration is shut out: with it, the commit's hash would differ between machines.
    quiet = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "PATH": os.defpath}
    dated = {"GIT_AUTHOR_DATE": CREATED_AT, "GIT_COMMITTER_DATE": CREATED_AT}
    done = subprocess.run(
        [*_GIT, *arguments], cwd=repo, env=quiet | dated, check=True, capture_output=True, text=True
    )
    return done.stdout


def build_images(directory: Path) -> tuple[int, int]:
    """Makes every image of the family under `directory` that the Docker host lacks; returns the numbers made and already present.
    Raises ValueError if there are no tasks, no Docker host answers, or the base image is missing.
    """
    tasks = sorted(directory.glob("**/task_*/task.json"))
    if not tasks:
        raise ValueError(f"directory: no task_*/task.json under {directory}; write a family there first")
    wanted = {json.loads(task.read_bytes())["image_name"]: task.parent for task in tasks}
    try:
        client = docker.from_env()
        missing = {name: folder for name, folder in wanted.items() if not _present(client, name)}
        if missing:
            _make(client, missing)
    except (APIError, BuildError, DockerException) as error:
        raise ValueError(f"directory: its images could not be made: {error}") from error
    return len(missing), len(tasks) - len(missing)


def _present(client: docker.DockerClient, name: str) -> bool:
    try:
        client.images.get(name)
    except ImageNotFound:
        return False
    return True


def _make(client: docker.DockerClient, missing: dict[str, Path]) -> None:
    try:
        client.images.load(archive(client.api.inspect_image(BASE_IMAGE), missing))
    except (APIError, ImageLoadError):
        for name, folder in missing.items():
            client.images.build(path=str(folder), tag=name, rm=True)


def archive(base: dict[str, Any], folders: dict[str, Path]) -> bytes:
    """A docker-archive with one image for each (name, task folder), on top of the inspected `base`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        manifest = [dict(entry) for entry in _entries(tar, base, folders)]
        _add(tar, "manifest.json", json.dumps(manifest).encode())
    return buffer.getvalue()


def _entries(
    tar: tarfile.TarFile, base: dict[str, Any], folders: dict[str, Path]
) -> Iterator[dict[str, Any]]:
    beneath = base["RootFS"]["Layers"]
    for name, folder in folders.items():
        layer = _layer(folder / "repo")
        digest = hashlib.sha256(layer).hexdigest()
        config = json.dumps(_config(base, [*beneath, f"sha256:{digest}"])).encode()
        config_name = f"{hashlib.sha256(config).hexdigest()}.json"
        _add(tar, config_name, config)
        _add(tar, f"{digest}/layer.tar", layer)
        layers = [*(f"{each.removeprefix('sha256:')}/layer.tar" for each in beneath), f"{digest}/layer.tar"]
        yield {"Config": config_name, "RepoTags": [name], "Layers": layers}


def _config(base: dict[str, Any], layers: list[str]) -> dict[str, Any]:
    inherited = base["Config"]
    variables = [*(inherited["Env"] or []), *(f"{key}={value}" for key, value in ENVIRONMENT.items())]
    return {
        "architecture": base["Architecture"],
        "os": base["Os"],
        "created": CREATED_AT,
        "config": inherited | {"Env": variables, "WorkingDir": WORKDIR},
        "rootfs": {"type": "layers", "diff_ids": layers},
    }


def _layer(repo: Path) -> bytes:
    """The repository under the working directory, owned by root."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(repo, arcname=WORKDIR.lstrip("/"), filter=_owned_by_root)
    return buffer.getvalue()


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
