"""The manifest of a harness: one line for each file, link and directory, with mode and SHA-256, by which copies are compared.

The name of a harness's content is the SHA-256 of its manifest, which is part of it as the file MANIFEST. Owner and times are left out.
"""

import hashlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

MANIFEST = "MANIFEST"
READ_BYTES = 1024 * 1024


class UnequalContent(Exception):
    """A copy differs from its manifest; the message names the first difference."""


def write_archive(directory: Path, out: IO[bytes], *, below: str) -> str:
    """Writes `directory` and its manifest to `out` as a tar archive with all paths below `below`. Returns the content's name.

    The same content always makes the same bytes.
    """
    manifest = manifest_of_directory(directory).encode()
    with tarfile.open(fileobj=out, mode="w|") as tar:
        for path in (directory, *_paths(directory)):
            entry = _entry(directory, path)
            entry.name = f"{below.strip('/')}/{entry.name}"
            with _opened(path) as content:
                tar.addfile(entry, content)
        entry = tarfile.TarInfo(f"{below.strip('/')}/{MANIFEST}")
        entry.size, entry.mode = len(manifest), 0o644
        tar.addfile(entry, io.BytesIO(manifest))
    return content_name(manifest)


def content_name(manifest: bytes) -> str:
    """The name of the content that has this manifest."""
    return f"sha256:{hashlib.sha256(manifest).hexdigest()}"


def manifest_of_directory(directory: Path) -> str:
    """The manifest of everything in `directory`."""
    lines: list[str] = []
    for path in _paths(directory):
        with _opened(path) as content:
            lines.append(_line(_entry(directory, path), content))
    return "".join(sorted(lines))


def check_archive(archive: IO[bytes], content: str) -> None:
    """Compare a tar archive of a copy, whose members are below one directory, with its own MANIFEST, and that with `content`.

    Raises UnequalContent, tarfile.TarError or OSError.
    """
    lines: list[str] = []
    manifest = b""
    with tarfile.open(fileobj=archive, mode="r|") as tar:
        for entry in tar:
            _, _, entry.name = entry.name.removeprefix("./").partition("/")
            data = tar.extractfile(entry) if entry.isreg() else io.BytesIO()
            assert data is not None
            if entry.name == MANIFEST:
                manifest = data.read()
            elif entry.name not in ("", "."):
                lines.append(_line(entry, data))
    if content_name(manifest) != content:
        raise UnequalContent("its manifest is missing or another's")
    there, expected = set(lines), set(manifest.decode().splitlines(keepends=True))
    for word, differing in (("lacks", expected - there), ("has", there - expected)):
        if differing:
            raise UnequalContent(f"it {word} {min(differing).strip()!r}, and {len(differing) - 1} others")


def _paths(directory: Path) -> Iterator[Path]:
    """The paths in a directory, sorted; links are not followed."""
    return (path for path in sorted(directory.rglob("*")) if path != directory / MANIFEST)


def _opened(path: Path) -> IO[bytes]:
    return path.open("rb") if path.is_file() and not path.is_symlink() else io.BytesIO()


def _entry(directory: Path, path: Path) -> tarfile.TarInfo:
    """The archive's entry: owned by root, without times, and readable by everybody."""
    entry = tarfile.TarInfo(str(path.relative_to(directory)))
    if path.is_symlink():
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
    elif path.is_dir():
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
    else:
        status = path.stat()
        entry.size, entry.mode = status.st_size, 0o755 if status.st_mode & 0o100 else 0o644
    return entry


def _line(entry: tarfile.TarInfo, content: IO[bytes]) -> str:
    name = entry.name.rstrip("/")
    if entry.issym():
        return f"link {entry.linkname} {name}\n"
    if entry.isdir():
        return f"directory {entry.mode & 0o777:o} {name}\n"
    digest = hashlib.sha256()
    while piece := content.read(READ_BYTES):
        digest.update(piece)
    return f"{digest.hexdigest()} {entry.mode & 0o777:o} {name}\n"
