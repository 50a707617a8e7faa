"""Images with newer pytests than Debian's, which `swerve/task-base` has: made from wheels that pip downloads on this machine.

An image is kept until its base image or its version changes, so the download happens once per machine.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import docker
from docker.errors import ImageNotFound

DEBIANS = 7  # the pytest of swerve/task-base
VERSIONS = {8: "8.4.2", 9: "9.2.0"}
BASE_LABEL = "swerve.test.compiled-on"
# Python searches it before the directory of Debian's packages.
PACKAGES = "/usr/local/lib/python3.11/dist-packages"


def image_with_pytest(client: docker.DockerClient, base: str, major: int) -> str:
    """The tag of an image like `base` that has pytest `major`. Makes the image unless it is there."""
    if major == DEBIANS:
        return base
    version = VERSIONS[major]
    tag, base_id = f"swerve-test-pytest:{version}", str(client.images.get(base).id)
    try:
        if client.images.get(tag).labels.get(BASE_LABEL) == base_id:
            return tag
    except ImageNotFound:
        pass
    # As pip does. Images of tests write no byte code, so each container would compile pytest anew.
    compiled = f"RUN python3 -m compileall -q {PACKAGES}"
    dockerfile = f"FROM {base}\nADD packages.tar {PACKAGES}/\n{compiled}\nLABEL {BASE_LABEL}={base_id}\n"
    context = _tar({"Dockerfile": dockerfile.encode(), "packages.tar": _packages(version)})
    client.images.build(
        fileobj=io.BytesIO(context), custom_context=True, tag=tag, rm=True, network_mode="none"
    )
    return tag


def _packages(version: str) -> bytes:
    """A tar of what pytest `version` and its dependencies install."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        target = ["--only-binary=:all:", "--python-version=3.11", "--platform=any", f"--dest={folder}"]
        subprocess.run([*command, *target, f"pytest=={version}"], check=True)
        wheels = [zipfile.ZipFile(path) for path in sorted(Path(folder).glob("*.whl"))]
        return _tar({name: wheel.read(name) for wheel in wheels for name in wheel.namelist()})


def _tar(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
