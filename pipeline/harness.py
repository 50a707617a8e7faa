"""Harnesses: the agent programs that play episodes in place of the built-in loop, the TOML files that describe them, and the manifests by
which copies of their content are compared.

`Harness` is what travels in a request, and is enough to start the program in a container: nothing else of a file is needed for that.
`HarnessFile` is a whole file, with what `swerve harness build` makes the image of. A file `NAME.toml` has its locked packages beside it, in
`NAME.package-lock.json` (npm) or `NAME.requirements.txt` (pip), each package with its hash. docs/harnesses.md explains the keys.

The program and its runtime are in HARNESS_DIR of the agent's container, read-only, and its home is HOME_DIR. It is started by absolute
path, because PATH is the task's, and gets options in its command instead of variables, which the task's programs would inherit.

A manifest has one line for each file, link and directory, with mode and SHA-256. The name of a harness's content is the SHA-256 of its
manifest, which is part of it as the file MANIFEST. Owner and times are left out.
"""

import dataclasses
import hashlib
import io
import re
import tarfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Literal, get_args

import msgspec
from msgspec import structs

from pipeline.errors import RequestError
from pipeline.message import Amount, Count, Message

HARNESS_DIR = "/opt/swerve/harness"
HOME_DIR = "/opt/swerve/home"
PROBLEM_FILE = f"{HOME_DIR}/problem.md"
SHIPPED = Path(__file__).with_name("harnesses")
UNTESTED = SHIPPED / "untested"  # files of programs that were never built or played with Swerve
NPM_LOCK, PIP_LOCK = ".package-lock.json", ".requirements.txt"
LAYOUT = "1"  # version of the images' layout; a new number gives every image a new name
LONGEST_ARGUMENT_BYTES = 131_071  # Linux allows no longer argument

# Some programs use the API "gemini", which our endpoint does not offer.
Dialect = Literal["chat", "responses", "messages", "gemini"]
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)


class Footprint(Message, frozen=True, kw_only=True):
    """The resources of one episode of the program, measured once, for plans."""

    opening_tokens: Count = 0  # tokens of its first prompt, tools included, without the problem
    memory_bytes: Count = 0  # largest memory of all its processes
    cpu_s: Amount = 0.0  # CPU time of a short episode, start included
    source: str = ""  # source of these figures, for display


class Harness(Message, frozen=True, kw_only=True):
    """An agent program in one version: its image and the command that starts it. Values may contain placeholders, see `filled`."""

    name: str
    version: str
    image: str  # the image from which volumes are filled
    content: str = ""  # "sha256:..." of the content that the image must have; "" accepts any content
    dialect: Dialect  # the API that it uses with its endpoint
    command: tuple[str, ...]
    # Added to the task's variables; what the agent runs inherits them.
    env: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    # Text by path in its home directory
    files: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    # Patterns of paths in the workdir that are the program's own and no part of the diff.
    leftovers: tuple[str, ...] = ()
    footprint: Footprint = Footprint()
    # Whether it works by tool calls, which the policy's chat template must then support
    uses_tools: bool = True
    # Its one group matches the command in a reply; "" where the program reads no commands from text.
    command_pattern: str = ""


def check_can_play(harness: Harness, context_tokens: int, max_new_tokens: int) -> None:
    """Raises ValueError if no endpoint of ours speaks the program's dialect, or if the prompt that it sends before the task, measured once,
    leaves no room for a task and a reply.
    """
    if harness.dialect == "gemini":
        raise ValueError(
            f"{harness.name} speaks the dialect {harness.dialect}, for which there is no endpoint: choose another program"
        )
    room_tokens, opening_tokens = context_tokens - max_new_tokens, harness.footprint.opening_tokens
    if opening_tokens >= max(room_tokens, 1):
        raise ValueError(
            f"{harness.name} begins with {opening_tokens} tokens before the task, and a context of {context_tokens} tokens with replies of"
            f" {max_new_tokens} has room for {room_tokens}: give it a longer context, or shorter replies"
        )


@dataclass(frozen=True, slots=True)
class EpisodeValues:
    """The values of a harness's placeholders in one episode."""

    problem: str  # the problem statement, as the program gets it
    workdir: str
    model: str  # the name by which it calls the policy
    port: int  # port of its endpoint, on 127.0.0.1
    context_tokens: int  # number of tokens that the policy can see at one time
    max_new_tokens: int  # number of tokens of the longest reply

    def texts(self) -> dict[str, str]:
        """The text of each placeholder."""
        return {
            "harness": HARNESS_DIR,
            "home": HOME_DIR,
            "workdir": self.workdir,
            "problem": self.problem,
            "problem_file": PROBLEM_FILE,
            "model": self.model,
            "port": str(self.port),
            "context_tokens": str(self.context_tokens),
            "max_new_tokens": str(self.max_new_tokens),
            "prompt_tokens": str(max(1, self.context_tokens - self.max_new_tokens)),
        }


@dataclass(frozen=True, slots=True)
class Invocation:
    """The command, variables and files with which the program is started in one episode."""

    command: tuple[str, ...]
    env: dict[str, str]  # added to the task's variables
    files: dict[str, str]  # text by absolute path


# Names in single braces. Doubled braces are a template of the program's own and stay; in JSON, a brace is followed by a quote.
_PLACEHOLDER = re.compile(r"(?<!\{)\{([a-z_]+)\}|\{\{[a-z_]+\}\}")
PLACEHOLDERS = tuple(EpisodeValues("", "", "", 0, 0, 0).texts())
_IN_COMMAND_ONLY = {"problem"}  # a text with quotes and line breaks cannot be inserted into a file


def filled(harness: Harness, values: EpisodeValues) -> Invocation:
    """The program's invocation with all placeholders replaced. Raises RequestError if the problem is too long for an argument."""
    texts = values.texts()

    def fill(text: str) -> str:
        return _PLACEHOLDER.sub(lambda found: texts[found[1]] if found[1] else found[0], text)

    command = tuple(fill(word) for word in harness.command)
    longest_bytes = max(len(word.encode("utf-8", "surrogateescape")) for word in command)
    if longest_bytes > LONGEST_ARGUMENT_BYTES:
        raise RequestError(
            f"{harness.name} takes the problem as an argument of its command, which may have {LONGEST_ARGUMENT_BYTES} bytes;"
            f" this one has {longest_bytes}"
        )
    files = {f"{HOME_DIR}/{path}": fill(text) for path, text in harness.files.items()}
    if any("{problem_file}" in word for word in harness.command):
        files[PROBLEM_FILE] = values.problem
    env = {"HOME": HOME_DIR, **{name: fill(text) for name, text in harness.env.items()}}
    return Invocation(command, env, files)


class Build(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The sources of the image: one of the first three."""

    npm: dict[str, str] = {}  # exact version by package; Node itself is one of them
    pip: tuple[str, ...] = ()  # NAME==VERSION; Debian's Python comes with them
    directory: str = ""  # a directory that is copied unchanged; relative to the file
    libraries: bool = False  # add Debian's loader and shared libraries; pip always has them
    drop: tuple[str, ...] = ()  # glob patterns of paths that the program does not need


Pattern = Annotated[str, msgspec.Meta(min_length=1)]


class _FootprintKeys(Footprint, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _Keys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of a file in their written form."""

    name: Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9][a-z0-9-]{0,30}\Z")]
    version: Annotated[str, msgspec.Meta(pattern=r"\A[0-9][0-9A-Za-z.+-]*\Z")]
    licence: str
    dialect: Dialect
    command: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    version_command: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    glibc: str = ""
    image: str = ""
    content: Annotated[str, msgspec.Meta(pattern=r"\A(sha256:[0-9a-f]{64})?\Z")] = ""
    env: dict[str, str] = {}
    files: dict[str, str] = {}
    leftovers: tuple[Pattern, ...] = ()
    uses_tools: bool = True
    command_pattern: str = ""
    footprint: _FootprintKeys = _FootprintKeys()
    build: Build


_MEANT = {
    "name": "it must be a word of at most 31 small letters, digits and hyphens",
    "version": "it must be one exact version, such as 1.2.3",
    "content": "it must be sha256: and 64 hexadecimal digits, as `swerve harness ls` prints them",
    "dialect": f"it must be one of {', '.join(DIALECTS)}",
    "command": "it must be a list of words, the program's absolute path first",
    "version_command": "it must be a list of words, the program's absolute path first",
}


@dataclass(frozen=True, slots=True)
class HarnessFile:
    """One file after its checks."""

    path: Path
    harness: Harness
    licence: str
    version_command: tuple[str, ...]  # prints the version
    glibc: str  # the oldest glibc in a task's image that works for it; "": it uses nothing of the image
    build: Build

    @property
    def lock(self) -> Path | None:
        """The file of its locked packages; None if it has no packages."""
        if self.build.directory:
            return None
        return self.path.with_name(self.path.stem + (NPM_LOCK if self.build.npm else PIP_LOCK))

    @property
    def directory(self) -> Path:
        """The directory that `build.directory` names."""
        return self.path.parent / self.build.directory


def shipped() -> list[str]:
    """The names of the harnesses that come with Swerve."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def untested() -> list[str]:
    """The names of files of programs that nobody has built or played with Swerve."""
    return sorted(path.stem for path in UNTESTED.glob("*.toml"))


def read_harness(name: str | Path, *, locked: bool = True) -> HarnessFile:
    """The harness with a name that comes with Swerve, or with the path of a file. Raises ValueError that names the key and the fix.

    Without `locked`, packages need no lock, and the name of the image does not depend on its content.
    """
    folder = SHIPPED if name in shipped() else UNTESTED if name in untested() else None
    path = Path(name) if folder is None else folder / f"{name}.toml"
    try:
        file = msgspec.convert(tomllib.loads(path.read_text()), _Keys)
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}; give the path of a harness file, or one of {', '.join(shipped())}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {_refusal(error)}") from error
    for fault in _faults(file):
        raise ValueError(f"{path}: {fault}")
    return _checked(path, file, locked)


def _checked(path: Path, file: _Keys, locked: bool) -> HarnessFile:
    harness = Harness(
        name=file.name,
        version=file.version,
        image=file.image,
        content=file.content,
        dialect=file.dialect,
        command=file.command,
        env=file.env,
        files=file.files,
        leftovers=file.leftovers,
        uses_tools=file.uses_tools,
        command_pattern=file.command_pattern,
        footprint=Footprint(**structs.asdict(file.footprint)),
    )
    whole = HarnessFile(path, harness, file.licence, file.version_command, file.glibc, file.build)
    if file.image:
        return whole
    tag = f"{file.version.replace('+', '-')}-{_recipe(whole, locked)[:12]}"
    named = structs.replace(harness, image=f"swerve/harness-{file.name}:{tag}")
    return dataclasses.replace(whole, harness=named)


def _recipe(file: HarnessFile, locked: bool) -> str:
    """The digest of everything from which an image is made. Raises ValueError if a lock or a directory is missing."""
    words = [LAYOUT, file.harness.name, file.harness.version, msgspec.json.encode(file.build).decode()]
    if file.lock is None:
        if not file.directory.is_dir():
            raise ValueError(f"{file.path}: build.directory: there is no directory {file.directory}")
        words.append(_manifest_of_directory(file.directory))
    elif locked:
        if not file.lock.is_file():
            raise ValueError(
                f"{file.path}: build: its packages are not locked; `swerve harness lock {_named(file.path)}` writes {file.lock.name}"
            )
        words.append(file.lock.read_text())
    return hashlib.sha256(msgspec.json.encode(words)).hexdigest()


def _named(path: Path) -> str:
    """The argument by which a command gets the file."""
    return path.stem if path.parent in (SHIPPED, UNTESTED) else str(path)


def _refusal(error: msgspec.ValidationError) -> str:
    text, _, place = str(error).partition(" - at `$")
    key = ".".join(re.findall(r"[^.\[\]`]+", place.replace("[...]", "")))
    if found := re.fullmatch(r"Object contains unknown field `(.*)`", text):
        return f"{'.'.join(filter(None, (key, found[1])))}: a harness has no such key; docs/harnesses.md has them all"
    if found := re.fullmatch(r"Object missing required field `(.*)`", text):
        return f"{'.'.join(filter(None, (key, found[1])))}: the key is missing; docs/harnesses.md says what it means"
    return f"{key}: {_MEANT.get(key) or text}"


# Variables that the programs of a task read. The agent's commands would inherit them from the agent program.
_LEAKING = re.compile(
    r"PATH|HOME|ENV|BASH_ENV|SHELLOPTS|BASHOPTS|IFS|CLASSPATH|GIT_.*|LD_.*|PYTHON.*|NODE_(?:OPTIONS|PATH)|RUBY(?:OPT|LIB)"
    r"|PERL5?(?:OPT|LIB)|JAVA_TOOL_OPTIONS|_JAVA_OPTIONS|GO(?:PATH|ROOT|FLAGS)|CARGO_.*|RUST.*|XDG_.*|TMPDIR|LANG|LC_.*"
)
_VERSION = r"[0-9][0-9A-Za-z.+-]*"


def _faults(file: _Keys) -> Iterator[str]:
    for key, command in (("command", file.command), ("version_command", file.version_command)):
        if not command[0].startswith("{harness}/"):
            yield f"{key}: {command[0]!r} is not below {{harness}}/; start the program by that path, because PATH is the task's"
    if not any(word in text for text in file.command for word in ("{problem}", "{problem_file}")):
        yield "command: it gives the program no task; put {problem} or {problem_file} where the text belongs"
    places: dict[str, Mapping[str, str]] = {
        "command": {str(place): word for place, word in enumerate(file.command)},
        "version_command": {str(place): word for place, word in enumerate(file.version_command)},
        "env": file.env,
        "files": file.files,
    }
    if not any("{port}" in text for texts in places.values() for text in texts.values()):
        yield "files: nothing tells the program its endpoint; put {port} into a file, a variable or the command"
    for key, texts in places.items():
        for name, text in texts.items():
            yield from (f"{key}.{name}: {fault}" for fault in _placeholder_faults(key, text))
    for name in file.env:
        if _LEAKING.fullmatch(name):
            yield f"env.{name}: the task's own programs read this variable and would inherit it; use an option in the command instead"
    for key, paths in (("files", file.files), ("leftovers", file.leftovers), ("build.drop", file.build.drop)):
        for path in paths:
            if path.startswith("/") or ".." in path.split("/") or not path.strip():
                yield f"{key}: {path!r} is not a relative path without .."
    yield from _pattern_faults(file)
    if file.footprint != _FootprintKeys() and not file.footprint.source:
        yield "footprint.source: the key is missing; say where the figures of [footprint] are from"
    yield from _build_faults(file.build)


def _placeholder_faults(key: str, text: str) -> Iterator[str]:
    for name in filter(None, _PLACEHOLDER.findall(text)):
        if name not in PLACEHOLDERS:
            yield f"{{{name}}} is not a placeholder; there are {', '.join(f'{{{one}}}' for one in PLACEHOLDERS)}"
        elif name in _IN_COMMAND_ONLY and key != "command":
            yield f"{{{name}}} is allowed in the command only; use {{problem_file}}"
        elif key == "version_command" and name != "harness":
            yield f"{{{name}}} is not known when the version is asked for; use {{harness}} only"


def _pattern_faults(file: _Keys) -> Iterator[str]:
    if not file.command_pattern:
        return
    if file.uses_tools:
        yield "command_pattern: the program reads commands from calls of tools; leave it out, or write uses_tools = false"
    try:
        num_groups = re.compile(file.command_pattern).groups
    except re.error as error:
        yield f"command_pattern: not a regular expression of Python's: {error}"
    else:
        if num_groups != 1:
            yield f"command_pattern: it has {num_groups} groups; give it one, around the command"


def _build_faults(build: Build) -> Iterator[str]:
    if sum(map(bool, (build.npm, build.pip, build.directory))) != 1:
        yield "build: give exactly one of npm, pip and directory"
    for name, version in build.npm.items():
        if not re.fullmatch(_VERSION, version):
            yield f"build.npm.{name}: {version!r} is not an exact version; write one, such as 1.2.3"
    for requirement in build.pip:
        if not re.fullmatch(rf"[A-Za-z0-9._-]+(\[[a-z0-9,._-]+\])?=={_VERSION}", requirement):
            yield f"build.pip: {requirement!r} is not an exact version; write NAME==1.2.3"


MANIFEST = "MANIFEST"
READ_BYTES = 1024 * 1024


class UnequalContent(Exception):
    """A copy differs from its manifest; the message names the first difference."""


def write_archive(directory: Path, out: IO[bytes], *, below: str) -> str:
    """Writes `directory` and its manifest to `out` as a tar archive with all paths below `below`. Returns the content's name.

    The same content always makes the same bytes.
    """
    manifest = _manifest_of_directory(directory).encode()
    with tarfile.open(fileobj=out, mode="w|") as tar:
        for path in (directory, *_paths(directory)):
            entry = _entry(directory, path)
            entry.name = f"{below.strip('/')}/{entry.name}"
            with _opened(path) as content:
                tar.addfile(entry, content)
        entry = tarfile.TarInfo(f"{below.strip('/')}/{MANIFEST}")
        entry.size, entry.mode = len(manifest), 0o644
        tar.addfile(entry, io.BytesIO(manifest))
    return _content_name(manifest)


def _content_name(manifest: bytes) -> str:
    """The name of the content that has this manifest."""
    return f"sha256:{hashlib.sha256(manifest).hexdigest()}"


def _manifest_of_directory(directory: Path) -> str:
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
    if _content_name(manifest) != content:
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
