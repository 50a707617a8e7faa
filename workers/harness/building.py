"""Makes the image of a harness: one layer with the program and its runtime below HARNESS_DIR, and labels that identify it.

Packages are fetched on this machine, so the Docker host needs no network. An existing image is kept, because its tag contains the digest of
the file and its lock.
"""

import json
import tempfile
from pathlib import Path

from docker import errors as docker_errors

from pipeline.errors import ImageMissing
from pipeline.harness import HARNESS_DIR, HarnessFile
from pipeline.harness_manifest import write_archive
from workers.docker.client import Client
from workers.docker.host import CONTENT, HARNESS, HARNESS_VERSION
from workers.harness.packages import install
from workers.sandbox.containers import ContainerApi

IMPORT_S = 1800


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
