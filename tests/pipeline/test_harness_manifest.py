"""A copy of a harness is equal to its manifest, or it is found out."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.harness import MANIFEST, UnequalContent, check_archive, write_archive


@pytest.fixture
def original(tmp_path: Path) -> Path:
    folder = tmp_path / "original"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "run").write_text("#!/bin/sh\n")
    (folder / "bin" / "run").chmod(0o700)
    (folder / "link").symlink_to("bin/run")
    (folder / "empty").mkdir()
    return folder


def archived(folder: Path) -> tuple[str, bytes]:
    out = io.BytesIO()
    content = write_archive(folder, out, below="/opt")
    return content, out.getvalue()


def test_the_same_content_makes_the_same_archive(original: Path) -> None:
    first = archived(original)
    (original / "bin" / "run").touch()
    assert archived(original) == first


def test_a_true_copy_is_equal(original: Path) -> None:
    content, archive = archived(original)
    check_archive(io.BytesIO(archive), content)


def changed(entry: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes] | None:
    return (entry, data[:-1] + b"x") if entry.name.endswith("run") else (entry, data)


def cut(entry: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes] | None:
    return (entry, data[:3]) if entry.name.endswith("run") else (entry, data)


def missing(entry: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes] | None:
    return None if entry.name.endswith("run") else (entry, data)


def without_manifest(entry: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes] | None:
    return None if entry.name.endswith(MANIFEST) else (entry, data)


def other_link(entry: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes] | None:
    entry.linkname = "/bin/sh" if entry.issym() else ""
    return entry, data


def other_mode(entry: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes] | None:
    entry.mode = 0o644 if entry.isreg() else entry.mode
    return entry, data


def added(entry: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes] | None:
    entry.name += "-2" if entry.name.endswith("empty") else ""
    return entry, data


@pytest.mark.parametrize("change", [changed, cut, missing, without_manifest, other_link, other_mode, added])
def test_what_differs_is_found(
    original: Path, change: Callable[[tarfile.TarInfo, bytes], tuple[tarfile.TarInfo, bytes] | None]
) -> None:
    content, archive = archived(original)
    copy = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(archive)) as source, tarfile.open(fileobj=copy, mode="w") as target:
        for entry in source:
            file = source.extractfile(entry) if entry.isreg() else None
            if (kept := change(entry, file.read() if file else b"")) is not None:
                kept[0].size = len(kept[1])
                target.addfile(kept[0], io.BytesIO(kept[1]))
    with pytest.raises(UnequalContent):
        check_archive(io.BytesIO(copy.getvalue()), content)
