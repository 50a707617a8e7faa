"""The images of a repository's tasks: one with its dependencies for each period of its history, and on top of it one for each task.

A period is the time in which the files that declare dependencies stay the same. Packages are fetched on this machine, as wheels alone, with
the registries in pip's own configuration, so that builds need no network and no code of the repository or its dependencies runs outside of
containers. A task's image has the repository as one commit without history. Where the repository can be installed, it is installed in
editable form by its own build backend, without a network. Images are named by what they are made of.
"""

import ast
import asyncio
import configparser
import contextlib
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pipeline.errors import RolloutError
from pipeline.task import ExitCode, Task
from workers.harness.building import PackageError, run, wheels_for
from workers.images.api import ImageApi, ImageError, in_daemon
from workers.images.eviction import Shelf
from workers.images.names import parse_name
from workers.images.pulling import BuildDirectory, Builder, BuildPlan, Unobserved
from workers.making.history import Fallen, GitError, History
from workers.sandbox.protocol import Sandboxes
from workers.settings import docker_host, image_settings
from workers.unqueued import unqueued_claim

WORKDIR = "/workspace"
VERSIONS_LABEL = "swerve.versions_before"  # the date, or why versions are not limited by one
_METADATA = re.compile(
    r"(?:pyproject\.toml|setup\.(?:cfg|py)|tox\.ini|(?:[\w-]+/)?[\w.-]*requirements[\w.-]*\.(?:txt|in)|requirements/[\w.-]+\.(?:txt|in)"
    r"|(?:poetry|uv|pdm)\.lock|Pipfile(?:\.lock)?)"
)
_REQUIREMENTS_FILE = re.compile(
    r"requirements\.txt|(?=.*(?:test|dev|base|ci)).*requirements[\w.-]*\.txt|requirements/(?:base|ci|tests?|testing|dev)\.txt"
)
_EXTRAS = ("test", "tests", "testing", "dev")
REQUIREMENT = re.compile(
    r"([A-Za-z0-9][\w.-]*)\s*(?:\[[\w,. -]*\])?\s*\(?(?:[<>=!~][\w.*+!<>=~, ]*)?\)?\s*(?:;.*)?", re.ASCII
)
_NO_NETWORK = re.compile(
    r"Retrying \(|ConnectionError|Connection (?:refused|reset)|timed out|SSLError|ProxyError"
)
_PROBE = """import importlib.util, json, sys, sysconfig
print(json.dumps({"version": "%d.%d" % sys.version_info[:2], "site": sysconfig.get_path("purelib"),
 "has_pytest": importlib.util.find_spec("pytest") is not None}))"""
_PERIOD = """FROM {base}
COPY bin /usr/local/bin
COPY site {site}
LABEL {label}="{versions}"
ENV PYTHONDONTWRITEBYTECODE=1
"""
_TASK = """FROM {period} AS source
COPY base.bundle /
RUN git init -q {workdir} && cd {workdir} && git -c core.logAllRefUpdates=false fetch -q /base.bundle refs/bases/{commit} \\
 && git -c core.logAllRefUpdates=false reset -q --hard {commit} && rm -rf .git/FETCH_HEAD .git/ORIG_HEAD .git/logs \\
 && echo '*.egg-info/' >>.git/info/exclude

FROM {period}
COPY --from=source {workdir} {workdir}
WORKDIR {workdir}
"""
# The version that backends which ask git for it are given.
_INSTALL = """RUN SETUPTOOLS_SCM_PRETEND_VERSION=99.0 PBR_VERSION=99.0 python3 -m pip install --quiet --no-index --no-deps \\
 --no-build-isolation --no-cache-dir --no-compile --break-system-packages --root-user-action=ignore --disable-pip-version-check \\
 --editable .
"""


@dataclass(frozen=True, slots=True)
class Declared:
    """What the metadata of a commit declares. `left_out` has what is no plain requirement of a package index."""

    requirements: tuple[str, ...]
    build: tuple[str, ...]  # what the build backend needs; empty if the repository cannot be installed
    left_out: tuple[str, ...]
    fingerprint: str


def declared(history: History, commit: str, extra: Iterable[str] = ()) -> Declared:
    """The requirements in the metadata of `commit`, and `extra` ones."""
    blobs = {path: sha for path, sha in history.files(commit).items() if _METADATA.fullmatch(path)}
    texts: dict[str, str] = {}
    for path, sha in blobs.items():
        with contextlib.suppress(GitError):
            texts[path] = history.blob(sha).decode("utf-8", "replace")
    name, found, build = _project(texts)
    for path in sorted(texts):
        if _REQUIREMENTS_FILE.fullmatch(path):
            found += [re.split(r"\s#|\s--hash", line)[0].rstrip(" \\") for line in texts[path].splitlines()]
    lines = [one for one in found if one and not one.startswith(("#", "--hash", "-r", "-c", "-e .", " "))]
    plain = {one: match for one in (*lines, *extra) if (match := REQUIREMENT.fullmatch(one))}
    return Declared(
        requirements=tuple(sorted(one for one, match in plain.items() if _normal(match[1]) != _normal(name))),
        build=tuple(one for one in build if REQUIREMENT.fullmatch(one)),
        left_out=tuple(dict.fromkeys(one for one in lines if one not in plain)),
        fingerprint=hashlib.sha256(repr(sorted(blobs.items())).encode()).hexdigest(),
    )


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _project(texts: Mapping[str, str]) -> tuple[str, list[str], list[str]]:
    """The name, the requirements and those of the build backend, from pyproject.toml, setup.cfg and setup.py."""
    try:
        pyproject: dict[str, Any] = tomllib.loads(texts.get("pyproject.toml", ""))
    except tomllib.TOMLDecodeError:
        pyproject = {}
    project = _table(pyproject.get("project"))
    found = [*_strings(project.get("dependencies"))]
    for table in (_table(project.get("optional-dependencies")), _table(pyproject.get("dependency-groups"))):
        found += [one for extra in _EXTRAS for one in _strings(table.get(extra))]
    config = configparser.ConfigParser(interpolation=None, strict=False)
    with contextlib.suppress(configparser.Error):
        config.read_string(texts.get("setup.cfg", ""))
    for section, keys in (
        ("options", ("install_requires", "tests_require")),
        ("options.extras_require", _EXTRAS),
    ):
        found += [line.strip() for key in keys for line in config.get(section, key, fallback="").splitlines()]
    found += _in_setup(texts.get("setup.py", ""))
    system = _table(pyproject.get("build-system"))
    can_install = bool(system or project or "setup.py" in texts or config.has_section("metadata"))
    build = [*_strings(system.get("requires")), "wheel"] if system else ["setuptools", "wheel"]
    if any(one.startswith("hatchling") for one in build):
        build.append("editables")
    name = project.get("name") or config.get("metadata", "name", fallback="")
    return str(name), found, ["pip", *build] if can_install else []


def _in_setup(source: str) -> Iterator[str]:
    """The requirements that setup.py writes out in its call of `setup`."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setup"):
                for keyword in node.keywords:
                    with contextlib.suppress(ValueError):
                        if keyword.arg in ("install_requires", "tests_require"):
                            yield from _strings(ast.literal_eval(keyword.value))
                        elif keyword.arg == "extras_require":
                            extras = _table(ast.literal_eval(keyword.value))
                            yield from (one for extra in _EXTRAS for one in _strings(extras.get(extra)))


def _table(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _strings(value: object) -> list[str]:
    values = (
        [value] if isinstance(value, str) else cast("list[object]", value) if isinstance(value, list) else []
    )
    return [one.strip() for one in values if isinstance(one, str)]


@dataclass(frozen=True, slots=True)
class BasePython:
    """The image that all images are built from, and the Python in it."""

    image: str
    id: str
    version: str
    site: str
    has_pytest: bool


@dataclass(slots=True)
class Environments:
    """Builds images in `scratch`. `before_date`: versions of packages are those of the commit's month, if pip and the index can tell."""

    history: History
    base: BasePython
    name: str  # of the repository, as a part of images' names
    scratch: Path
    before_date: bool = False
    requires: tuple[str, ...] = ()
    _builder: Builder = field(init=False)
    _locks: dict[str, asyncio.Lock] = field(default_factory=dict[str, asyncio.Lock])
    _fallen: dict[str, Fallen] = field(default_factory=dict[str, Fallen])

    def __post_init__(self) -> None:
        api, settings = ImageApi(docker_host()), image_settings()
        plan = BuildPlan(settings.state_dir / "build-logs", {}, network="none")
        self._builder = Builder(api, Shelf(settings.state_dir, api.id), plan, Unobserved())

    async def image(self, commit: str, authored: str) -> tuple[str, str, Declared, str]:
        """The image of a task: its name, its base commit, what the repository declares, and how versions were limited.

        Raises Fallen, and ImageError or PackageError for a failure of the infrastructure.
        """
        needs = await asyncio.to_thread(declared, self.history, commit, self.requires)
        period, versions = await self._period(needs, authored)
        base = await asyncio.to_thread(self.history.base_commit, commit)
        dockerfile = _TASK.format(period=period, commit=base, workdir=WORKDIR) + (
            _INSTALL if needs.build else ""
        )
        name = f"swerve-git/{self.name}:{_digest(dockerfile)}"
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            context = Path(folder)
            (context / "Dockerfile").write_text(dockerfile)
            if self._builder.api.find(name) is None:
                await asyncio.to_thread(self.history.bundle, commit, context / "base.bundle")
                await self._build(name, context, "the repository cannot be installed")
        return name, base, needs, versions

    async def _period(self, needs: Declared, authored: str) -> tuple[str, str]:
        """The image with the dependencies, and how their versions were limited."""
        until = _end_of_month(authored) if self.before_date else ""
        what = (self.base, needs.requirements, needs.build, needs.fingerprint, until)
        name = f"swerve-git/{self.name}-packages:{_digest(repr(what))}"
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name in self._fallen:
                raise self._fallen[name]
            found = self._builder.api.find(name)
            if found is not None:
                return name, found.labels.get(VERSIONS_LABEL, "")
            with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
                context = Path(folder)
                try:
                    versions = await asyncio.to_thread(self._fetch, needs, until, context)
                    dockerfile = _PERIOD.format(
                        base=self.base.image, site=self.base.site, label=VERSIONS_LABEL, versions=versions
                    )
                    (context / "Dockerfile").write_text(dockerfile)
                    await self._build(name, context, "packages cannot be put into the image")
                except Fallen as fallen:
                    self._fallen[name] = fallen
                    raise
            return name, versions

    def _fetch(self, needs: Declared, until: str, context: Path) -> str:
        """Puts packages and their programs into `context`. Returns how versions were limited. Raises Fallen, PackageError."""
        site, programs = context / "site", context / "bin"
        for directory in (site, programs):
            directory.mkdir(mode=0o755)
        wanted = [*needs.requirements, *needs.build, *([] if self.base.has_pytest else ["pytest"])]
        if not wanted:
            return ""
        (context / "wanted.txt").write_text("".join(f"{one}\n" for one in wanted))
        words = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-compile",
        ]
        words += [
            *wheels_for(self.base.version),
            f"--target={site}",
            f"--requirement={context / 'wanted.txt'}",
        ]
        versions = ""
        if until and not (versions := _unlimited()):
            versions = until
            words.append(f"--uploaded-prior-to={until}")
        try:
            run(words)
        except PackageError as error:
            if _NO_NETWORK.search(str(error)):
                raise
            if "upload-time" not in str(error):
                raise Fallen("dependencies cannot be installed", _last_line(str(error))) from error
            versions = "not limited: the package index does not say when a file was uploaded"
            run(words[:-1])
        for file in sorted((site / "bin").glob("*")):
            first, _, rest = file.read_bytes().partition(b"\n")
            (programs / file.name).write_bytes(
                (b"#!/usr/bin/env python3" if first[:2] == b"#!" else first) + b"\n" + rest
            )
            (programs / file.name).chmod(0o755)
            file.unlink()
        return versions

    async def _build(self, name: str, context: Path, reason: str) -> None:
        """Raises Fallen with `reason` if a command of the Dockerfile fails, ImageError if Docker does."""
        source = BuildDirectory(parse_name(name), context)
        result = await in_daemon(lambda: self._builder.build(source))
        if result.state == "failed":
            if "returned a non-zero code" in result.reason:
                raise Fallen(reason, result.reason)
            raise ImageError(result.reason)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _last_line(text: str) -> str:
    return text.strip().split("\n")[-1][-300:]


def _end_of_month(date: str) -> str:
    """The first day after the month of an ISO date, so that one image serves all commits of a period in a month."""
    year, month = int(date[:4]), int(date[5:7])
    return f"{year + month // 12}-{month % 12 + 1:02}-01"


def _unlimited() -> str:
    """Why pip cannot limit versions by a date; "" if it can."""
    words = (sys.executable, "-m", "pip", "install", "--help")
    shown = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    return "" if "--uploaded-prior-to" in shown else "not limited: pip here is older than 26.0, update it"


async def probed_base(image: str, sandboxes: Sandboxes) -> BasePython:
    """The base image. Raises ValueError naming --base."""
    try:
        found = ImageApi(docker_host()).find(image)
        if found is None:
            raise ValueError(
                f"--base: no image {image} on this host: pull it, or make ours (`python -m infra.images.build task-base`)"
            )
        task = Task(
            id="git:base",
            repo="",
            base_commit="",
            image=image,
            workdir="/",
            problem="",
            verdict=ExitCode(eval_script="true"),
        )
        async with sandboxes.open(unqueued_claim(task, command="making"), role="grade") as sandbox:
            result = await sandbox.run(
                f"git --version >&2 && exec python3 -c '{_PROBE}' 2>/dev/null", timeout_s=60
            )
    except (ImageError, RolloutError) as error:
        raise ValueError(f"--base: {image}: {error}") from error
    try:
        said = json.loads(result.output.decode().strip().split("\n")[-1])
        return BasePython(image, found.id, said["version"], said["site"], said["has_pytest"])
    except (ValueError, KeyError) as error:
        raise ValueError(f"--base: {image} must have git and python3: {result.output[-200:]!r}") from error
