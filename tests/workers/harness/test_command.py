"""`python -m workers.harness` builds images, lists them, and says whether a program runs in a task's image."""

import asyncio
import json
from pathlib import Path

import docker
import pytest

from pipeline.harness import HarnessFile, read_harness, shipped, untested
from tests.workers.harness.conftest import FILE
from workers.harness.__main__ import main
from workers.harness.building import PackageError, install, write_lock

pytestmark = pytest.mark.docker

# Packages of Pi and of mini-swe-agent, the smallest.
NPM = 'npm = {chalk = "5.6.2"}\ndrop = ["node_modules/chalk/source/vendor"]'
PIP = 'pip = ["annotated-doc==0.0.4"]'


async def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = await asyncio.to_thread(main, list(words))
    out, err = capsys.readouterr()
    return status, out, err


async def test_a_program_is_built_once_listed_and_tried(
    docker_client: docker.DockerClient,
    built: HarnessFile,
    task_image: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, image = str(built.path), built.harness.image
    status, out, _ = await run(capsys, "build", path)
    assert status == 0
    assert out.startswith(f"{image} is there: ")
    content = out.split()[-1]
    status, out, _ = await run(capsys, "build", "--force", path)
    assert out.startswith(f"{image} made in ")
    assert out.endswith(f"{content}\n")
    status, out, _ = await run(capsys, "check", path)
    assert (status, out.partition("(")[0]) == (0, f"{built.harness.name} 1.2.3 in {task_image}: runs ")
    status, out, _ = await run(capsys, "ls", "--json", path)
    row = json.loads(out)
    assert (status, row["image"], row["content"], len(row["volumes"])) == (0, image, content, 1)
    assert row["size_bytes"] > 300_000
    status, out, _ = await run(capsys, "ls", path)
    assert content in out


async def test_programs_that_nobody_has_tested_are_listed_as_such_and_not_built_without_a_lock(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = await run(capsys, "ls", "--json")
    listed = {row["name"]: row["is_tested"] for row in map(json.loads, out.splitlines())}
    assert status == 0
    assert listed == dict.fromkeys(shipped(), True) | dict.fromkeys(untested(), False)
    _, out, _ = await run(capsys, "ls", "aider")
    assert "not tested" in out
    status, _, err = await run(capsys, "build", "aider")
    assert (status, "`swerve harness lock aider` writes aider.requirements.txt" in err) == (2, True)


async def test_a_program_that_cannot_run_in_an_image_says_what_it_needs(
    docker_client: docker.DockerClient, built: HarnessFile, capsys: pytest.CaptureFixture[str]
) -> None:
    program = built.path.parent / "program" / "bin" / "tiny"
    program.write_text("#!/lib/absent-loader.so\n")
    built.path.write_text(built.path.read_text().replace("dialect", 'glibc = "2.28"\ndialect'))
    broken = read_harness(built.path).harness
    try:
        assert (await run(capsys, "build", str(built.path)))[0] == 0
        status, out, _ = await run(capsys, "check", str(built.path))
        assert status == 1
        assert "does not run: it needs glibc 2.28 or newer" in out
    finally:
        docker_client.images.remove(broken.image, force=True)


async def test_mistakes_and_missing_images_are_one_line(
    harness_file: HarnessFile, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = await run(capsys, "check", str(harness_file.path))
    assert (status, err.count("\n")) == (1, 1)
    assert "this Docker host has no image" in err
    status, _, err = await run(capsys, "build", "absent")
    assert (status, err.count("\n")) == (2, 1)


def written(folder: Path, packages: str) -> Path:
    path = folder / "tiny.toml"
    path.write_text(FILE.format(name="tiny").replace('directory = "program"', packages))
    return path


@pytest.mark.slow
def test_npm_packages_are_locked_and_fetched_by_their_hashes(tmp_path: Path) -> None:
    path = written(tmp_path, NPM)
    assert write_lock(read_harness(path, locked=False)) == tmp_path / "tiny.package-lock.json"
    file, into = read_harness(path), tmp_path / "into"
    into.mkdir()
    install(file, into)
    assert (into / "node_modules" / "chalk" / "package.json").is_file()
    assert not (into / "node_modules" / "chalk" / "source" / "vendor").exists()
    assert {entry.name for entry in into.iterdir()} == {"node_modules"}
    assert file.lock is not None
    file.lock.write_text(file.lock.read_text().replace("sha512-", "sha512-AAAA"))
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(PackageError):
        install(file, other)


def test_pip_packages_are_locked_for_the_python_that_is_installed(tmp_path: Path) -> None:
    write_lock(read_harness(written(tmp_path, PIP), locked=False))
    (line,) = (tmp_path / "tiny.requirements.txt").read_text().splitlines()
    assert line.startswith("annotated-doc==0.0.4 --hash=sha256:")
