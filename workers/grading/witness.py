"""A witness in the process that runs the tests: nothing that code under test prints can contradict what it reports.

witness_plugin/ is copied into every Python installation of the container as a plugin that pytest finds by itself, and into
the start of a Python that runs unittest. No variable is set, so no script can undo or break it by accident. It reports over
the sandbox's side channel. Where it never starts (another runner, another user, pytest without automatic plugins), the log
and the exit status decide alone.

It is no proof: code under test is in the same process, and code written against this very witness can take it over.
"""

import base64
import binascii
import fnmatch
import functools
import marshal
import re
import secrets
import shlex
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import msgspec

PLUGIN = Path(__file__).with_name("witness_plugin")
# The modules of the plugin, in the order in which they are joined.
MODULES = ("parts", "run", "failing", "unittest_runs", "session_parts", "pytest_failing", "pytest_runs")
_BETWEEN_MODULES = re.compile(r"^from workers\.grading\.witness_plugin\.\w+ import .*\n", re.MULTILINE)
_HEADER = re.compile(r"(---|\+\+\+|Index:|rename from|rename to|copy to|diff --git) (.*)")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_BOTH_SIDES = re.compile(r"(?:[^/\s]*/)?(.+) (?:[^/\s]*/)?\1")
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
_LETTERS = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_SKIPS = re.compile(r"skip|xfail", re.IGNORECASE)
LONGEST_END_BYTES = 256 * 1024 * 1024  # unpacked
BAD = ("FAILED", "ERROR")

# Where Python installations keep packages; `*` as in a shell. Python 3.5 and newer also reads the user's directory.
PACKAGES = (
    "/usr/lib/python3*/dist-packages",
    "/usr/local/lib/python3*/*-packages",
    "/opt/*/lib/python3*/site-packages",
    "/opt/*/envs/*/lib/python3*/site-packages",
    "/*env*/lib/python3*/site-packages",
    "*env*/lib/python3*/site-packages",
    ".*env*/lib/python3*/site-packages",
    ".tox/*/lib/python3*/site-packages",
    ".nox/*/lib/python3*/site-packages",
    '"${VIRTUAL_ENV:-/nowhere}"/lib/python3*/site-packages',
    '"${CONDA_PREFIX:-/nowhere}"/lib/python3*/site-packages',
    "~/*env*/lib/python3*/site-packages",
    "~/.*env*/lib/python3*/site-packages",
    "~/*conda*/lib/python3*/site-packages",
    "~/*conda*/envs/*/lib/python3*/site-packages",
    "~/.pyenv/versions/*/lib/python3*/site-packages",
    "~/.virtualenvs/*/lib/python3*/site-packages",
    "~/.cache/pypoetry/virtualenvs/*/lib/python3*/site-packages",
    "~/.local/share/uv/python/*/lib/python3*/site-packages",
)
USER_PACKAGES = "~/.local/lib/python3.{5..16}/site-packages"

# One line, because only lines with an import run in a .pth file. NAME is the module, INSIDE its variable, which is set where
# a run has started; there may be many of these lines in one Python.
START_LINE = (
    "import os; swerve = os.open('/proc/self/cmdline', 0); argv = os.read(swerve, 65536); os.close(swerve); "
    "(b'-m\\0unittest\\0' in argv or b'runtests.py\\0' in argv or b'manage.py\\0test\\0' in argv) "
    "and 'INSIDE' not in os.environ and __import__('NAME').watch_unittest()\n"
)
# The module. It runs the code that PLACE/NAME has, and compiles it only under another Python than this one.
RUNS = """import binascii, marshal, zlib
from _frozen_importlib_external import MAGIC_NUMBER
def code():
    with open('PLACE/NAME') as file:
        magic, compiled, source = file.read().split()
    is_compiled = magic == binascii.hexlify(MAGIC_NUMBER).decode()
    code = zlib.decompress(binascii.a2b_base64(compiled if is_compiled else source))
    return marshal.loads(code.replace(b'FILE_NAME', b'NAME')) if is_compiled else compile(code, 'NAME', 'exec')
exec(code())
"""
# The name of the file in compiled code. That of the module, which is as long, replaces it.
FILE_NAME = f"swerve_{12 * '0'}"
# The first of these folders that can be written to is PLACE.
PLACES = "/usr/local/lib ~/.local/lib"
METADATA = "Metadata-Version: 2.1\nName: NAME\nVersion: 0\n"
ENTRY_POINTS = "[pytest11]\nNAME = NAME\n"


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, as the witness reports it. `status` None: no test was to be run, as for `--version`."""

    status: int | None
    ways: tuple[str, ...] = ()  # ways of failing that were tried on the runner; none if it did not allow it
    unfailing: tuple[str, ...] = ()  # those in which a test did not fail
    collected: int  # -1: not known
    finished: int
    outcomes: dict[str, str]  # for unittest as far as its result class reports them
    # Parts of the runner that became something else, and the file of what stands in for each, "" if not known.
    replaced: tuple[tuple[str, str], ...]
    rewritten: tuple[str, ...]  # files of tests that were written after the run had started
    # Test, file and text of a line on the way to where the test was skipped; text "": the file may have turned another line
    # into one that skips.
    stopped: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class WitnessedRun:
    """One run of a test runner. `end` None: it was cut short."""

    runner: str  # "pytest", "unittest"
    end: End | None
    # Whether it started while another was under way, as in a script that runs several at a time.
    beside: bool = False


def installer(places: Iterable[str] = ()) -> str:
    """The bash that copies the witness into every Python that it finds; to be run in the workdir. `places` are further
    directories in which a Python may be installed.

    The user's directory is that of each version of Python that is there; each one costs about 2 ms of CPU time.
    """
    name = f"swerve_{secrets.token_hex(6)}"  # so that nothing in the repository can have the same name
    files = {
        f"{name}.py": RUNS.replace("FILE_NAME", FILE_NAME),
        f"{name}.pth": START_LINE.replace("INSIDE", name.upper()),
        f"{name}-0.dist-info/METADATA": METADATA,
        f"{name}-0.dist-info/entry_points.txt": ENTRY_POINTS,
    }
    writes = "\n".join(
        f"text={shlex.quote(text.replace('NAME', name))}\n"
        f'for folder in "${{folders[@]}}"; do printf %s "${{text//PLACE/$place}}" >"$folder"/{path}; done'
        for path, text in files.items()
    )
    further = " ".join(f"{place}/lib/python3*/site-packages" for place in places)
    return f"""
shopt -s nullglob
folders=({" ".join(PACKAGES)} {further})
pythons=("${{folders[@]}}" ~/.local/lib/python3.*)
IFS=: read -r -a entries <<<"${{TASK_PATH-}}:$PATH"
for entry in "${{entries[@]}}"; do pythons+=("${{entry:-.}}"/python3.*); done
declare -A versions
for python in "${{pythons[@]}}"; do
  [[ $python =~ /python(3[.][0-9]+)(/|$) ]] && versions[${{BASH_REMATCH[1]}}]=1
done
[ ${{#versions[@]}} != 0 ] || for version in 3.{{5..16}}; do versions[$version]=1; done
declare -A different
for version in "${{!versions[@]}}"; do folders+=(~/.local/lib/"python$version"/site-packages); done
for folder in "${{folders[@]}}"; do different[$folder]=1; done
folders=("${{!different[@]}}")
mkdir -p "${{folders[@]/%//{name}-0.dist-info}}"
shopt -u nullglob
for place in {PLACES}; do [ -w "$place" ] && break; done
printf %s '{_packed_plugin()}' >"$place"/{name}
{writes}
"""


@functools.cache
def _packed_plugin() -> str:
    """The number of this Python's compiled code, the plugin compiled for it, and the plugin's source. The latter two are
    compressed, because sending files into a container takes time by the byte.
    """
    source = plugin_source()
    compiled = marshal.dumps(compile(source, FILE_NAME, "exec", dont_inherit=True, optimize=2))
    packed = [base64.b64encode(zlib.compress(part, 9)).decode() for part in (compiled, source.encode())]
    return "\n".join([MAGIC_NUMBER.hex(), *packed])


def plugin_source() -> str:
    """The plugin as one file: its modules joined, without the lines that import one from another."""
    return "".join(_BETWEEN_MODULES.sub("", (PLUGIN / f"{name}.py").read_text("utf-8")) for name in MODULES)


def testimony(notes: bytes) -> tuple[WitnessedRun, ...]:
    """The runs that the side channel reports, in the order of their starts, without those that other runs started.

    Lines without a known secret are ignored: anybody may write them.
    """
    starts: dict[bytes, _Start] = {}
    ends: dict[bytes, End] = {}
    for line in notes.splitlines():
        match line.split():
            case [b"start", secret, runner, lineage] if secret not in starts:
                start = _Start(runner.decode("utf-8", "replace"), tuple(lineage.split(b",")))
                counted = {other: starts[other] for other in starts if not starts[other].nested}
                start.nested = any(start.descends_from(counted[other], ends.get(other)) for other in counted)
                start.beside = not counted.keys() <= ends.keys()
                starts[secret] = start
            case [b"end", secret, packed] if secret in starts and secret not in ends:
                end = _unpacked(packed)
                if end is not None:
                    ends[secret] = end
            case _:
                pass
    return tuple(
        WitnessedRun(start.runner, ends.get(secret), start.beside)
        for secret, start in starts.items()
        if not start.nested
    )


@dataclass(slots=True)
class _Start:
    """The start of a run. `lineage` is its process and those that it descends from, down to a child of process 1."""

    runner: str
    lineage: tuple[bytes, ...]
    nested: bool = False
    beside: bool = False

    def descends_from(self, other: "_Start", end: End | None) -> bool:
        """Whether the code that `other` runs may have started this run. `end` is that of `other`, None before it.

        A process that runs unittest may run it again, or give way to pytest. A process whose oldest ancestor is not that of
        the eval script has left the one that started it.
        """
        if self.lineage[-1] != other.lineage[-1]:
            return True
        if end is not None and self.lineage == other.lineage:
            return not (end.status is None or self.runner == other.runner == "unittest")
        return other.lineage[0] in self.lineage


def tampering(
    runs: Iterable[WitnessedRun],
    patch: bytes,
    matters: Callable[[str], bool] = lambda test: True,
    hidden: Iterable[str] = (),
    restored: Iterable[str] = (),
) -> str | None:
    """How code of the patch interfered with the tests; None if nothing is known of it.

    `matters` tells whether it matters that the test, or the file of tests, of a name is skipped. `hidden` are paths of
    files and directories that no code under test has a reason to write to. `restored` are files that are not as the patch has
    them: names with `*` as in a shell, or paths after a slash.
    """
    changes = _changes(patch, tuple(restored))
    for run in runs:
        if run.end is None:
            return f"{run.runner} was cut short"
        if run.end.unfailing:
            return f"{run.runner} let a test pass that must fail, by {run.end.unfailing[0]}"
        for part, path in run.end.replaced:
            if path == "<string>" or changes.touch(path):
                return f"the patch replaced {part} of {run.runner}"
        for path in run.end.rewritten:
            if any(f"/{place.strip('/')}/" in f"{path}/" for place in hidden):
                return f"{path} was written while {run.runner} ran"
        for test, path, text in run.end.stopped:
            if changes.stop(test, path, text) and matters(test):
                return f"the patch skipped {test}"
        if run.end.status == 0 and run.end.finished < run.end.collected:
            return f"{run.runner} ended after {run.end.finished} of {run.end.collected} tests"
    return None


def sessions(runs: Iterable[WitnessedRun], runner: str | None = None) -> list[End]:
    """Ends of the runs, of `runner` or of any, that were to run tests."""
    return [
        run.end
        for run in runs
        if run.end is not None and run.end.status is not None and runner in (run.runner, None)
    ]


def failure(runs: Iterable[WitnessedRun], *, every: bool = False) -> str | None:
    """Why the last run is no success or, with `every`, why any run is not; None if there is nothing to say."""
    ended = [(run.runner, end) for run in runs for end in sessions([run])]
    if not ended:
        return None
    for runner, end in ended if every else ended[-1:]:
        bad = [name for name, outcome in end.outcomes.items() if outcome in BAD]
        if bad:
            return f"{runner} saw {len(bad)} fail, {bad[0]} first"
    runner, end = ended[-1]
    if any(outcome in ("PASSED", "XFAIL", "XPASS") for outcome in end.outcomes.values()):
        return None
    if runner == "unittest" and end.finished > len(end.outcomes):  # its result class reported nothing
        return None
    return f"{runner} passed no test"


def outcomes(runs: Iterable[WitnessedRun]) -> dict[str, str]:
    """Outcome of each test by name, as the last run saw it that had it; of runs at the same time, the worse one."""
    found: dict[str, str] = {}
    for run in runs:
        for name, outcome in run.end.outcomes.items() if run.end else ():
            if not (run.beside and found.get(name) in BAD):
                found[name] = outcome
    return found


def replaced(runs: Iterable[WitnessedRun]) -> frozenset[str]:
    """The parts of the runner that became something else, and the ways of failing in which a test did not fail."""
    ends = [run.end for run in runs if run.end is not None]
    parts = {part for end in ends for part, _ in end.replaced}
    return frozenset(parts.union(*(end.unfailing for end in ends)))


def _unpacked(packed: bytes) -> End | None:
    try:
        text = zlib.decompressobj().decompress(base64.b64decode(packed), LONGEST_END_BYTES)
        return msgspec.json.decode(text, type=End)
    except (binascii.Error, zlib.error, msgspec.DecodeError):
        return None


@dataclass(frozen=True, slots=True)
class _Changes:
    """What a patch changes."""

    paths: tuple[str, ...]  # the ends of the files' absolute paths
    binary: tuple[str, ...]  # of these files only the fact is known that they changed
    added: frozenset[str]  # every line, stripped
    speaks_of_skips: bool

    def touch(self, path: str) -> bool:
        return f"/{path}".endswith(self.paths) or any(f"{archive}/" in path for archive in self.binary)

    def stop(self, test: str, path: str, text: str) -> bool:
        """Whether this line may be the reason that the test is skipped.

        A line of the test's own file is not: tests may skip themselves, and a test that the patch brought is none that
        decides about it.
        """
        if path == "<string>":
            return True
        if not text:
            return self.touch(path) or self.speaks_of_skips
        by_itself = "::" in test or test.endswith(".py")
        if by_itself and f"/{path}".endswith(f"/{test.partition('::')[0]}"):
            return False
        return self.touch(path) and (text in self.added or f"/{path}".endswith(self.binary))


def touched_paths(patch: bytes) -> list[str]:
    """Paths in the repository of the files that `patch` touches."""
    return [path[1:] for path in _changes(patch).paths]


def _changes(patch: bytes, restored: tuple[str, ...] = ()) -> _Changes:
    """Not file by file: a patch may add a line that looks like the next file's header. Lines end with LF alone for git, with
    CR too for Python, and with Unicode's other line ends for neither.
    """
    paths: dict[str, bool] = {}  # whether it is a binary
    added: set[str] = set()
    path = ""
    for line in patch.decode("utf-8", "replace").split("\n"):
        if line.startswith("+"):
            added.update(part.strip() for part in line[1:].split("\r"))
        header = _HEADER.match(line.rstrip("\r"))
        if header:
            path = _path(header[1], header[2])
            paths |= {f"/{path}": False} if path else {}
        elif line.startswith("GIT binary patch"):
            paths[f"/{path}"] = True
    kept = {
        path: is_binary
        for path, is_binary in paths.items()
        if not any(
            fnmatch.fnmatchcase(path if "/" in name else path.rpartition("/")[2], name) for name in restored
        )
    }
    return _Changes(
        paths=tuple(sorted(kept)),
        binary=tuple(path for path, is_binary in kept.items() if is_binary),
        added=frozenset(added),
        speaks_of_skips=any(_SKIPS.search(line) for line in added),
    )


def _path(kind: str, words: str) -> str:
    """The path in the words after the first of a header; the last one if there are two."""
    quoted = _QUOTED.findall(words)
    both = _BOTH_SIDES.fullmatch(words) if kind == "diff --git" else None
    if words.startswith('"'):
        path = _unescaped(quoted[-1]) if quoted else words
    elif both:
        return both[1]
    else:
        path = words.partition("\t")[0]
    return path if kind.startswith(("rename", "copy")) else re.sub(r"^[^/\s]*/", "", path)


def _unescaped(text: str) -> str:
    def byte(escape: re.Match[bytes]) -> bytes:
        code = escape[1]
        return bytes([int(code, 8) & 255]) if len(code) == 3 else _LETTERS.get(code, code)

    return _ESCAPE.sub(byte, text.encode()).decode("utf-8", "replace")
