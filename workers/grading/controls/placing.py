"""Reads the test files that an eval script will run, and puts contradictions into them.

Both are done in a grading container in which no code of the patch has run: the patch is applied, the hidden tests are in place, and the
eval script is about to start. So files that are read there can be trusted. A text reaches the tests in one of the ways in arrivals.py, and
a contradiction is put at the origin of that text.

A control run must look like a real one. So a real run places contradictions as well, which change nothing: it takes the same steps and
writes the same files with unchanged text (`alike`).
"""

import asyncio
import base64
import binascii
import itertools
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pipeline import diff
from pipeline.errors import TaskBroken
from pipeline.task import Contradiction, File
from workers.grading.controls import patches
from workers.grading.controls.arrivals import (
    Arrivals,
    Body,
    Heredoc,
    InCommit,
    InContainer,
    Patched,
    Source,
)
from workers.grading.steps import GRADE_DIR, StepFailed, failed_step
from workers.sandbox.git import GIT
from workers.sandbox.protocol import CommandResult, Sandbox
from workers.sandbox.shell import fits, printing

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
