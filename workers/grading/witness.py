"""A witness in the process that runs the tests: what it is told there, nothing printed can gainsay.

witness_plugin.py goes into every Python installation of the container as a plugin that pytest finds by itself,
and into the start of a Python that runs unittest; no variable is set, so that no script can undo or break it
unawares. It reports over the sandbox's side channel. Where it never starts (another runner, another user,
pytest without automatic plugins) there is no testimony, and the log and the exit status stand alone.

It is no proof: code under test is in the same process, and code written against this very witness can take
it over.
"""

import base64
import binascii
import re
import secrets
import shlex
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

PLUGIN = Path(__file__).with_name("witness_plugin.py")
_PATH = re.compile(r"(?:(?:---|\+\+\+|Index:) \"?(?:[^/\s]*/)?|(?:rename|copy) to \"?)([^\t\"]+)")
_SKIPS = re.compile(r"skip|xfail", re.IGNORECASE)
LONGEST_END_BYTES = 256 * 1024 * 1024  # unpacked
BAD = ("FAILED", "ERROR")

# Where Pythons keep their packages; `*` as in a shell. Everything from 3.5 on reads its user's directory too.
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

# One line, for that is all of a .pth file that runs. NAME is the module.
START_LINE = (
    "import os; swerve = os.open('/proc/self/cmdline', 0); argv = os.read(swerve, 65536); os.close(swerve); "
    "(b'-m\\0unittest\\0' in argv or b'runtests.py\\0' in argv or b'manage.py\\0test\\0' in argv) "
    "and __import__('NAME').watch_unittest()\n"
)
# What is sent to a container costs time by the byte.
UNPACKS = (
    "import base64, zlib\nexec(compile(zlib.decompress(base64.b64decode('PACKED')), __file__, 'exec'))\n"
)
METADATA = "Metadata-Version: 2.1\nName: NAME\nVersion: 0\n"
ENTRY_POINTS = "[pytest11]\nNAME = NAME\n"


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, in the witness's words. `status` None: no test was to be run, as for `--version`."""

    status: int | None
    canary: bool | None  # whether a test that must fail passed; None: not known
    collected: int  # -1: not known
    finished: int
    outcomes: dict[str, str]  # of unittest as far as its result class says them
    replaced: tuple[tuple[str, str], ...]  # functions of the runner, and the file of what stands in for each
    stopped: tuple[tuple[str, str, str], ...]  # test, file and text of a line on the way to where it was
    # skipped; text "": the file may have made a line one that skips


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a test runner. `end` None: it was cut short."""

    runner: str  # "pytest", "unittest"
    end: End | None


def installer() -> bytes:
    """The bash that puts a witness into every Python that it finds. To be sourced in the workdir."""
    name = f"swerve_{secrets.token_hex(6)}"  # so that nothing in the repository can have the same
    packed = base64.b64encode(zlib.compress(PLUGIN.read_bytes(), 9)).decode()
    files = {
        f"{name}.py": UNPACKS.replace("PACKED", packed),
        f"{name}.pth": START_LINE,
        f"{name}-0.dist-info/METADATA": METADATA,
        f"{name}-0.dist-info/entry_points.txt": ENTRY_POINTS,
    }
    writes = "\n".join(
        f'printf %s {shlex.quote(text.replace("NAME", name))} >"$folder"/{path}'
        for path, text in files.items()
    )
    return f"""
shopt -s nullglob
folders=({" ".join(PACKAGES)} {USER_PACKAGES})
mkdir -p "${{folders[@]/%//{name}-0.dist-info}}"
for folder in "${{folders[@]}}"; do
{writes}
done
shopt -u nullglob
""".encode()


def testimony(notes: bytes) -> tuple[Run, ...]:
    """What came over the side channel, runs in the order of their starts. Lines that anybody may write
    count for nothing, for no secret is in them.
    """
    runners: dict[bytes, str] = {}
    ends: dict[bytes, End] = {}
    for line in notes.splitlines():
        match line.split():
            case [b"start", secret, runner]:
                runners.setdefault(secret, runner.decode("utf-8", "replace"))
            case [b"end", secret, packed] if secret in runners and secret not in ends:
                end = _unpacked(packed)
                if end is not None:
                    ends[secret] = end
            case _:
                pass
    return tuple(Run(runner, ends.get(secret)) for secret, runner in runners.items())


def tampering(
    runs: Iterable[Run], patch: bytes, matters: Callable[[str], bool] = lambda test: True
) -> str | None:
    """How the patch's code got in the way of the tests; None if nothing is known of it.

    `matters`: whether it does that the test of the given name is skipped.
    """
    touched, added = _touched(patch)
    speaks_of_skips = any(_SKIPS.search(line) for line in added)
    for run in runs:
        if run.end is None:
            return f"{run.runner} was cut short"
        if run.end.canary:
            return f"{run.runner} let a test pass that must fail"
        for function, path in run.end.replaced:
            if path == "<string>" or f"/{path}".endswith(touched):
                return f"the patch replaced {function} of {run.runner}"
        for test, path, text in run.end.stopped:
            in_touched = f"/{path}".endswith(touched)
            by_patch = in_touched and text in added if text else in_touched or speaks_of_skips
            if (by_patch or path == "<string>") and matters(test):
                return f"the patch skipped {test}"
        if run.end.status == 0 and run.end.finished < run.end.collected:
            return f"{run.runner} ended after {run.end.finished} of {run.end.collected} tests"
    return None


def sessions(runs: Iterable[Run], runner: str | None = None) -> list[End]:
    """Ends of those runs, of `runner` or of any, that were to run tests."""
    return [
        run.end
        for run in runs
        if run.end is not None and run.end.status is not None and runner in (run.runner, None)
    ]


def failure(runs: Iterable[Run]) -> str | None:
    """Why the last run is no success; None if it is, or there was none."""
    ended = [run for run in runs if sessions([run])]
    if not ended:
        return None
    runner, end = ended[-1].runner, sessions(ended)[-1]
    bad = [name for name, outcome in end.outcomes.items() if outcome in BAD]
    if bad:
        return f"{runner} saw {len(bad)} fail, {bad[0]} first"
    if runner == "unittest":
        return None if end.finished else "unittest ran no test"
    if not any(outcome in ("PASSED", "XFAIL", "XPASS") for outcome in end.outcomes.values()):
        return f"{runner} passed no test"
    return None


def outcomes(runs: Iterable[Run]) -> dict[str, str]:
    """Of each test by name, as the last run that had it saw it."""
    return {name: outcome for run in runs if run.end for name, outcome in run.end.outcomes.items()}


def _unpacked(packed: bytes) -> End | None:
    try:
        text = zlib.decompressobj().decompress(base64.b64decode(packed), LONGEST_END_BYTES)
        return msgspec.json.decode(text, type=End)
    except (binascii.Error, zlib.error, msgspec.DecodeError):
        return None


def _touched(patch: bytes) -> tuple[tuple[str, ...], frozenset[str]]:
    """What paths of files that `patch` touches end in, and every line that it adds, stripped.

    Not by file: a patch may add a line that looks like the next file's header. To git a line ends with LF alone,
    to Python with CR too, and to neither with what else Unicode calls a line's end.
    """
    paths: set[str] = set()
    added: set[str] = set()
    for line in patch.decode("utf-8", "replace").split("\n"):
        if line.startswith("+"):
            added.update(part.strip() for part in line[1:].split("\r"))
        header = _PATH.match(line.rstrip("\r"))
        if header:
            paths.add(f"/{header[1]}")
    return tuple(sorted(paths)), frozenset(added)
