"""An image with a small broken repository, and sandboxes that must leave nothing behind."""

import io
import secrets
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache

import docker
import pytest

from tests.workers.runners import image_with_pytest
from workers.docker.host import FLEET
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.first_process import built_init

FILES = {
    "Dockerfile": """
FROM {base}
ENV PYTHONDONTWRITEBYTECODE=1 GIT_AUTHOR_DATE=2025-01-01T00:00:00Z GIT_COMMITTER_DATE=2025-01-01T00:00:00Z
COPY repo /workspace
WORKDIR /workspace
RUN git init -q . && git config user.name t && git config user.email t@example.invalid \\
 && sed -i 's/^line 29$/line 29 of old/' long.txt && git add -A && git commit -qm older \\
 && sed -i 's/^line 29 of old$/line 29/' long.txt && git add -A && git commit -qm base \\
 && cp -r /workspace /testbed
""",
    "repo/calc.py": "def add(a, b):\n    return a - b\n\n\ndef sub(a, b):\n    return a - b\n",
    "repo/tests/test_calc.py": "from calc import sub\n\n\ndef test_sub():\n    assert sub(3, 1) == 2\n",
    "repo/conftest.py": "",
    "repo/setup.cfg": "[metadata]\nname = calc\n\n[tool:pytest]\naddopts = -p no:cacheprovider\n",
    "repo/windows.txt": "one\r\ntwo\r\nthree\r\n",
    "repo/logo.bin": "\0\1\2logo\0",
    "repo/long.txt": "".join(f"line {number}\n" for number in range(60)),
    "repo/.gitignore": "__pycache__/\n*.log\n",
}


@dataclass(frozen=True, slots=True)
class RepoImage:
    """`commit` is the head of the repository in it."""

    tag: str
    commit: str


@contextmanager
def built(client: docker.DockerClient, files: Mapping[str, str], base: str) -> Iterator[RepoImage]:
    """An image of `files`, a Dockerfile among them, in which {base} stands for `base`; gone at the end."""
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        for name, text in files.items():
            data = text.replace("{base}", base).encode() if name == "Dockerfile" else text.encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    context.seek(0)
    tag = f"swerve-test:{secrets.token_hex(6)}"
    # Not of cached layers: they are another test's, which may remove them meanwhile.
    client.images.build(
        fileobj=context, custom_context=True, tag=tag, rm=True, nocache=True, network_mode="none"
    )
    commit = client.containers.run(tag, ["git", "rev-parse", "HEAD"], remove=True, network_mode="none")
    yield RepoImage(tag, commit.decode().strip())
    client.images.remove(tag, force=True)


@pytest.fixture(scope="session")
def repo_image(docker_client: docker.DockerClient, task_image: str) -> Iterator[RepoImage]:
    """`add` in calc.py subtracts. The same repository lies in /workspace and in /testbed."""
    with built(docker_client, FILES, task_image) as image:
        yield image


@pytest.fixture(scope="session")
def repo_image_with_pytest(
    docker_client: docker.DockerClient, task_image: str
) -> Iterator[Callable[[int], RepoImage]]:
    """The same as `repo_image` with pytest 7, 8 or 9."""
    with ExitStack() as images:

        @cache
        def image(major: int) -> RepoImage:
            base = image_with_pytest(docker_client, task_image, major)
            return images.enter_context(built(docker_client, FILES, base))

        yield image


@pytest.fixture
def init() -> bytes:
    """What becomes the first process of the test's containers."""
    return built_init()


@pytest.fixture
async def sandboxes(docker_client: docker.DockerClient, init: bytes) -> AsyncIterator[DockerSandboxes]:
    """A fleet of the test's own. No container of it may be left."""
    fleet = secrets.token_hex(6)
    sandboxes = DockerSandboxes(fleet=fleet, init=init)
    yield sandboxes
    await sandboxes.close()
    assert (
        docker_client.containers.list(all=True, ignore_removed=True, filters={"label": f"{FLEET}={fleet}"})
        == []
    )
