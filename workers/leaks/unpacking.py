"""Unpacks files that contain other files: archives, compressed copies, packages, git objects; nested in each other, within limits.

The bytes are not trusted. No name in an archive becomes a path on this machine, nothing is written, and nothing is executed. Unreadable
data is skipped, because an agent could not read it either; data that is not unpacked because of a limit is reported.

Git objects are read without git: loose ones, packs, and bundles. If an object is a delta of one in another store, as in a bundle of only
the newest commits, its content is the text that the delta adds.
"""

import bz2
import gzip
import hashlib
import io
import lzma
import posixpath
import re
import struct
import tarfile
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

import zstandard

PACK = b"PACK"
BUNDLE = re.compile(rb"# v[23] git bundle\n")
LOOSE = re.compile(rb"(blob|commit|tree|tag) \d+\0")

_HEADER_BYTES = 12
_ID_BYTES = 20
# Compressed bytes decompressed at once, which become 64 MiB at most. What follows an object of a pack is copied once for each feed.
_FEED_BYTES = 1 << 16
_KEPT_BYTES = 96 << 20  # size of objects kept as possible bases of deltas
_LONGEST_CHAIN = 4096
_KINDS = {1: "commit", 2: "tree", 3: "blob", 4: "tag"}
_COMMIT, _OFFSET_DELTA, _ID_DELTA = 1, 6, 7
_TREE_OR_PARENT = re.compile(rb"^(?:tree|parent) ([0-9a-f]{40,64})$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class GitObject:
    """`kind` is commit, tree, blob or tag; or delta, whose content is the text that it adds to an object in another store."""

    kind: str
    content: bytes

    @property
    def id(self) -> str:
        return hashlib.sha1(b"%s %d\0" % (self.kind.encode(), len(self.content)) + self.content).hexdigest()

    def parents(self) -> list[str]:
        """The ids that a commit names as its parents."""
        head = self.content.partition(b"\n\n")[0]
        return [one.decode() for one in _TREE_OR_PARENT.findall(head)[1:]]


@dataclass(slots=True)
class _PackEntry:
    kind: int
    # The offset or the id of the object to which this delta applies; None: it is not a delta
    base: int | bytes | None
    zlib_at: int
    num_bytes: int


@dataclass(slots=True)
class Pack:
    """The objects of the pack that begins at byte `start` of `content`. Reading ends at an object larger than `largest_bytes`.

    `spend` is called with the number of bytes before they are decompressed, and may raise.
    """

    content: bytes
    start: int
    largest_bytes: int
    spend: Callable[[int], None]
    _entries: dict[int, _PackEntry] = field(default_factory=dict[int, _PackEntry])
    _kept: OrderedDict[int, GitObject] = field(default_factory=OrderedDict[int, GitObject])
    _num_kept_bytes: int = 0
    _by_id: dict[bytes, int] = field(default_factory=dict[bytes, int])

    def objects(self) -> Iterator[GitObject]:
        """All objects except trees; complete commits come first, while they are read. Raises ValueError or zlib.error at the first invalid
        byte of the pack, and the errors of `spend`; earlier objects are valid.
        """
        broken: Exception | None = None
        try:
            yield from self._read_entries()
        except (ValueError, IndexError, zlib.error) as error:
            broken = error
        if any(entry.kind == _ID_DELTA for entry in self._entries.values()):
            self._read_ids()
        for at, entry in self._entries.items():
            if entry.kind != _COMMIT and self._kind_of(at) != "tree":
                yield self._object(at)
        if broken is not None:
            raise ValueError(f"the pack ends early: {broken}") from broken

    def _read_entries(self) -> Iterator[GitObject]:
        """Finds the begin and end of each object. Yields commits."""
        number = int.from_bytes(self.content[self.start + 8 : self.start + _HEADER_BYTES], "big")
        at = self.start + _HEADER_BYTES
        for _ in range(number):
            begin, byte = at, self.content[at]
            at += 1
            kind, size, shift = byte >> 4 & 7, byte & 15, 4
            while byte & 128:
                byte = self.content[at]
                at += 1
                size |= (byte & 127) << shift
                shift += 7
            base: int | bytes | None = None
            if kind == _OFFSET_DELTA:
                distance, at = self._distance(at)
                base = begin - distance
            elif kind == _ID_DELTA:
                base = self.content[at : at + _ID_BYTES]
                at += _ID_BYTES
            elif kind not in _KINDS:
                raise ValueError(f"an object of kind {kind}")
            entry = _PackEntry(kind, base, at, size)
            inflated, at = self._inflated(entry)
            self._entries[begin] = entry
            if kind == _COMMIT:
                yield GitObject(_KINDS[kind], inflated)

    def _distance(self, at: int) -> tuple[int, int]:
        byte = self.content[at]
        distance = byte & 127
        while byte & 128:
            at += 1
            byte = self.content[at]
            distance = (distance + 1 << 7) | byte & 127
        return distance, at + 1

    def _inflated(self, entry: _PackEntry) -> tuple[bytes, int]:
        """The entry's content, and the offset at which its compressed bytes end."""
        if entry.num_bytes > self.largest_bytes:
            raise ValueError(f"an object of {entry.num_bytes} bytes")
        self.spend(entry.num_bytes)
        inflater, made, at = zlib.decompressobj(), bytearray(), entry.zlib_at
        step = min(_FEED_BYTES, entry.num_bytes + 64)
        while not inflater.eof:
            fed = self.content[at : at + step]
            if not fed:
                raise ValueError("an object is cut off")
            made += inflater.decompress(fed, entry.num_bytes + 1 - len(made))
            if len(made) > entry.num_bytes:
                raise ValueError("an object is longer than it says")
            at += len(fed) - len(inflater.unused_data) - len(inflater.unconsumed_tail)
        return bytes(made), at

    def _read_ids(self) -> None:
        """Finds the base objects of deltas by id, as far as they are in this pack."""
        num_known = -1
        while num_known < len(self._by_id):
            num_known = len(self._by_id)
            known = set(self._by_id.values())
            for at in self._entries:
                if at not in known and self._kind_of(at) != "delta":
                    self._by_id[bytes.fromhex(self._object(at).id)] = at

    def _chain(self, at: int) -> tuple[list[int], bool]:
        """The entries from this one to the complete one, and whether such an entry exists."""
        chain = [at]
        while (base := self._entries[chain[-1]].base) is not None:
            below = self._by_id.get(base) if isinstance(base, bytes) else base
            if below is None or below not in self._entries or len(chain) > _LONGEST_CHAIN:
                return chain, False
            chain.append(below)
        return chain, True

    def _kind_of(self, at: int) -> str:
        chain, is_whole = self._chain(at)
        return _KINDS[self._entries[chain[-1]].kind] if is_whole else "delta"

    def _object(self, at: int) -> GitObject:
        chain, is_whole = self._chain(at)
        if not is_whole:
            delta = self._inflated(self._entries[at])[0]
            return GitObject("delta", b"".join(part for part in _parts(delta) if isinstance(part, bytes)))
        kind = _KINDS[self._entries[chain[-1]].kind]
        content = b""
        for one in reversed(chain):
            held = self._kept.get(one)
            if held is None:
                inflated = self._inflated(self._entries[one])[0]
                is_delta = self._entries[one].base is not None
                held = GitObject(kind, self._patched(content, inflated) if is_delta else inflated)
                self._keep(one, held)
            content = held.content
        return GitObject(kind, content)

    def _patched(self, base: bytes, delta: bytes) -> bytes:
        made = bytearray()
        for part in _parts(delta):
            made += part if isinstance(part, bytes) else base[part[0] : part[1]]
            if len(made) > self.largest_bytes:
                raise ValueError("an object grows too large")
        self.spend(len(made))
        return bytes(made)

    def _keep(self, at: int, held: GitObject) -> None:
        self._kept[at] = held
        self._num_kept_bytes += len(held.content)
        while self._num_kept_bytes > _KEPT_BYTES:
            self._num_kept_bytes -= len(self._kept.popitem(last=False)[1].content)


def _parts(delta: bytes) -> Iterator[bytes | tuple[int, int]]:
    """The parts from which a delta builds its result: bytes of its own, or begin and end of bytes of its base."""
    at = 0
    for _ in range(2):  # the lengths of base and result
        while delta[at] & 128:
            at += 1
        at += 1
    while at < len(delta):
        order = delta[at]
        at += 1
        if not order & 128:
            yield delta[at : at + order]
            at += order
            continue
        numbers = [0] * 7
        for bit in range(7):
            if order & 1 << bit:
                numbers[bit] = delta[at]
                at += 1
        begin = int.from_bytes(bytes(numbers[:4]), "little")
        yield begin, begin + (int.from_bytes(bytes(numbers[4:]), "little") or 1 << 16)


@dataclass(frozen=True, slots=True)
class Bundle:
    """The head of a bundle: the commits that its reader must have, the commits in it, and the offset of its pack."""

    needs: list[str]
    brings: list[str]
    pack_at: int

    @classmethod
    def read(cls, content: bytes) -> "Bundle":
        head, _, _ = content.partition(b"\n\n")
        needs, brings = list[str](), list[str]()
        for line in head.split(b"\n")[1:]:
            word = line.split(b" ")[0].decode("ascii", "replace")
            if word.startswith("-"):
                needs.append(word[1:])
            elif word and not word.startswith("@"):
                brings.append(word)
        return cls(needs, brings, len(head) + 2)


_UNREADABLE = (
    EOFError,
    IndexError,
    KeyError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,  # zipfile raises it for an encrypted file
    ValueError,
    lzma.LZMAError,
    struct.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    zstandard.ZstdError,
)
_TAR_MAGIC_AT, _TAR_MAGIC = 257, b"ustar"
_TAR_BLOCK_BYTES = 512
_ZIP_END, _ZIP_END_WITHIN_BYTES = b"PK\5\6", 65_557
_OBJECT = re.compile(
    r"(.+)/objects/(?:[0-9a-f]{2}/[0-9a-f]{38,62}|pack/pack-[0-9a-f]{40,64}\.(?:pack|idx|rev|bitmap))",
    re.DOTALL,
)
_UNKNOWN = (
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (b"Rar!\x1a\x07", "a RAR archive"),
    (b"\xed\xab\xee\xdb", "an RPM package"),
    (b"\x04\x22\x4d\x18", "an LZ4 file"),
    (b"hsqs", "a SquashFS image"),
)
_PIP_CACHE, _PIP_HEADER_BYTES = b"cc=", 4096  # the bytes before a response that older versions of pip keep
_AR, _AR_HEADER_BYTES = b"!<arch>\n", 60
_CHUNK_BYTES = 1 << 20
_ZLIB = tuple(bytes((0x78, level)) for level in (0x01, 0x5E, 0x9C, 0xDA))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackingLimits:
    """The limits of unpacking an image."""

    depth: int = 4  # levels of archives within archives
    piece_bytes: int = 256 << 20  # limit for one thing in a file
    read_bytes: int = 1 << 30  # limit for one file of the image
    file_bytes: int = 2 << 30  # limit for what is unpacked from one file of the image
    image_bytes: int = 8 << 30


@dataclass(frozen=True, slots=True)
class Piece:
    """A file of the image, or a file inside such a file. `trail` is its path and the names within archives, outermost first."""

    trail: tuple[str, ...]
    content: bytes
    modified_at: int = 0  # Unix seconds
    store: str = ""  # path of the store that contains it, if it is a git object; otherwise ""


@dataclass(slots=True)
class Commits:
    """The commits in one place, each with its parents, and the commits that are only mentioned."""

    path: str  # a path in the image
    parents: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    named: set[str] = field(default_factory=set[str])


class LimitReached(Exception):
    """No more of this file may be unpacked."""


@dataclass(slots=True)
class Unpacker:
    """Unpacks the files of one image. `commits` contains those found, by place; `skipped` what was not unpacked, with the reason."""

    limits: UnpackingLimits = field(default_factory=UnpackingLimits)
    commits: dict[str, Commits] = field(default_factory=dict[str, Commits])
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    _num_bytes: int = 0
    _num_file_bytes: int = 0

    def pieces(self, file: Piece) -> Iterator[Piece]:
        """The file, and everything inside of it."""
        self._num_file_bytes = 0
        try:
            yield from self._within(file, 0)
        except LimitReached as reason:
            self.skipped.setdefault(file.trail[0], str(reason))

    def _within(self, piece: Piece, depth: int) -> Iterator[Piece]:
        yield piece
        self._name_unknown(piece)
        opened = _opener(piece)
        if opened is None:
            return
        if depth >= self.limits.depth:
            raise LimitReached(f"more than {self.limits.depth} archives in each other")
        try:
            for one in opened(self, piece):
                yield from self._within(one, depth + 1)
        except _UNREADABLE:
            return
        except MemoryError:
            raise LimitReached("unpacking it takes too much memory") from None

    def _name_unknown(self, piece: Piece) -> None:
        for magic, name in _UNKNOWN:
            if piece.content.startswith(magic):
                self.skipped.setdefault(piece.trail[0], f"{name} is not unpacked")

    def spend(self, num_bytes: int) -> None:
        """Raises LimitReached if that many more bytes may not be unpacked."""
        self._num_bytes += num_bytes
        self._num_file_bytes += num_bytes
        if self._num_file_bytes > self.limits.file_bytes:
            raise LimitReached(f"more than {self.limits.file_bytes >> 20} MiB unpacked")
        if self._num_bytes > self.limits.image_bytes:
            raise LimitReached(f"more than {self.limits.image_bytes >> 20} MiB unpacked of the image")

    def read(self, stream: IO[bytes]) -> bytes:
        """The rest of the stream, even if it is damaged at its end."""
        made = bytearray()
        try:
            while chunk := stream.read(_CHUNK_BYTES):
                self.spend(len(chunk))
                made += chunk
                if len(made) > self.limits.piece_bytes:
                    raise LimitReached(f"more than {self.limits.piece_bytes >> 20} MiB in one piece")
        except _UNREADABLE:
            pass
        return bytes(made)

    def note(self, piece: Piece, found: GitObject) -> None:
        """Records a commit."""
        place = self.place(piece)
        place.parents[found.id] = found.parents()

    def place(self, piece: Piece) -> Commits:
        """The commits of the place of this piece: one git directory, or one file."""
        path, *inner = piece.trail
        if inner:
            where = ": ".join((path, *inner[:-1], store_of(inner[-1]) or inner[-1]))
        else:
            where = path = store_of(path) or path
        return self.commits.setdefault(where, Commits(path))


def store_of(path: str) -> str:
    """The git directory to which the file at `path` belongs as an object or a pack; "" if its name is not that of one."""
    named = _OBJECT.fullmatch(path)
    return named[1] if named else ""


_Opener = Callable[[Unpacker, Piece], Iterator[Piece]]


def _opener(piece: Piece) -> _Opener | None:
    """The function that unpacks the piece; None if it contains nothing. A git object may be an archive, too."""
    head = piece.content[:_TAR_BLOCK_BYTES]
    for magic, opener in _BY_MAGIC:
        if head.startswith(magic):
            return opener
    if head.startswith(_PIP_CACHE):
        return _response
    if head[_TAR_MAGIC_AT:].startswith(_TAR_MAGIC):
        return _tar
    if BUNDLE.match(head):
        return _bundle
    if head.startswith(_ZLIB):
        return _deflated
    return _zip if _ZIP_END in piece.content[-_ZIP_END_WITHIN_BYTES:] else None


def _response(_: Unpacker, piece: Piece) -> Iterator[Piece]:
    """The content of a response in pip's cache: its headers, then an archive."""
    starts = [
        piece.content.find(magic, 0, _PIP_HEADER_BYTES) for magic in (b"\x1f\x8b\x08", b"BZh", b"PK\3\4")
    ]
    for at in sorted(start for start in starts if start > 0):
        yield Piece((*piece.trail, "response"), piece.content[at:])


def _tar(unpacker: Unpacker, piece: Piece) -> Iterator[Piece]:
    yield from _members(unpacker, piece, io.BytesIO(piece.content))


def _members(unpacker: Unpacker, piece: Piece, stream: Any) -> Iterator[Piece]:
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            opened = archive.extractfile(member) if member.isreg() else None
            if opened is not None:
                content = unpacker.read(opened)
                yield Piece((*piece.trail, member.name), content, int(member.mtime))


def _compressed(decompressed: Callable[[IO[bytes]], Any]) -> _Opener:
    def pieces(unpacker: Unpacker, piece: Piece) -> Iterator[Piece]:
        def stream() -> Any:
            return decompressed(io.BytesIO(piece.content))

        try:
            head = stream().read(_TAR_BLOCK_BYTES)
        except _UNREADABLE:
            head = b""
        if head[_TAR_MAGIC_AT:].startswith(_TAR_MAGIC):
            yield from _members(unpacker, piece, stream())
        elif content := unpacker.read(stream()):
            stem = posixpath.splitext(posixpath.basename(piece.trail[-1]))[0]
            yield Piece((*piece.trail, stem), content)

    return pieces


def _zip(unpacker: Unpacker, piece: Piece) -> Iterator[Piece]:
    with zipfile.ZipFile(io.BytesIO(piece.content)) as archive:
        for member in archive.infolist():
            if member.flag_bits & 1:
                unpacker.skipped.setdefault(piece.trail[0], "an encrypted archive")
            if member.is_dir() or member.flag_bits & 1:
                continue
            try:
                with archive.open(member) as opened:
                    content = unpacker.read(opened)
            except _UNREADABLE:
                continue
            yield Piece((*piece.trail, member.filename), content)


def _ar(_: Unpacker, piece: Piece) -> Iterator[Piece]:
    at = len(_AR)
    while len(header := piece.content[at : at + _AR_HEADER_BYTES]) == _AR_HEADER_BYTES:
        size = int(header[48:58])
        if size < 0:
            return
        at += _AR_HEADER_BYTES
        name = header[:16].decode("utf-8", "replace").strip(" /")
        yield Piece((*piece.trail, name), piece.content[at : at + size])
        at += size + size % 2


def _deflated(unpacker: Unpacker, piece: Piece) -> Iterator[Piece]:
    """A loose git object, or other data that zlib compressed."""
    inflater, made = zlib.decompressobj(), bytearray()
    for at in range(0, len(piece.content), _FEED_BYTES):
        chunk = inflater.decompress(piece.content[at : at + _FEED_BYTES])
        unpacker.spend(len(chunk))
        made += chunk
        if len(made) > unpacker.limits.piece_bytes:
            raise LimitReached(f"more than {unpacker.limits.piece_bytes >> 20} MiB in one piece")
        if inflater.eof:
            break
    content = bytes(made)
    header = LOOSE.match(content)
    if header is None:
        yield Piece((*piece.trail, "inflated"), content)
        return
    yield from _of_git(unpacker, piece, GitObject(header[1].decode(), content[header.end() :]))


def _pack(unpacker: Unpacker, piece: Piece) -> Iterator[Piece]:
    yield from _of_pack(unpacker, piece, 0)


def _bundle(unpacker: Unpacker, piece: Piece) -> Iterator[Piece]:
    bundle = Bundle.read(piece.content)
    unpacker.place(piece).named.update(bundle.needs, bundle.brings)
    yield from _of_pack(unpacker, piece, bundle.pack_at)


def _of_pack(unpacker: Unpacker, piece: Piece, start: int) -> Iterator[Piece]:
    pack = Pack(piece.content, start, unpacker.limits.piece_bytes, unpacker.spend)
    for one in pack.objects():
        yield from _of_git(unpacker, piece, one)


def _of_git(unpacker: Unpacker, piece: Piece, found: GitObject) -> Iterator[Piece]:
    if found.kind == "commit":
        unpacker.note(piece, found)
    if found.kind in ("blob", "delta"):
        store = unpacker.place(piece)
        yield Piece((*piece.trail, "object"), found.content, store=store.path)


def _gunzipped(file: IO[bytes]) -> Any:
    return gzip.GzipFile(fileobj=file)


def _unzstd(file: IO[bytes]) -> Any:
    return zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(file, read_across_frames=True)


_BY_MAGIC: tuple[tuple[bytes, _Opener], ...] = (
    (b"\x1f\x8b", _compressed(_gunzipped)),
    (b"BZh", _compressed(bz2.BZ2File)),
    (b"\xfd7zXZ\0", _compressed(lzma.LZMAFile)),
    (b"]\0\0", _compressed(lzma.LZMAFile)),
    (b"\x28\xb5\x2f\xfd", _compressed(_unzstd)),
    (b"PK\3\4", _zip),
    (_AR, _ar),
    (PACK, _pack),
)
