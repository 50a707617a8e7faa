"""Reads the test files that an eval script will run, and puts contradictions into them.

Both are done in a grading container in which no code of the patch has run: the patch is applied, the hidden tests are in place, and the
eval script is about to start. So files that are read there can be trusted. A text reaches the tests in one of the ways in arrivals.py, and
a contradiction is put at the origin of that text.

A control run must look like a real one. So a real run places contradictions as well, which change nothing: it takes the same steps and
writes the same files with unchanged text (`alike`).

The function of each test is found by the name that its runner gives it. pytest writes `tests/test_x.py::T::test_a[1]`, relative to a
directory that may be above or below the workdir, and `docs/x.rst::x.rst` for the examples of a text file; unittest writes `test_a
(pkg.test_x.T)` or `test_a (pkg.test_x.T.test_a)`; some verdicts contain only `T.test_a` or `test_a`, which is then looked for in the files
of the hidden tests.
"""

import asyncio
import base64
import binascii
import itertools
import re
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pipeline import diff
from pipeline.errors import GraderError, TaskBroken
from pipeline.runners import PYTEST
from pipeline.task import Contradiction, ExitCode, File, SwebenchLog, Task
from workers.grading.controls import patches
from workers.grading.controls.arrivals import (
    Arrivals,
    Body,
    Heredoc,
    InCommit,
    InContainer,
    Patched,
    Source,
    inside,
)
from workers.grading.steps import GRADE_DIR, StepFailed, failed_step
from workers.sandbox.git import GIT
from workers.sandbox.protocol import CommandResult, Sandbox
from workers.sandbox.writing import fits, printing

MAX_FILE_BYTES = 1024 * 1024  # a larger test file gets no contradiction
MAX_READ_BYTES = 64 * 1024 * 1024  # size of all test files together; files beyond it get none either
STEP_S = 300.0
FILES_PER_STEP = 24
_STEP_KEEP_BYTES = FILES_PER_STEP * MAX_FILE_BYTES * 3 // 2  # size in base64
_TEXT = f"{GRADE_DIR}/text"
_INDEX = f"{GRADE_DIR}/index"

_Edits = list[patches.Edit]
_Leaf = InContainer | InCommit


class NotAsCalibrated(TaskBroken):
    """A contradiction cannot be placed: the test file at `path` has changed since calibration, or the way in which it arrives, such as a
    patch or a here-document of the eval script, cannot hold one.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} {why}: run workers.verify on the task again")
        self.path = path


def alike(drawn: Sequence[Contradiction], calibrated: Sequence[Contradiction]) -> list[Contradiction]:
    """`drawn`, and for each file of `calibrated` that they leave out a contradiction that changes nothing in it.

    So every run of the tests takes the same steps, whichever contradiction is drawn.
    """
    paths = {one.path for one in drawn}
    others = {one.path: one for one in calibrated if one.path not in paths}
    return [*drawn, *(_unchanged(one) for one in others.values())]


def _unchanged(contradiction: Contradiction) -> Contradiction:
    changes = tuple(replace(one, becomes=one.was) for one in contradiction.changes)
    return replace(contradiction, changes=changes)


async def read_tests(sandbox: Sandbox, script: str, paths: Iterable[str]) -> dict[str, bytes]:
    """The text of each test file as the eval script `script` will run it, by its path in the workdir, or absolute.

    A file is left out if it is absent, too large or of unknown origin.
    """
    text = _bytes(script)
    arrivals = await asyncio.to_thread(Arrivals, text, sandbox.workdir)
    sources = {path: source for path in paths if (source := arrivals.source(path)) is not None}
    found = await _texts(sandbox, text, sources.values())
    return {path: found[source] for path, source in sources.items() if source in found}


def written_by(script: str, workdir: str) -> tuple[str, ...]:
    """Paths of the files that `script`, started in `workdir`, writes or patches from here-documents."""
    return Arrivals(_bytes(script), workdir).written()


@dataclass(frozen=True, slots=True)
class Placement:
    """The texts that have to be written to place contradictions."""

    script: str  # the eval script, with contradictions in the files that it writes itself
    texts: Mapping[str, bytes] = field(default_factory=dict[str, bytes])  # texts of test files by path


async def placed(sandbox: Sandbox, script: str, contradictions: Sequence[Contradiction]) -> Placement:
    """The placement of `contradictions`; `write` writes its texts.

    Raises NotAsCalibrated, having changed nothing, if one of them does not fit.
    """
    text = _bytes(script)
    arrivals = await asyncio.to_thread(Arrivals, text, sandbox.workdir)
    sources: dict[Source, list[Contradiction]] = {}
    ordered = sorted(contradictions, key=lambda one: one.path)
    for path, ones in itertools.groupby(ordered, key=lambda one: one.path):
        source = arrivals.source(path)
        if source is None:
            raise NotAsCalibrated(path, "comes in a way that is not understood")
        sources.setdefault(source, []).extend(ones)
    found = await _texts(sandbox, text, sources)
    edits = {source: _edits(ones, found.get(source)) for source, ones in sources.items()}
    spans = await asyncio.to_thread(_heredocs, text, edits, found)
    texts = {one: patches.edited(found[one], at) for one, at in edits.items() if isinstance(one, _Leaf)}
    spans += await _commit(
        sandbox, {one: becomes for one, becomes in texts.items() if isinstance(one, InCommit)}
    )
    for start, end, becomes in sorted(spans, reverse=True):
        text = text[:start] + becomes + text[end:]
    in_container = {one.path: becomes for one, becomes in texts.items() if isinstance(one, InContainer)}
    return Placement(text.decode("utf-8", "surrogateescape"), in_container)


def _edits(contradictions: Sequence[Contradiction], text: bytes | None) -> _Edits:
    """The edits of one text, in order."""
    if text is None:
        raise NotAsCalibrated(contradictions[0].path, "cannot be read")
    edits: set[patches.Edit] = set()
    for one in (change for contradiction in contradictions for change in contradiction.changes):
        was, start = _bytes(one.was), one.offset_bytes
        if text[start : start + len(was)] != was:
            path = contradictions[0].path
            raise NotAsCalibrated(path, f"does not have {one.was[:80]!r} at byte {start}")
        edits.add((start, start + len(was), _bytes(one.becomes)))
    ordered = sorted(edits)
    for (_, end, _), (start, _, _) in itertools.pairwise(ordered):
        if start < end:
            raise NotAsCalibrated(contradictions[0].path, f"has two contradictions at byte {start}")
    return ordered


def _heredocs(
    script: bytes, edits: Mapping[Source, _Edits], texts: Mapping[Source, bytes]
) -> list[tuple[int, int, bytes]]:
    """The new bodies of here-documents in `script`."""
    bodies = {
        one.heredoc: patches.edited(texts[one], at) for one, at in edits.items() if isinstance(one, Body)
    }
    diffs: dict[Heredoc, list[bytes]] = {}
    for one, at in edits.items():
        if isinstance(one, Patched):
            section = one.sections[one.number]
            rewritten = patches.rewritten(section, b"" if one.old is None else texts[one.old], at)
            if rewritten is None:
                raise NotAsCalibrated("a patch in the eval script", "cannot hold a contradiction")
            pieces = diffs.setdefault(one.heredoc, [each.raw for each in one.sections])
            pieces[one.number] = rewritten
    spans: list[tuple[int, int, bytes]] = []
    for heredoc, becomes in (bodies | {one: b"".join(pieces) for one, pieces in diffs.items()}).items():
        body = heredoc.body(script, becomes)
        if body is None:
            raise NotAsCalibrated("a here-document of the eval script", "cannot hold a contradiction")
        spans.append((heredoc.start, heredoc.end, body))
    return spans


async def _texts(sandbox: Sandbox, script: bytes, sources: Iterable[Source]) -> dict[Source, bytes]:
    """The text of each source that has one, and of the sources from which it is made."""
    chains = [_chain(source) for source in sources]
    leaves = dict.fromkeys(one for chain in chains for one in chain if isinstance(one, _Leaf))
    return await asyncio.to_thread(_followed, script, chains, await _read(sandbox, list(leaves)))


def _followed(
    script: bytes, chains: Iterable[list[Source]], texts: dict[Source, bytes]
) -> dict[Source, bytes]:
    """`texts`, and the texts that the script makes from them."""
    for chain in chains:
        for source in reversed(chain):
            match source:
                case Body(heredoc=heredoc):
                    text = heredoc.text(script)
                case Patched(old=old, sections=sections, number=number):
                    known = old is None or old in texts
                    text = diff.applied(sections[number], texts[old] if old else b"") if known else None
                case _:
                    continue
            if text is not None and len(text) <= MAX_FILE_BYTES:
                texts[source] = text
    return texts


def _chain(source: Source) -> list[Source]:
    """`source`, and all sources from which it is made."""
    chain = [source]
    while isinstance(last := chain[-1], Patched) and last.old is not None:
        chain.append(last.old)
    return chain


async def _read(sandbox: Sandbox, leaves: Sequence[_Leaf]) -> dict[Source, bytes]:
    texts: dict[Source, bytes] = {}
    left = MAX_READ_BYTES
    for start in range(0, len(leaves), FILES_PER_STEP):
        some = leaves[start : start + FILES_PER_STEP]
        result = await _succeed(sandbox, "reading test files", GIT + "\n".join(_shows(one) for one in some))
        for leaf, line in zip(some, result.output.split(b"\n"), strict=False):
            try:
                text = None if line == b"-" else base64.b64decode(line, validate=True)
            except binascii.Error as error:
                raise StepFailed(
                    "reading the test files printed what it should not", repr(line[:200])
                ) from error
            if text is not None and len(text) <= min(left, MAX_FILE_BYTES):
                texts[leaf] = text
                left -= len(text)
    return texts


def _shows(leaf: _Leaf) -> str:
    """The command that prints a line with the file in base64, its first bytes if it is too large, "-" if there is none."""
    path = shlex.quote(leaf.path)
    first = f"head -c {MAX_FILE_BYTES + 1}"
    match leaf:
        case InContainer():
            there, read = f"[ -f {path} ]", f"{first} -- {path}"
        case InCommit(commit=commit):
            name = shlex.quote(f"{commit}:./{leaf.path}")
            there, read = f"git cat-file -e {name} 2>/dev/null", f"git cat-file blob {name} | {first}"
    return f"if {there}; then {read} | base64 -w 0; echo; else echo -; fi"


async def write(sandbox: Sandbox, texts: Mapping[str, bytes]) -> None:
    """Writes files, by path in the workdir, or absolute. Existing files keep their mode and owner, and symbolic links are followed.

    Files that match git's index continue to match it for `git status` and `git diff`, which do not look at them any more, in a real run and
    in a control run alike.
    """
    inside = [path for path in texts if not path.startswith("/")]
    command = _writes(inside, {path: printing(text) for path, text in texts.items()})
    if not fits(command):
        contents = [File(path=f"{_TEXT}{number}", content=text) for number, text in enumerate(texts.values())]
        await sandbox.put(contents)
        shows = dict(zip(texts, (f"cat {content.path}" for content in contents), strict=True))
        command = f"{_writes(inside, shows)}\nrm {_TEXT}*"
    await _succeed(sandbox, "writing test files", command)


def _writes(inside: Sequence[str], shows: Mapping[str, str]) -> str:
    """The script that writes the output of `shows` to their paths. `inside` are the paths in the workdir."""
    writes = "\n".join(f"{show} >{shlex.quote(path)} || exit 1" for path, show in shows.items())
    if not inside:
        return writes
    paths = shlex.join(inside)
    return f"""{GIT}
unchanged=()
declare -A known changed
while IFS= read -r -d '' entry; do
  case $entry in 'H '*) known[${{entry#H }}]=1 ;; *) changed[${{entry#* }}]=1 ;; esac
done < <(git --literal-pathspecs ls-files -z -t --cached --modified -- {paths})
for path in {paths}; do
  [ -n "${{known[$path]-}}" ] && [ -z "${{changed[$path]-}}" ] && unchanged+=("$path")
done
{writes}
[ ${{#unchanged[@]}} = 0 ] || git update-index --assume-unchanged -- "${{unchanged[@]}}" || exit 1"""


async def _commit(sandbox: Sandbox, texts: Mapping[InCommit, bytes]) -> list[tuple[int, int, bytes]]:
    """Makes copies of the commits from which the script checks out files, with other text in those files.

    Returns the replacement for each commit's name in the script.
    """
    spans: list[tuple[int, int, bytes]] = []
    for start, end, commit in {(one.start, one.end, one.commit) for one in texts}:
        files = {one.path: text for one, text in texts.items() if one.start == start}
        contents = [File(path=f"{_TEXT}{number}", content=text) for number, text in enumerate(files.values())]
        await sandbox.put(contents)
        adds = "\n".join(
            f"add {content.path} {shlex.quote(path)} || exit 1"
            for content, path in zip(contents, files, strict=True)
        )
        result = await _succeed(
            sandbox,
            "committing test files",
            f"""{GIT}
commit=$(git rev-parse --verify {shlex.quote(commit)}'^{{commit}}') || exit 1
export GIT_INDEX_FILE={_INDEX}
git read-tree "$commit" || exit 1
add() {{
  local mode blob
  mode=$(git ls-files -s -- "$2") && blob=$(git hash-object -w -- "$1") && rm "$1" &&
    git update-index --cacheinfo "${{mode%% *}}" "$blob" "$(git rev-parse --show-prefix)$2"
}}
{adds}
tree=$(git write-tree) && rm {_INDEX} &&
git cat-file commit "$commit" | sed "1s/.*/tree $tree/" | git hash-object -t commit -w --stdin
""",
        )
        spans.append((start, end, result.output.strip()))
    return spans


async def _succeed(sandbox: Sandbox, doing: str, command: str) -> CommandResult:
    result = await sandbox.run(command, timeout_s=STEP_S, keep_bytes=_STEP_KEEP_BYTES, plain=True)
    if result.exit_code != 0 or result.dropped_bytes:
        raise failed_step(doing, result)
    return result


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


LIST_S = 300.0
LIST_KEEP_BYTES = 16 * 1024 * 1024

# Git may ignore files with tests, as in an image that was built around a repository.
_NO_TESTS = (":(exclude,glob)**/site-packages/**", ":(exclude,glob)**/node_modules/**")
_TEXT_NAME = re.compile(r"(?:\.{1,2}/)*((?:.+/)?([\w-][\w.-]*\.\w+))::\2")
_UNITTEST = re.compile(r"(\w+) \(([\w.]+)\)")
_BARE = re.compile(r"(?:\w+(?:\.|::))*\w+")
_FUNCTION = r"^[ \t]*(?:async[ \t]+)?def[ \t]+{}\b"
_CLASS = r"^[ \t]*class[ \t]+{}\b"


@dataclass(frozen=True, slots=True)
class FoundFunction:
    """The function `function` of the file at `path`, as pytest writes it: `T::test_a`. Its class may inherit it.

    The examples of a text file are one test, which has the file's name instead of a function's.
    """

    path: str  # relative to the workdir, or absolute
    function: str

    @property
    def is_doctest(self) -> bool:
        """Whether it is an object whose docstring is the test, as pytest names it: `pkg.module.function`."""
        return "." in self.function and self.path.endswith(".py")


@dataclass(slots=True)
class _Files:
    """The Python files that may contain tests."""

    by_basename: dict[str, list[str]] = field(default_factory=lambda: defaultdict[str, list[str]](list))
    hidden: set[str] = field(default_factory=set[str])

    def add(self, path: str, *, hidden: bool) -> None:
        paths = self.by_basename[path.rpartition("/")[2]]
        if path not in paths:
            paths.append(path)
        if hidden:
            self.hidden.add(path)

    def find(self, path: str) -> str | None:
        """The only file that `path` may mean. Hidden tests come first, because they are run."""
        near = [
            other
            for other in self.by_basename.get(path.rpartition("/")[2], ())
            if f"/{other}".endswith(f"/{path}") or f"/{path}".endswith(f"/{other}")
        ]
        for some in ([one for one in near if one == path], [one for one in near if one in self.hidden], near):
            if len(some) == 1:
                return some[0]
        return None

    def find_module(self, parts: Sequence[str]) -> str | None:
        """The file of the module of this dotted name."""
        path = "/".join(parts)
        return self.find(f"{path}.py") or self.find(f"{path}/__init__.py")


async def locate(sandbox: Sandbox, task: Task, names: Iterable[str]) -> dict[str, FoundFunction]:
    """The function of each test, by the test's name. A test is left out if its function is uncertain.

    Call it when the hidden tests are in place, and before the eval script runs.
    """
    names = tuple(names)
    files = await _files(sandbox, task, {text[2] for name in names if (text := _TEXT_NAME.fullmatch(name))})
    located: dict[str, FoundFunction] = {}
    bare: dict[str, str] = {}
    for name in names:
        if pytest := PYTEST.test_name.match(name):
            path = files.find(pytest[1])
            if path is not None:
                located[name] = FoundFunction(path, pytest[2].partition("[")[0])
        elif text := _TEXT_NAME.fullmatch(name):
            path = files.find(text[1])
            if path is not None:
                located[name] = FoundFunction(path, text[2])
        elif (unittest := _UNITTEST.match(name)) and (found := _of_unittest(files, unittest[1], unittest[2])):
            located[name] = found
        elif unittest:
            bare[name] = f"{unittest[2].removesuffix(f'.{unittest[1]}').rpartition('.')[2]}::{unittest[1]}"
        elif plain := _BARE.match(name):
            bare[name] = plain[0].replace(".", "::")
    if bare:
        texts = await read_tests(sandbox, task.verdict.eval_script, sorted(files.hidden))
        for name, function in bare.items():
            paths = [path for path, text in texts.items() if _defines(text, function)]
            if len(paths) == 1:
                located[name] = FoundFunction(paths[0], function)
    return located


def _of_unittest(files: _Files, function: str, dotted: str) -> FoundFunction | None:
    """The function in `test_a (pkg.test_x.T)`."""
    parts = dotted.removesuffix(f".{function}").split(".")
    for number in range(len(parts) - 1, 0, -1):
        path = files.find_module(parts[:number])
        if path is not None:
            return FoundFunction(path, "::".join((*parts[number:], function)))
    return None


def _defines(text: bytes, function: str) -> bool:
    *classes, name = (re.escape(part) for part in function.split("::"))
    patterns = [_FUNCTION.format(name), *(_CLASS.format(one) for one in classes)]
    return all(re.search(pattern.encode(), text, re.MULTILINE) for pattern in patterns)


async def _files(sandbox: Sandbox, task: Task, texts: Collection[str]) -> _Files:
    """The Python files, and the files whose names without directories are in `texts`."""
    verdict = task.verdict
    arrivals = Arrivals(verdict.eval_script.encode("utf-8", "surrogateescape"), sandbox.workdir)
    put = () if isinstance(verdict, SwebenchLog) else tuple(file.path for file in verdict.files)
    applied = diff.sections(verdict.test_patch) if isinstance(verdict, ExitCode) else []
    patched = [section.new.decode("utf-8", "surrogateescape") for section in applied if section.new]
    written = {inside(path, sandbox.workdir) for path in (*put, *patched, *arrivals.written())}
    hidden = {inside(path, sandbox.workdir) for path in (*verdict.protected_paths, *arrivals.checked_out())}
    files = _Files()
    wanted = ("*.py", *(f":(glob)**/{name}" for name in sorted(texts)), *_NO_TESTS)
    for path in await _list(sandbox, f"{GIT}\ngit ls-files -z --cached --others -- {shlex.join(wanted)}"):
        files.add(path, hidden=path in written or _lies_in(path, hidden))
    for path in (*written, *hidden):
        if path.endswith(".py") or path.rpartition("/")[2] in texts:
            files.add(path, hidden=True)
    for origin, target in arrivals.copied():
        for path in await _list(
            sandbox, f"find {shlex.quote(origin)} -name '*.py' -type f -print0 2>/dev/null; true"
        ):
            files.add(target + path.removeprefix(origin), hidden=True)
    return files


def _lies_in(path: str, places: set[str]) -> bool:
    parts = path.split("/")
    return any("/".join(parts[:number]) in places for number in range(1, len(parts) + 1))


async def _list(sandbox: Sandbox, command: str) -> list[str]:
    result = await sandbox.run(command, timeout_s=LIST_S, keep_bytes=LIST_KEEP_BYTES, plain=True)
    if result.exit_code != 0 or result.dropped_bytes:
        raise GraderError(
            f"listing test files ended with status {result.exit_code}: {result.output[-500:]!r}"
        )
    return [path.decode("utf-8", "surrogateescape") for path in result.output.split(b"\0") if path]
