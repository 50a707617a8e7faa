"""Searches all files of an image for the answer to a task, in a process with limits: nothing in the image is executed or trusted.

The answer is recognised by its signature. A copy of the base commit is not a leak, so text in its files is not evidence of the answer. Git
objects are searched by content, too, and by their commits: another repository with commits of this project that are not in the base's
history comes from a later time, whatever they contain.
"""

import _imp
import hashlib
import posixpath
import re
import socket
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import IO, Literal, cast

import msgspec

from workers.leaks.signature import COMMON_IN, ELF, Matcher, Signature, Window, is_answer, is_near
from workers.leaks.unpacking import Piece, Unpacker, UnpackingLimits, store_of

BYTECODE = (".pyc", ".pyo")

# The first two bytes of a module count up from 3,000 in Python 3. At these values the header changed.
_WITH_LENGTH, _WITH_FLAGS, _END = 3190, 3390, 20_000


@dataclass(frozen=True, slots=True)
class Bytecode:
    """The header of bytecode: the time and length of the source, or its hash."""

    magic: int
    modified_at: int = 0  # Unix seconds, modulo 2**32
    num_bytes: int | None = None  # None: not known
    source_hash: bytes = b""

    @classmethod
    def read(cls, content: bytes) -> "Bytecode":
        magic, version = int.from_bytes(content[:4], "little"), int.from_bytes(content[:2], "little")
        if not _WITH_LENGTH <= version < _END:
            return cls(magic, int.from_bytes(content[4:8], "little"))
        if version < _WITH_FLAGS:
            return cls(magic, int.from_bytes(content[4:8], "little"), int.from_bytes(content[8:12], "little"))
        if content[4:5] and content[4] & 1:
            return cls(magic, source_hash=content[8:16])
        return cls(magic, int.from_bytes(content[8:12], "little"), int.from_bytes(content[12:16], "little"))

    def is_of(self, source: bytes, modified_at: int) -> bool:
        """Whether the header says that it was compiled from this source."""
        if self.source_hash:
            return self.source_hash == _imp.source_hash(self.magic, source)
        is_as_long = self.num_bytes is None or self.num_bytes == len(source) % 2**32
        return is_as_long and self.modified_at == modified_at % 2**32


def source_of(path: str) -> str:
    """The path at which Python looks for the source of the compiled module at `path`."""
    folder, name = posixpath.split(path)
    if posixpath.basename(folder) == "__pycache__":
        folder = posixpath.dirname(folder)
    return posixpath.join(folder, f"{name.partition('.')[0]}.py")


CONNECT_S = 60.0
EVAL_SCRIPT = "eval script"  # a kind of leak that is recognised by its name alone
_SYSTEM = re.compile(
    r"/(?:proc|sys|dev|usr|opt|var|lib|lib64|bin|sbin|etc|boot)/|.*/(?:site-packages|dist-packages|node_modules|\.git)/"
)
_INSTALLED = re.compile(
    r"/(?:usr/(?:local/)?lib|lib|lib64)/|.*/(?:site-packages|dist-packages|node_modules)/"
)
_CODE = (".py", ".pyc", ".pyo", ".so", ".js", ".mjs", ".cjs", ".ts", ".rb", ".php", ".pl", ".jar", ".class")
_ARTICLES = {"file": "a file", "archive": "an archive", "git objects": "git objects"}
_EVAL_SCRIPT_NAME = re.compile(r"/(?:eval|eval_script|run_tests|run_script)\.sh$|/r2e_tests/")


class KnownRepository(msgspec.Struct, frozen=True, kw_only=True):
    """The repository that an agent may know: the task's repository at its base commit. Paths are absolute, as bytes."""

    top: bytes = b""  # the root of the work tree; empty: no repository
    git_directory: bytes = b""
    files: dict[bytes, str] = {}  # path below `top` -> id of the blob in the base commit
    history: frozenset[str] = frozenset()  # hashes of commits


class ImageQuery(msgspec.Struct, frozen=True, kw_only=True):
    signature: Signature
    base: KnownRepository
    limits: UnpackingLimits = UnpackingLimits()


class FoundLeak(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A leak. `paths` are the paths in the image that have to be removed; none if they cannot be, and `why` gives the reason."""

    kind: str
    where: str
    paths: tuple[str, ...] = ()
    why: str = ""


class SearchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The leaks, and the files that were not searched, each with the reason."""

    found: tuple[FoundLeak, ...]
    skipped: tuple[str, ...]


def search(address: str, query: ImageQuery) -> SearchReport:
    """Searches the tar archive that comes through the Unix socket at `address`."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(CONNECT_S)
        connection.connect(address)
        connection.settimeout(None)
        with connection.makefile("rb", buffering=1 << 20) as stream:
            return search_archive(cast(IO[bytes], stream), query)


def search_archive(stream: IO[bytes], query: ImageQuery) -> SearchReport:
    """Searches a tar archive of an image's files. Raises tarfile.TarError if it is not one."""
    search = _Search(query)
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            path = posixpath.normpath("/" + member.name.lstrip("/"))
            if member.islnk():
                search.links["/" + member.linkname.lstrip("/")].append(path)
                continue
            opened = archive.extractfile(member) if member.isreg() else None
            if opened is None:
                continue
            head = opened.read(len(ELF))
            if member.size > query.limits.piece_bytes and head == ELF:
                continue  # such libraries are not searched anyway, and would only fill memory
            if member.size > query.limits.read_bytes:
                search.unpacker.skipped[path] = f"longer than {query.limits.read_bytes >> 20} MiB"
                continue
            search.look_at(Piece((path,), head + opened.read(), int(member.mtime)))
    return search.report()


@dataclass(frozen=True, slots=True)
class _FoundAt:
    """The location of some evidence: `path` would have to be removed, `where` is its name in reports."""

    kind: Literal["file", "archive", "git objects"]
    path: str
    where: str
    near: bool
    loose: bool


@dataclass(slots=True)
class _Search:
    query: ImageQuery
    unpacker: Unpacker = field(init=False)
    links: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _matcher: Matcher = field(init=False)
    _evidence: defaultdict[_FoundAt, set[Window]] = field(default_factory=lambda: defaultdict(set))
    _base_evidence: set[Window] = field(default_factory=set[Window])
    _leaks: set[tuple[str, str, str]] = field(default_factory=set[tuple[str, str, str]])  # kind, where, path
    _bytecode: list[tuple[Piece, Bytecode]] = field(default_factory=list[tuple[Piece, Bytecode]])
    # Modules that the fix changes, by their paths.
    _sources: dict[str, Piece] = field(default_factory=dict[str, Piece])

    def __post_init__(self) -> None:
        self.unpacker = Unpacker(self.query.limits)
        self._matcher = Matcher(self.query.signature)

    def look_at(self, file: Piece) -> None:
        path = file.trail[0]
        if self._is_own_object(path):
            return
        is_base = self._is_base(file)
        if path.endswith(".py") and self._is_module_of_fix(path):
            self._sources[path] = file
        try:
            for piece in self.unpacker.pieces(file):
                if is_base:
                    self._learn(piece)
                else:
                    self._look_into(piece)
        except MemoryError:
            self.unpacker.skipped[path] = "it takes too much memory"
        if not is_base and not _SYSTEM.match(path) and _EVAL_SCRIPT_NAME.search(path):
            self._add(EVAL_SCRIPT, path, path)

    def report(self) -> SearchReport:
        """The results; call it after the last file."""
        self._judge_evidence()
        self._judge_bytecode()
        self._judge_commits()
        skipped = (f"{path}: {why}" for path, why in self.unpacker.skipped.items())
        found = sorted(self._described(*leak) for leak in self._leaks)
        return SearchReport(found=tuple(found), skipped=tuple(sorted(map(_shown, skipped))))

    def _is_own_object(self, path: str) -> bool:
        """Whether agent_images.py handles the object, because it belongs to the task's repository."""
        own = _text(self.query.base.git_directory)
        return bool(own) and store_of(path) == own

    def _is_base(self, file: Piece) -> bool:
        """Whether the base commit contains the file with this content."""
        top = _text(self.query.base.top).rstrip("/") + "/"
        path = file.trail[0]
        known = self.query.base.files.get(_bytes(path[len(top) :])) if path.startswith(top) else None
        if known is None:
            return False
        digest = hashlib.sha256 if len(known) == hashlib.sha256().digest_size * 2 else hashlib.sha1
        return known == digest(b"blob %d\0" % len(file.content) + file.content).hexdigest()

    def _is_near(self, path: str) -> bool:
        return is_near(path, self.query.signature.paths)

    def _learn(self, piece: Piece) -> None:
        near = self._is_near(piece.trail[-1])
        self._base_evidence |= self._matcher.evidence(piece.content, near=near)

    def _look_into(self, piece: Piece) -> None:
        path, where = piece.trail[0], ": ".join(piece.trail)
        if piece.trail[-1].endswith(BYTECODE) and self._is_module_of_fix(source_of(piece.trail[-1])):
            self._bytecode.append((replace(piece, content=b""), Bytecode.read(piece.content)))
        near = self._is_near(piece.trail[-1])
        found = self._matcher.evidence(piece.content, near=near)
        if found:
            kind = "git objects" if piece.store else "archive" if len(piece.trail) > 1 else "file"
            if piece.store:
                path = piece.store
                where = ": ".join((path, *piece.trail[1:-1]))
            place = _FoundAt(kind, path, where, near, loose=not _SYSTEM.match(path))
            self._evidence[place] |= found
        digests = [digest for size, digest in self.query.signature.files if size == len(piece.content)]
        if digests and hashlib.sha256(piece.content).hexdigest() in digests:
            self._add("hidden file", where, path)

    def _judge_evidence(self) -> None:
        times: defaultdict[Window, set[str]] = defaultdict(set)
        for place, found in self._evidence.items():
            for one in found:
                times[one].add(place.path)
        common = {one for one, paths in times.items() if len(one) == 1 and len(paths) >= COMMON_IN}
        for part in self.query.signature.parts:
            places = [
                place
                for place, found in self._evidence.items()
                if is_answer(
                    part, found - self._base_evidence, near=place.near, loose=place.loose, common=common
                )
            ]
            in_archives = {place.path for place in places if place.kind != "file"}
            for place in places:
                # The raw bytes of an archive may contain the answer, too; then only its member is named.
                if place.kind != "file" or place.path not in in_archives:
                    self._add(f"{part.name} in {_ARTICLES[place.kind]}", place.where, place.path)

    def _judge_bytecode(self) -> None:
        """Judges bytecode.

        If it was not compiled from the source beside it, it may be the compiled fix. Python ignores such files, but people may read them.
        """
        leaking = {path for _, _, path in self._leaks}
        for piece, bytecode in self._bytecode:
            path, *inner = piece.trail
            source = source_of(path)
            beside = self._sources.get(source)
            if inner:
                is_leak = path in leaking
            else:
                is_leak = (
                    source in leaking
                    or beside is None
                    or not bytecode.is_of(beside.content, beside.modified_at)
                )
            if is_leak:
                self._add("compiled solution", ": ".join(piece.trail), path)

    def _is_module_of_fix(self, source: str) -> bool:
        """Whether a changed file has this name and, if it is in a folder, is in a folder of the same name."""
        for path in self.query.signature.paths:
            folder, name = posixpath.split(path)
            if name == posixpath.basename(source) and (
                not folder or posixpath.basename(folder) == posixpath.basename(posixpath.dirname(source))
            ):
                return True
        return False

    def _judge_commits(self) -> None:
        history = self.query.base.history
        for where, commits in self.unpacker.commits.items():
            if history.isdisjoint({*commits.parents, *commits.named, *_all(commits.parents.values())}):
                continue
            known, todo = set(history), [one for one in commits.parents if one in history]
            while todo:
                new = [one for one in commits.parents.get(todo.pop(), ()) if one not in known]
                known.update(new)
                todo += new
            num_later = len(commits.parents.keys() - known)
            if num_later:
                self._add("other repository", f"{where}, {num_later} commits after the base", commits.path)

    def _add(self, kind: str, where: str, path: str) -> None:
        self._leaks.add((kind, where, path))

    def _described(self, kind: str, where: str, path: str) -> FoundLeak:
        paths = (path, *self.links[path])
        git_directory = _text(self.query.base.git_directory)
        why = ""
        if any(_shown(one) != one for one in paths):
            why = "its name is no UTF-8"
        elif git_directory and f"{path}/".startswith(f"{git_directory}/"):
            why = "it is in the repository's git directory"
        elif _is_needed(kind, path):
            why = "it is installed code, which others may need"
        return FoundLeak(kind=kind, where=_shown(where), paths=() if why else paths, why=why)


def _is_needed(kind: str, path: str) -> bool:
    """Whether the file is code that a program may need to run. Bytecode beside its source is not."""
    if not _INSTALLED.match(path) or not path.endswith(_CODE):
        return False
    return kind == "solution in a file" or (kind == "compiled solution" and "/__pycache__/" not in path)


def _all(lists: Iterable[list[str]]) -> Iterator[str]:
    for one in lists:
        yield from one


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


def _bytes(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


def _shown(text: str) -> str:
    return _bytes(text).decode("utf-8", "backslashreplace")
