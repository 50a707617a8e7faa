"""What a receiver does with patches, right and wrong ones, and what its command refuses."""

import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.serving.receiver import BaseMissing, VersionStore, WrongContent, open_versions, rebuilt
from pipeline.message import MalformedMessage
from pipeline.weight_patch import (
    BlockHeader,
    DirectoryManifest,
    Encoding,
    FileContent,
    PatchHeader,
    pack_header,
    read_blocks,
    read_header,
)
from trainer.weights import delta

RUN = "run"


@pytest.fixture
def versions(tmp_path: Path) -> Iterator[VersionStore]:
    with open_versions(tmp_path / "held", keep=2) as versions:
        yield versions


def exported(directory: Path, version: int, content: bytes) -> tuple[DirectoryManifest, Path]:
    where = directory / f"exported-{version}"
    where.mkdir()
    (where / "model.safetensors").write_bytes(content)
    return delta.manifest_of(where, RUN, version), where


def apply(versions: VersionStore, patch: bytes) -> Path:
    stream = BytesIO(patch)
    header = read_header(stream)
    return versions.apply(header, read_blocks(stream, header.target))


def whole(target: tuple[DirectoryManifest, Path]) -> bytes:
    num_bytes, pieces = delta.whole(*target)
    patch = b"".join(pieces)
    assert len(patch) == num_bytes
    return patch


def changes(
    tmp_path: Path, target: tuple[DirectoryManifest, Path], base: tuple[DirectoryManifest, Path]
) -> bytes:
    path = tmp_path / "one.patch"
    assert delta.write_patch(path, target, base) == path.stat().st_size
    return path.read_bytes()


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@given(
    old=st.binary(min_size=2, max_size=4000),
    changed=st.dictionaries(st.integers(0, 1999), st.integers(1, 0xFFFF), max_size=50),
    repeated=st.integers(1, 3),
)
def test_sparse_changes_give_back_the_new_block(old: bytes, changed: dict[int, int], repeated: int) -> None:
    old = old[: len(old) // 2 * 2] * repeated
    new = bytearray(old)
    for place, difference in changed.items():
        at = 2 * place % len(old)
        word = (int.from_bytes(old[at : at + 2], "little") + difference) % 0x10000
        new[at : at + 2] = word.to_bytes(2, "little")
    content = delta.encode_sparse(old, bytes(new))
    assert rebuilt(Encoding.SPARSE, content, old) == bytes(new)


def test_distances_of_255_words_and_their_neighbours_are_kept() -> None:
    old = bytes(8000)
    for place in (0, 254, 255, 256, 509, 510, 511, 3999):
        new = bytearray(old)
        new[2 * place] = 1
        new[-1] ^= 128
        content = delta.encode_sparse(old, bytes(new))
        assert rebuilt(Encoding.SPARSE, content, old) == bytes(new)


def test_a_version_is_made_whole_and_then_from_changes(versions: VersionStore, tmp_path: Path) -> None:
    first = exported(tmp_path, 0, bytes(100_000))
    second = exported(tmp_path, 1, bytes(50_000) + b"\1" + bytes(49_999))
    apply(versions, whole(first))
    patch = changes(tmp_path, second, first)
    assert len(patch) < 1000
    directory = apply(versions, patch)
    assert (directory / "model.safetensors").read_bytes() == (second[1] / "model.safetensors").read_bytes()
    assert [reference.version for reference in versions.held()] == [0, 1]


def test_the_versions_used_last_are_kept(versions: VersionStore, tmp_path: Path) -> None:
    for number in range(3):
        apply(versions, whole(exported(tmp_path, number, bytes([number]) * 10)))
        assert versions.path_of(RUN, 0) is not None, "an engine is about to load it"
    assert [reference.version for reference in versions.held()] == [0, 2]
    assert versions.path_of(RUN, 1) is None


def test_a_patch_from_another_base_is_refused(versions: VersionStore, tmp_path: Path) -> None:
    base, target = exported(tmp_path, 0, bytes(10)), exported(tmp_path, 1, b"new" + bytes(7))
    patch = changes(tmp_path, target, base)
    with pytest.raises(BaseMissing):
        apply(versions, patch)
    (tmp_path / "other").mkdir()
    apply(versions, whole(exported(tmp_path / "other", 0, b"other content")))
    with pytest.raises(BaseMissing, match="not here as the patch has it"):
        apply(versions, patch)


def test_content_that_does_not_match_its_hash_gets_no_name(versions: VersionStore, tmp_path: Path) -> None:
    patch = bytearray(whole(exported(tmp_path, 0, b"the weights")))
    patch[-1] ^= 1
    with pytest.raises(WrongContent, match=r"block 0 of model\.safetensors"):
        apply(versions, bytes(patch))
    assert names(tmp_path / "held") == {".lock"}


def test_a_patch_that_breaks_off_gets_no_name(versions: VersionStore, tmp_path: Path) -> None:
    patch = whole(exported(tmp_path, 0, bytes(5 << 20)))
    for length in (3, 20, len(patch) // 2, len(patch) - 1):
        with pytest.raises(MalformedMessage):
            apply(versions, patch[:length])
    assert names(tmp_path / "held") == {".lock"}


def bad_patches() -> Iterator[bytes]:
    good = FileContent(name="a", num_bytes=1, digests=bytes(32))
    for file in (
        FileContent(name="../a", num_bytes=1, digests=bytes(32)),
        FileContent(name="", num_bytes=1, digests=bytes(32)),
        FileContent(name=".hidden", num_bytes=1, digests=bytes(32)),
        FileContent(name="a", num_bytes=1, digests=bytes(31)),
        FileContent(name="a", num_bytes=-1, digests=b""),
    ):
        yield pack_header(PatchHeader(target=DirectoryManifest(run_id=RUN, version=0, files=(file,))))
    for run_id, version, files in (("../r", 0, (good,)), (RUN, -1, (good,)), (RUN, 0, (good, good))):
        yield pack_header(PatchHeader(target=DirectoryManifest(run_id=run_id, version=version, files=files)))
    header = pack_header(PatchHeader(target=DirectoryManifest(run_id=RUN, version=0, files=(good,))))
    yield b"SWP0" + header[4:]
    yield header[:4] + b"\xff\xff\xff\xff" + header[8:]
    for block in (BlockHeader(1, 0, 0, 1), BlockHeader(0, 1, 0, 1), BlockHeader(0, 0, 7, 1)):
        yield header + block.pack() + b"x"
    yield header + BlockHeader(0, 0, Encoding.SPARSE, 1).pack() + b"x"


@pytest.mark.parametrize("patch", [*bad_patches()], ids=lambda _: "")
def test_what_is_no_patch_is_refused(versions: VersionStore, tmp_path: Path, patch: bytes) -> None:
    with pytest.raises(MalformedMessage):
        apply(versions, patch)
    assert names(tmp_path) == {"held"}
    assert names(tmp_path / "held") == {".lock"}


def test_a_second_receiver_in_one_directory_and_too_few_versions_are_refused(
    versions: VersionStore, tmp_path: Path
) -> None:
    for flags, said in (
        ([f"--directory={tmp_path / 'held'}"], "another receiver uses"),
        ([f"--directory={tmp_path / 'new'}", "--keep=1"], "--keep is 1; it must be 2 or more"),
    ):
        command = [sys.executable, "-m", "infra.serving.receiver", "--port=30399", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_receiver_needs_neither_torch_nor_the_trainer() -> None:
    code = (
        "import sys, infra.serving.receiver; "
        "print(*(m for m in ('torch', 'trainer', 'aiohttp', 'redis', 'arq') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
