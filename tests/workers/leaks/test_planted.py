"""An image with the fix in many places: the command names each, verification records them, and an agent finds none."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from pipeline.task import ExitCode, Task
from pipeline.taskfile import (
    Gold,
    Verification,
    gold_path,
    read_verified,
    verified_path,
    write_gold,
    write_tasks,
)
from tests.workers.claims import make_claim, make_task
from tests.workers.leaks.giveaways import PREPARE, built
from tests.workers.leaks.test_search import FIX as PRICING_FIX
from tests.workers.leaks.test_search import TESTS as PRICING_TESTS
from tests.workers.leaks.test_search import Repository
from tests.workers.verify.spans import FILES, FIX, FIXED
from workers.leaks.__main__ import main as look_for_leaks
from workers.sandbox.docker import DockerSandboxes
from workers.unqueued import verified_tasks
from workers.verify.__main__ import main as verify

pytestmark = pytest.mark.docker

PAGE = Path(__file__).parents[3] / "docs/tasks.md"
REPOSITORY = f"""{PREPARE}
mkdir /workspace; cd /workspace; git init -q -b main .; cp /made/spans.py .; git add .; git commit -qm base
git rev-parse HEAD >/base
"""
PLANT = f"""{REPOSITORY}
git apply /made/fix.diff; git commit -qam later
git bundle create -q /tmp/repo.bundle --all
git clone -q --mirror . /srv/mirror.git
git clone -q . /home/clone
mkdir /var/tmp/renamed; cp -r .git/* /var/tmp/renamed/
git -C /srv/mirror.git repack -adq; cp /srv/mirror.git/objects/pack/*.pack /usr/share/some.data
tar czf /opt/spans-2.0.tar.gz spans.py
mkdir -p /root/.cache/pip/wheels; python3 - <<'END'
import bz2, gzip, io, lzma, pathlib, tarfile, zipfile
text = pathlib.Path("spans.py").read_bytes()
def zipped(files):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return made.getvalue()
wheel = zipped({{"spans.py": text}})
pathlib.Path("/root/.cache/pip/wheels/spans-2.0-py3-none-any.whl").write_bytes(wheel)
pathlib.Path("/opt/nested.xz").write_bytes(lzma.compress(zipped({{"dist/spans.whl": wheel}})))
pathlib.Path("/usr/share/doc/spans.py.gz").write_bytes(gzip.compress(text))
pathlib.Path("/usr/share/doc/spans.py.bz2").write_bytes(bz2.compress(text))
lines = text.splitlines()[::-1]
pathlib.Path(".spans.py.swp").write_bytes(b"b0VIM 9.0" + bytes(99) + bytes(1).join(lines) + bytes(1))
END
python3 -m compileall -q .; cp spans.py 'spans.py~'; cp /made/fix.diff /var/spool/fix.patch
git reset -q --hard HEAD~1; forget; git gc -q --prune=now; touch -d '1 hour ago' spans.py
"""
PLANTED = {
    "/home/clone/.git",
    "/home/clone/spans.py",
    "/opt/nested.xz",
    "/opt/spans-2.0.tar.gz",
    "/root/.cache/pip/wheels/spans-2.0-py3-none-any.whl",
    "/srv/mirror.git",
    "/tmp/repo.bundle",
    "/usr/share/doc/spans.py.bz2",
    "/usr/share/doc/spans.py.gz",
    "/usr/share/some.data",
    "/var/spool/fix.patch",
    "/var/tmp/renamed",
    "/workspace/.spans.py.swp",
    "/workspace/__pycache__/spans.cpython-311.pyc",
    "/workspace/spans.py~",
}
INSTALL = f"""{REPOSITORY}
cd /usr/lib/python3/dist-packages; cp /made/spans.py .; sed -i 's/"d": 12/"d": 24/' spans.py
"""
# Ways in which an agent would use what it found.
TRY = """{
git clone /tmp/repo.bundle /tmp/c && git -C /tmp/c log
git clone /srv/mirror.git /tmp/d; git --git-dir=/var/tmp/renamed log; tar xOzf /opt/spans-2.0.tar.gz
grep -rl '"d": 24' / --exclude-dir=proc --exclude-dir=sys
} 2>/dev/null"""


def an_image(client: docker.DockerClient, base: str, script: str) -> Iterator[tuple[str, str]]:
    """Its tag, and its base commit."""
    files = {"make.sh": script, "spans.py": FILES["repo/spans.py"], "fix.diff": FIX}
    instructions = "COPY . /made\nRUN bash /made/make.sh && rm -r /made\nWORKDIR /workspace\n"
    with built(client, base, files, instructions) as tag:
        commit = client.containers.run(tag, ["cat", "/base"], remove=True, network_mode="none")
        yield tag, commit.decode().strip()


@pytest.fixture(scope="module")
def planted(docker_client: docker.DockerClient, task_image: str) -> Iterator[tuple[str, str]]:
    yield from an_image(docker_client, task_image, PLANT)


@pytest.fixture(scope="module")
def installed(docker_client: docker.DockerClient, task_image: str) -> Iterator[tuple[str, str]]:
    yield from an_image(docker_client, task_image, INSTALL)


def task_file(path: Path, image: str, base: str) -> Task:
    task = make_task(image, base_commit=base, verdict=ExitCode(eval_script=f"{FIXED}\n"))
    write_tasks(path, [task])
    write_gold(gold_path(path), [Gold(id=task.id, patch=FIX)])
    return task


def verified(path: Path) -> Verification:
    verify([str(path), "--controls", "0"])
    [found] = read_verified(verified_path(path)).values()
    return found


@pytest.fixture(scope="module")
def verified_file(planted: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planted") / "tasks.jsonl"
    task_file(path, *planted)
    verified(path)
    return path


@pytest.mark.slow
async def test_what_verification_found_in_the_image_no_agent_finds(
    verified_file: Path, sandboxes: DockerSandboxes
) -> None:
    [found] = read_verified(verified_path(verified_file)).values()
    assert found.ok, found.reason
    assert set(found.leaking_paths) == PLANTED
    assert "agents' containers are without what holds the answer in the image: " in found.warning
    [task] = verified_tasks(verified_file)
    async with sandboxes.open(make_claim(task), role="agent") as agent:
        assert (await agent.run(TRY, timeout_s=120)).output == b""
        assert await agent.diff() == b""
    async with sandboxes.open(make_claim(task), role="grade") as grader:
        assert b"later" in (await grader.run(TRY, timeout_s=120)).output


@pytest.mark.slow
def test_the_command_names_each_until_the_task_is_verified(
    planted: tuple[str, str], verified_file: Path, tmp_path: Path
) -> None:
    path, out = tmp_path / "tasks.jsonl", tmp_path / "out.json"
    task_file(path, *planted)
    assert look_for_leaks([str(path), "--json", str(out)]) == 1
    [finding] = json.loads(out.read_bytes())
    text = "\n".join(finding["leaks"])
    assert set(finding["paths"]) == PLANTED
    for kind in ("solution in a file", "solution in an archive", "solution in git objects"):
        assert f"{kind} (" in text
    assert "other repository (" in text
    assert "compiled solution (/workspace/__pycache__/spans.cpython-311.pyc)" in text
    assert look_for_leaks([str(verified_file)]) == 0


# Quick: a task whose image has its fix installed is told to be bad.
def test_a_fix_that_is_installed_makes_the_task_a_bad_one(installed: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    task_file(path, *installed)
    found = verified(path)
    assert not found.ok
    assert found.reason == (
        "leaks: the image holds the answer: /usr/lib/python3/dist-packages/spans.py (solution in a file), not removed "
        "because it is installed code, which others may need: leave it out in the Dockerfile, or install what belongs "
        "to base_commit"
    )


@pytest.mark.slow
def test_the_dockerfile_of_the_docs_leaves_nothing(
    docker_client: docker.DockerClient, task_image: str, tmp_path: Path
) -> None:
    commands, dockerfile = re.findall(
        r"\*\*A Dockerfile that leaves nothing\..*?```\n(.*?)```\n```dockerfile\n(.*?)```",
        PAGE.read_text(),
        re.DOTALL,
    )[0]
    repository = Repository(tmp_path / "repository")
    commands = commands.replace("BASE_COMMIT", repository.base).replace("TASK_DIRECTORY", str(tmp_path))
    subprocess.run(["bash", "-ec", commands], cwd=repository.path, check=True, capture_output=True)
    first, _, rest = dockerfile.partition("\n")
    assert first == f"FROM {task_image} AS source"
    bundle = {"repo.bundle": (tmp_path / "repo.bundle").read_bytes()}
    with built(docker_client, first.removeprefix("FROM "), bundle, rest) as tag:
        path = tmp_path / "tasks.jsonl"
        task = make_task(tag, base_commit=repository.base)
        write_tasks(path, [task])
        write_gold(gold_path(path), [Gold(id=task.id, patch=PRICING_FIX, test_patch=PRICING_TESTS)])
        assert look_for_leaks([str(path), "--json", str(tmp_path / "out.json")]) == 0
        [finding] = json.loads((tmp_path / "out.json").read_bytes())
        assert finding["agent_image"] == tag, "nothing had to be cleaned"
        assert finding["skipped"] == []
