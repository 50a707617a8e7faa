"""A witness in the process that runs the tests: nothing that code under test prints can contradict what it reports.

witness_plugin/ is copied into every Python installation of the container as a plugin that pytest finds by itself, and into the start-up of
a Python that runs unittest. It needs no environment variable, so no script can disable it by accident. It reports over the sandbox's side
channel. If it never starts (another runner, another user, pytest without automatic plugins), only the log and the exit status decide.

It is not a proof: code under test is in the same process, and code written against this particular witness can manipulate it.
"""

import base64
import binascii
import fnmatch
import functools
import marshal
import re
import secrets
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import msgspec

from pipeline import runners
from pipeline.runners import PYTEST, UNITTEST

PLUGIN = Path(__file__).with_name("witness_plugin")
# The modules of the plugin, in the order in which they are joined.
MODULES = ("parts", "run", "failing", "unittest_runs", "pytest_runs")
_BETWEEN_MODULES = re.compile(
    r"^from workers\.grading\.defence\.witness_plugin\.\w+ import (?:\([^)]*\)|.*)\n", re.MULTILINE
)
_HEADER = re.compile(r"(---|\+\+\+|Index:|rename from|rename to|copy to|diff --git) (.*)")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_BOTH_SIDES = re.compile(r"(?:[^/\s]*/)?(.+) (?:[^/\s]*/)?\1")
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
_LETTERS = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_SKIPS = re.compile(r"skip|xfail", re.IGNORECASE)
LONGEST_END_BYTES = 256 * 1024 * 1024  # limit after decompression
BAD = ("FAILED", "ERROR")

# This is one line, because a .pth file runs only lines that begin with an import. NAME is the module and INSIDE its environment variable,
# which is set once a run has started; one Python may run many of these lines.
START_LINE = (
    "import os; swerve = os.open('/proc/self/cmdline', 0); argv = os.read(swerve, 65536); os.close(swerve); "
    "(STARTS) "
    "and 'INSIDE' not in os.environ and __import__('NAME').watch_unittest()\n"
)
# The source of the module. It runs the compiled code in PLACE/NAME, and compiles the source only under another version of Python.
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
# The file name in compiled code. The module's own name, which has the same length, replaces it.
FILE_NAME = f"swerve_{12 * '0'}"
METADATA = "Metadata-Version: 2.1\nName: NAME\nVersion: 0\n"
ENTRY_POINTS = f"[{PYTEST.entry_points}]\nNAME = NAME\n"


class End(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run, as the witness reports it. `status` None: no test was to be run, as for `--version`."""

    status: int | None
    # Kinds of failure that were tried on the runner; empty if the runner did not allow it.
    ways: tuple[str, ...] = ()
    unfailing: tuple[str, ...] = ()  # kinds of failure that made no test fail
    collected: int  # -1: not known
    finished: int
    outcomes: dict[str, str]  # outcomes of unittest are only those that its result class reports
    # Parts of the runner that were replaced, each with the file of its replacement, "" if that is not known.
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
    # Whether it started while another was running, as in a script that runs several at a time.
    beside: bool = False


def installed() -> dict[str, str | list[str]]:
    """The arguments of `install_files` with which it copies the witness into every Python that it finds."""
    name = f"swerve_{secrets.token_hex(6)}"  # so that nothing in the repository can have the same name
    files = {
        f"{name}.py": RUNS.replace("FILE_NAME", FILE_NAME),
        f"{name}.pth": START_LINE.replace("INSIDE", name.upper()).replace("STARTS", _starts()),
        f"{name}-0.dist-info/METADATA": METADATA,
        f"{name}-0.dist-info/entry_points.txt": ENTRY_POINTS,
    }
    texts = [text.replace("NAME", name) for text in files.values()]
    code = {"CODE_NAME": name, "CODE": _packed_plugin()}
    return {"INSTALLED": [*files], "TEXTS": texts, "FOLDER": f"{name}-0.dist-info", **code}


def started(code: str) -> dict[str, str | list[str]]:
    """The arguments of `install_files` with which every Python that it finds runs `code` whenever it starts."""
    name = f"swerve_{secrets.token_hex(6)}"
    files = {f"{name}.py": code, f"{name}.pth": f"import {name}"}
    return {"INSTALLED": [*files], "TEXTS": [*files.values()], "FOLDER": "", "CODE_NAME": "", "CODE": ""}


def _starts() -> str:
    """The expression that decides from `argv`, the process's command line, whether the process will run unittest."""
    watched = [one for one in runners.RUNNERS if one.witnessed_as == UNITTEST.name]
    words = [("-m", module) for one in watched for module in one.modules]
    words += [tuple(script.split()) for one in watched for script in one.scripts]
    return " or ".join("b'" + "".join(rf"{word}\0" for word in each) + "' in argv" for each in words)


@functools.cache
def _packed_plugin() -> str:
    """The number of this Python's compiled code, the plugin compiled for it, and the plugin's source. The latter two are
    compressed, because sending files into a container takes time for each byte.
    """
    source = plugin_source()
    compiled = marshal.dumps(compile(source, FILE_NAME, "exec", dont_inherit=True, optimize=2))
    packed = [base64.b64encode(zlib.compress(part, 9)).decode() for part in (compiled, source.encode())]
    return "\n".join([MAGIC_NUMBER.hex(), *packed])


def plugin_source() -> str:
    """The plugin as one file: its joined modules, without the lines with which they import each other."""
    return "".join(_BETWEEN_MODULES.sub("", (PLUGIN / f"{name}.py").read_text("utf-8")) for name in MODULES)


def testimony(notes: bytes) -> tuple[WitnessedRun, ...]:
    """The runs that the side channel reports, in the order of their starts, without those that other runs started.

    Lines without a known secret are ignored, because any process may write them.
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
    """The start of a run. `lineage` are its process and the ancestors of that, up to a child of process 1."""

    runner: str
    lineage: tuple[bytes, ...]
    nested: bool = False
    beside: bool = False

    def descends_from(self, other: "_Start", end: End | None) -> bool:
        """Whether the code that `other` runs may have started this run. `end` is the end of `other`, None before it.

        A process that runs unittest may run it again, or be taken over by pytest. A process whose oldest ancestor is not that of
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
    """Returns how code of the patch interfered with the tests; None if no interference is known.

    `matters` decides from the name of a skipped test, or file of tests, whether the skip matters. `hidden` are paths of files and
    directories to which no code under test has a reason to write. `restored` are files that differ from the patch: names with `*` as in a
    shell, or paths after a slash.
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
    """The ends of those runs that were to run tests, for `runner` or for any runner."""
    return [
        run.end
        for run in runs
        if run.end is not None and run.end.status is not None and runner in (run.runner, None)
    ]


def failure(runs: Iterable[WitnessedRun], *, every: bool = False) -> str | None:
    """The reason why the last run, or with `every` any run, did not succeed; None if there is no such reason."""
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
    """The outcome of each test by name, from the last run that has it; of simultaneous runs, the worse outcome."""
    found: dict[str, str] = {}
    for run in runs:
        for name, outcome in run.end.outcomes.items() if run.end else ():
            if not (run.beside and found.get(name) in BAD):
                found[name] = outcome
    return found


def replaced(runs: Iterable[WitnessedRun]) -> frozenset[str]:
    """Returns the parts of the runner that were replaced, and the kinds of failure that made no test fail."""
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
    """The changes of a patch."""

    paths: tuple[str, ...]  # the ends of the files' absolute paths
    binary: tuple[str, ...]  # binary files: only the fact that they changed is known
    added: frozenset[str]  # every added line, stripped
    speaks_of_skips: bool

    def touch(self, path: str) -> bool:
        return f"/{path}".endswith(self.paths) or any(f"{archive}/" in path for archive in self.binary)

    def stop(self, test: str, path: str, text: str) -> bool:
        """Whether this line may be the reason that the test is skipped.

        A line of the test's own file is not, because tests may skip themselves, and no test from the patch decides about the patch.
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
    """Reads the changes of a patch from the whole patch at once.

    It is not split by file, because a patch may add a line that looks like the next file's header. Git ends lines with LF only, Python also
    with CR, and neither uses the other line ends of Unicode.
    """
    paths: dict[str, bool] = {}  # path -> whether the file is binary
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
    """The path in a header, without the first word; the last path if there are two."""
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
