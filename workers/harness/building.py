"""Makes the image of a harness: one layer with the program and its runtime below HARNESS_DIR, and labels that identify it.

Packages are fetched on this machine according to the lock of the harness, which is written here too, so the Docker host needs no network.
npm and pip use the registries in this machine's configuration; nothing here names one. An existing image is kept, because its tag contains
the digest of the file and its lock.

Debian's shared libraries with their loader are in `lib/`, and Debian's Python is in `python/`, so that no library of a task's image is
used: the loader is started with `--library-path`, and Python finds its modules relative to its own path.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docker import errors as docker_errors

from pipeline.errors import ImageMissing
from pipeline.harness import HARNESS_DIR, HarnessFile, write_archive
from workers.docker.client import Client
from workers.docker.host import CONTENT, HARNESS, HARNESS_VERSION
from workers.sandbox.containers import ContainerApi

IMPORT_S = 1800
PYTHON_IMAGE = "swerve/python-base:1"
LOADER = "ld-linux-x86-64.so.2"
LIBRARIES, PYTHON_MODULES, PYTHON = "usr/lib/x86_64-linux-gnu", "usr/lib/python3.11", "usr/bin/python3.11"
NPM = ("npm", "install", "--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund", "--no-bin-links")
# The fields of a locked package that are stored: no addresses.
LOCKED_KEYS = (
    *("version", "integrity", "optional", "os", "cpu", "libc"),
    *("dependencies", "optionalDependencies", "peerDependencies", "peerDependenciesMeta", "peer"),
)


class PackageError(Exception):
    """Packages cannot be fetched, or differ from the locked ones; the message names the command and its output."""


def wheels_for(python: str) -> tuple[str, ...]:
    """Options by which pip chooses wheels for the Python of an image, such as "3.11", whatever Python runs this command."""
    return (
        "--only-binary=:all:",
        f"--python-version={python}",
        "--implementation=cp",
        *(f"--platform=manylinux{tag}_x86_64" for tag in ("_2_34", "_2_28", "_2_17", "2014")),
        "--platform=any",
    )


async def build(api: ContainerApi, file: HarnessFile, *, force: bool = False) -> bool:
    """Makes the image unless it exists. Returns True if it was made. Raises PackageError, SandboxError."""
    image = file.harness.image
    if not force:
        try:
            await api.inspect_image(image)
        except ImageMissing:
            pass
        else:
            return False
    with tempfile.TemporaryDirectory() as name:
        directory, archive = Path(name) / "harness", Path(name) / "harness.tar"
        directory.mkdir(mode=0o755)
        install(file, directory)
        with archive.open("wb") as out:
            content = write_archive(directory, out, below=HARNESS_DIR)
        labels = {HARNESS: file.harness.name, HARNESS_VERSION: file.harness.version, CONTENT: content}
        await api.call(f"making {image}", lambda client: _import(client, archive, image, labels))
    return True


def _import(client: Client, archive: Path, image: str, labels: dict[str, str]) -> None:
    repository, _, tag = image.rpartition(":")
    changes = [f'LABEL "{name}"="{value}"' for name, value in labels.items()]
    url = client._url("/images/create")
    params = {"fromSrc": "-", "repo": repository, "tag": tag, "changes": changes}
    with archive.open("rb") as data:
        answer = client._post(url, data=data, params=params, timeout=IMPORT_S)
    client._raise_for_status(answer)
    last = json.loads(answer.text.splitlines()[-1])
    if "error" in last:
        raise docker_errors.APIError(last["error"], explanation=last["error"])


def install(file: HarnessFile, into: Path) -> None:
    """Installs what the build of `file` names into the empty directory `into`. Raises PackageError."""
    if file.build.directory:
        shutil.copytree(file.directory, into, symlinks=True, dirs_exist_ok=True)
        return
    assert file.lock is not None
    if file.build.npm:
        _install_npm(file.build.npm, file.lock, into)
        if file.build.libraries:
            _install_debian(into, python=False)
    else:
        _install_debian(into, python=True)
        site = into / "python" / "lib" / "python3" / "dist-packages"
        hashed = (
            "--require-hashes",
            "--no-deps",
            "--no-compile",
            f"--target={site}",
            f"--requirement={file.lock}",
        )
        run(_pip("install", *hashed))
        shutil.rmtree(site / "bin", ignore_errors=True)  # scripts that name the Python of this machine
    for pattern in file.build.drop:
        found = list(into.glob(pattern))
        if not found:
            raise PackageError(f"build.drop: nothing matches {pattern!r}; take the pattern out")
        for path in found:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if file.build.pip:
        _compile(into)


def write_lock(file: HarnessFile) -> Path:
    """Chooses a version of each package that the build needs, and writes the versions with their hashes. Raises PackageError."""
    if file.lock is None:
        raise PackageError(f"{file.path}: a directory has no packages to lock")
    file.lock.write_text(_npm_lock(file.build.npm) if file.build.npm else _pip_lock(file.build.pip))
    return file.lock


def _npm_lock(packages: Mapping[str, str]) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "package.json").write_text(_package_json(packages))
        run((*NPM, "--package-lock-only"), cwd=folder)
        lock = json.loads((folder / "package-lock.json").read_text())
    lock["packages"] = {
        path: {key: one[key] for key in LOCKED_KEYS if key in one} for path, one in lock["packages"].items()
    }
    return json.dumps(lock, indent=1) + "\n"


def _install_npm(packages: Mapping[str, str], lock: Path, into: Path) -> None:
    """Uses `npm install` instead of `npm ci`, which refuses the lock of a package with optional dependencies that nobody has published."""
    (into / "package.json").write_text(_package_json(packages))
    shutil.copy(lock, into / "package-lock.json")
    run(NPM, cwd=into)
    locked = json.loads(lock.read_text())["packages"]
    record = into / "node_modules" / ".package-lock.json"
    for path, package in json.loads(record.read_text())["packages"].items():
        if package.get("integrity") != locked.get(path, {}).get("integrity", ""):
            raise PackageError(f"npm: {path} is not the package that {lock.name} has; lock it again")
    for left in (into / "package.json", into / "package-lock.json", record):
        left.unlink()


def _package_json(packages: Mapping[str, str]) -> str:
    return json.dumps(
        {"name": "harness", "version": "1.0.0", "private": True, "dependencies": dict(packages)}
    )


def _pip_lock(requirements: Sequence[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        run(
            _pip(
                "install",
                "--dry-run",
                "--ignore-installed",
                f"--target={folder}",
                f"--report={report}",
                *requirements,
            )
        )
        found: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    lines = (
        f"{one['metadata']['name'].lower()}=={one['metadata']['version']}"
        f" --hash=sha256:{one['download_info']['archive_info']['hashes']['sha256']}\n"
        for one in found
    )
    return "".join(sorted(lines))


def _pip(verb: str, *words: str) -> tuple[str, ...]:
    return (
        sys.executable,
        "-m",
        "pip",
        verb,
        "--quiet",
        "--disable-pip-version-check",
        *wheels_for("3.11"),
        *words,
    )


def _install_debian(into: Path, *, python: bool) -> None:
    """Installs the loader and all shared libraries beside it from the image that infra/images makes; with `python`, its Python, too."""
    run((sys.executable, "-m", "infra.images.build", "python-base"))
    created = run(("docker", "create", "--network=none", PYTHON_IMAGE, "true")).strip()
    try:
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            for part in (LIBRARIES, *((PYTHON_MODULES, PYTHON) if python else ())):
                (root / part).parent.mkdir(parents=True, exist_ok=True)
                run(("docker", "cp", f"{created}:/{part}", str(root / part)))
            _lay_out(root, into)
    finally:
        run(("docker", "rm", created))


def _compile(into: Path) -> None:
    """Writes bytecode, which Python could not store in a read-only directory. It is valid whatever the files' times are."""
    libraries = into / "lib"
    python = (
        str(libraries / LOADER),
        "--library-path",
        str(libraries),
        str(into / "python" / "bin" / "python3.11"),
        "-I",
    )
    paths = ("-s", str(into), "-p", HARNESS_DIR, str(into / "python" / "lib"))
    # Templates among the packages are not valid Python, so the exit status would be 1.
    subprocess.run(
        (*python, "-m", "compileall", "-qq", "-j", "0", "--invalidation-mode=unchecked-hash", *paths),
        check=False,
    )


def _lay_out(root: Path, into: Path) -> None:
    libraries = into / "lib"
    libraries.mkdir()
    for path in sorted((root / LIBRARIES).glob("*.so*")):
        shutil.copy(path, libraries / path.name, follow_symlinks=False)
    if (root / PYTHON).exists():
        home = into / "python"
        shutil.copytree(root / PYTHON_MODULES, home / "lib" / "python3.11", symlinks=True, ignore=_not_needed)
        (home / "bin").mkdir()
        shutil.copy(root / PYTHON, home / "bin" / "python3.11")


def _not_needed(folder: str, names: list[str]) -> list[str]:
    """Selects the names that are not copied, for `shutil.copytree`; `sitecustomize.py` is a link into the task's image."""
    unwanted = {"__pycache__", "test", "idlelib", "lib2to3", "ensurepip", "tkinter", "sitecustomize.py"}
    return [name for name in names if name in unwanted]


def run(command: Sequence[str], *, cwd: Path | None = None) -> str:
    """The output of a command that fetches packages. Raises PackageError."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise PackageError(f"{command[0]} is not installed: it fetches the packages of a harness") from error
    if done.returncode:
        raise PackageError(f"{' '.join(command[:4])} failed: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout
