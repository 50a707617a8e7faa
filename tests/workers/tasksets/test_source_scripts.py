"""The scripts that importers write, run in containers laid out as each source's images are."""

import io
import json
import re
import secrets
import subprocess
import sys
import tarfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import docker
import pytest

from pipeline import task as records
from workers.grading import swebench_rules
from workers.tasksets import r2e_gym, swe_bench_pro, swe_rebench, swe_smith
from workers.tasksets.rows import Fields, read_rows

pytestmark = pytest.mark.docker

FIXTURES = Path(__file__).with_name("fixtures")
USELESS = "diff --git a/NOTE.txt b/NOTE.txt\nnew file mode 100644\n--- /dev/null\n+++ b/NOTE.txt\n@@ -0,0 +1 @@\n+noted\n"
# In every layout: the commit before the fix, except for SWE-smith's, which has the working code.
DOCKERFILE = """
FROM {base}
ENV GIT_AUTHOR_DATE=2025-01-01T00:00:00Z GIT_COMMITTER_DATE=2025-01-01T00:00:00Z
COPY . /app
WORKDIR /app
RUN git init -q . && git config user.name t && git config user.email t@example.invalid \\
 && mv hidden.py fix.py / && git add -A && git commit -qm base && git tag base \\
 && cp /hidden.py tests/test_lengths.py && cp /fix.py src/units/lengths.py && git add -A && git commit -qm fix \\
 && git tag fix && cp -r /app /smith && git checkout -q base && cp -r /app /testbed && cp -r /app /units \\
 && mkdir -p /r2e_tests /testbed/.venv/bin && cp /hidden.py /r2e_tests/test_1.py \\
 && printf '\\ndef test_longest_of_words():\\n    longest(["many"])\\n' >>/r2e_tests/test_1.py \\
 && echo '*' >/testbed/.venv/.gitignore && ln -s /usr/bin/python3 /testbed/.venv/bin/python \\
 && echo '.venv/bin/python -m pytest -rA r2e_tests' >/testbed/run_tests.sh
"""


@dataclass(frozen=True, slots=True)
class Images:
    tag: str
    base: str  # commits
    fix: str


@pytest.fixture(scope="module")
def images(docker_client: docker.DockerClient, task_image: str) -> Iterator[Images]:
    (smith, *_) = read_rows(FIXTURES / "swe_smith/rows.jsonl")
    (rebench,) = read_rows(FIXTURES / "swe_rebench/first.jsonl")
    buggy = (FIXTURES / "repository/src/units/lengths.py").read_text()
    tests = (FIXTURES / "repository/tests/test_lengths.py").read_text()
    added = re.findall(r"^\+(?!\+\+)(.*)$", rebench.text("test_patch"), re.MULTILINE)
    fixed = buggy.replace("max(found) or default", "max(found, default=default)")
    assert fixed != buggy
    assert smith.text("patch")
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        tar.add(FIXTURES / "repository", arcname=".")
        _add(tar, "Dockerfile", DOCKERFILE.format(base=task_image))
        _add(tar, "hidden.py", tests + "\n".join(added) + "\n")
        _add(tar, "fix.py", fixed)
        _add(tar, ".dockerignore", "Dockerfile\n")
    context.seek(0)
    tag = f"swerve-test:{secrets.token_hex(6)}"
    docker_client.images.build(fileobj=context, custom_context=True, tag=tag, rm=True, nocache=True)
    told = docker_client.containers.run(
        tag, ["git", "rev-parse", "base", "fix"], remove=True, network_mode="none"
    )
    base, fix = told.decode().split()
    yield Images(tag, base, fix)
    docker_client.images.remove(tag, force=True)


def _add(tar: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(text.encode())
    tar.addfile(entry, io.BytesIO(text.encode()))


def row(path: str, images: Images) -> Fields:
    """A fixture's first row, with the commits that the image has."""
    fields = read_rows(FIXTURES / path)[0]
    old_base, old_fix = "a2f37cfe3b2894be4ba030338affe5f01a10e9b1", "5c0f1ed9a7b0b7bd0e93f4f6d1c2a3b4c5d6e7f8"
    values = json.loads(json.dumps(fields.values).replace(old_base, images.base).replace(old_fix, images.fix))
    return Fields(fields.where, values)


def log_of(client: docker.DockerClient, image: str, task: records.Task, patch: str) -> str:
    """What the eval script prints after the patch, as a grader would have it: set up, patched, protected, run."""
    verdict = task.verdict
    files = {
        "/grade/setup.sh": task.setup_script,
        "/grade/eval.sh": verdict.eval_script,
        "/grade/model.diff": patch,
    }
    files["/grade/bug.diff"] = task.setup_patch.decode()
    files |= {file.path: file.content.decode() for file in getattr(verdict, "files", ())}
    protected = " ".join(f"'{path}'" for path in verdict.protected_paths)
    script = f"""
set -e
cd {task.workdir}
bash /grade/setup.sh
[ ! -s /grade/bug.diff ] || git apply /grade/bug.diff
git add -A && git -c user.name=t -c user.email=t@t commit -q --allow-empty -m set-up
git apply /grade/model.diff
for path in {protected}; do
  rm -rf "$path"
  git checkout -q HEAD -- "$path" 2>/dev/null || true
done
exec bash /grade/eval.sh </dev/null 2>&1
"""
    container = client.containers.create(
        image, ["bash", "-c", script], network_mode="none", environment=task.env, working_dir=task.workdir
    )
    try:
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for path, text in files.items():
                _add(tar, path.lstrip("/"), text)
        container.put_archive("/", archive.getvalue())
        container.start()
        container.wait()
        return container.logs().decode()
    finally:
        container.remove(force=True)


def by_log(task: records.Task, log: str) -> bool:
    assert isinstance(task.verdict, records.SwebenchLog)
    return swebench_rules.report(task.verdict, task.id, log).resolved


def by_expectation(task: records.Task, log: str) -> bool:
    assert isinstance(task.verdict, records.R2eExpected)
    _, _, summary = log.rpartition("short test summary info")
    found = re.findall(r"^(PASSED|FAILED|ERROR) \S+?::(.+?)(?: - .*)?$", summary, re.MULTILINE)
    return {name: status for status, name in found} == task.verdict.expected


def by_parser(task: records.Task, log: str, directory: Path) -> bool:
    assert isinstance(task.verdict, records.TestsJson)
    for name, text in (("parser.py", task.verdict.parser), ("out", log), ("err", "")):
        (directory / name).write_text(text)
    command = [sys.executable, *(str(directory / name) for name in ("parser.py", "out", "err", "json"))]
    subprocess.run(command, check=True)
    tests = json.loads((directory / "json").read_text())["tests"]
    return set(task.verdict.tests) <= {test["name"] for test in tests if test["status"] == "PASSED"}


@pytest.mark.slow
def test_swe_smith(docker_client: docker.DockerClient, images: Images) -> None:
    task, gold = swe_smith.task_of(row("swe_smith/rows.jsonl", images))
    tag = f"{images.tag}-smith"
    build = io.BytesIO(f"FROM {images.tag}\nRUN rm -rf /testbed && mv /smith /testbed\n".encode())
    docker_client.images.build(fileobj=build, tag=tag, rm=True, nocache=True)
    try:
        _told_apart(docker_client, tag, task, gold.patch, by_log)
    finally:
        docker_client.images.remove(tag, force=True)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["first.jsonl", "v2.json"])
def test_swe_rebench(docker_client: docker.DockerClient, images: Images, path: str) -> None:
    task, gold = swe_rebench.task_of(row(f"swe_rebench/{path}", images))
    _told_apart(docker_client, images.tag, task, gold.patch, by_log)


@pytest.mark.slow
def test_r2e_gym(docker_client: docker.DockerClient, images: Images) -> None:
    task, gold = r2e_gym.task_of(row("r2e_gym/rows.jsonl", images))
    _told_apart(docker_client, images.tag, task, gold.patch, by_expectation)
    meddled = USELESS.replace("NOTE.txt", ".venv/lib/mine.py")
    assert "the patch reaches into the environment" in log_of(docker_client, images.tag, task, meddled)


# Quick: rows of a public set become tasks that are worth 1 for their fix.
def test_swe_bench_pro(docker_client: docker.DockerClient, images: Images, tmp_path: Path) -> None:
    fields = row("swe_bench_pro/rows.jsonl", images)
    folder = next((FIXTURES / "swe_bench_pro/run_scripts").iterdir())
    fields = fields.having(instance_id=folder.name)
    (fields,) = swe_bench_pro.with_run_scripts([fields], Namespace(run_scripts=folder.parent))
    task, gold = swe_bench_pro.task_of(fields)
    _told_apart(docker_client, images.tag, task, gold.patch, lambda task, log: by_parser(task, log, tmp_path))


def _told_apart(
    client: docker.DockerClient,
    image: str,
    task: records.Task,
    solution: str,
    resolved: Callable[[records.Task, str], bool],
) -> None:
    """The solution passes and a patch that does nothing does not."""
    log = log_of(client, image, task, solution)
    assert resolved(task, log), log
    log = log_of(client, image, task, USELESS)
    assert not resolved(task, log), log
    assert "test_longest_of_nothing" in log
