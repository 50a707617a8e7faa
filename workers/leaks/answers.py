"""Searches for the text of the answer where an agent could read it: in files of its sandbox and in the problem statement.

find.py looks for places where an answer may be; this module looks for lines of the known solution and the hidden tests themselves.
It is too slow for every episode and serves reports: `python -m workers.leaks`.
"""

import hashlib
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator

from pipeline.errors import SandboxError
from pipeline.task import ExitCode, File, R2eExpected, Task, TestsJson
from pipeline.taskfile import Gold
from workers.leaks.find import Leak
from workers.sandbox.git import GIT
from workers.sandbox.protocol import Sandbox

SEARCH_S = 1800.0
KEEP_BYTES = 4 * 1024 * 1024  # of each end of the findings
MIN_LINE_CHARS = 16  # shorter lines occur everywhere
ENOUGH_LINES = 3  # in one file to report it, or half of the lines searched for if that is less
NAMED_AT_MOST = 3  # paths in one finding

_IMPORT_OR_COMMENT = re.compile(r"(?:import |from |#|//|/?\*|<!--|@pytest|return (?:True|False|None)\b)")
_WORD = re.compile(r"\w{2,}")
_FILES_CHANGED = re.compile(r"^\W*files changed\b", re.MULTILINE | re.IGNORECASE)
_DIFF = re.compile(r"^(?:diff --git |@@ -\d+,?\d* \+\d+)", re.MULTILINE)

DIR = "/swerve-answers"
# Searches files that differ from the base commit, and files outside the repository where authors of images leave things. For each it prints
# which of our lines it has, whether its content is one of ours, and whether its name is that of an eval script.
_SEARCH = f"""{GIT}
export LC_ALL=C
base=$1 start=$PWD
git cat-file -e "$base^{{commit}}" 2>/dev/null || base=HEAD
outside() {{
  local path prune=()
  for path in /proc /sys /dev /usr /opt /var /lib /lib64 /bin /sbin /etc /boot {DIR} "$start"; do
    prune+=(-path "$path" -o)
  done
  find / -xdev \\( "${{prune[@]}}" -name site-packages -o -name node_modules -o -name .git \\) -prune \\
    -o -type f -size -2048k -print0
}}
inside() {{
  if git rev-parse -q --verify HEAD >/dev/null 2>&1; then
    {{ git ls-files --others -z; git diff --name-only -z --diff-filter=d "$base" HEAD; }} |
      while IFS= read -r -d '' path; do printf '%s/%s\\0' "$start" "$path"; done
  else
    find "$start" -xdev -type f -size -2048k -print0
  fi
}}
others() {{
  find / -xdev -path /proc -prune -o -type d -name objects -print0 | while IFS= read -r -d '' path; do
    path=${{path%/objects}}
    [ -e "$path/HEAD" ] && [ "$path" -ef "$(git rev-parse --git-common-dir)" ] && continue
    git --git-dir="$path" cat-file -e "$1^{{commit}}" 2>/dev/null || continue
    number=$(git --git-dir="$path" rev-list --all --count "^$1")
    [ "$number" = 0 ] || printf 'repository\\t%s\\t%s\\n' "$path" "$number"
  done
}}
{{ outside; inside; }} >{DIR}/files
xargs -0 -r grep -aFHo -f {DIR}/lines -- <{DIR}/files 2>/dev/null | sort -u | sed 's/:/\\t/; s/^/line\\t/'
[ ! -s {DIR}/hashes ] ||
  xargs -0 -r sha256sum <{DIR}/files 2>/dev/null | grep -F -f {DIR}/hashes | sed 's/^/hash\\t/; s/  /\\t/'
tr '\\0' '\\n' <{DIR}/files | grep -E '/(eval|eval_script|run_tests|run_script)\\.sh$|/r2e_tests/' | sed 's/^/name\\t/'
others "$(git rev-parse "$base" 2>/dev/null)"
true
"""


async def answers_in_files(sandbox: Sandbox, task: Task, gold: Gold | None) -> list[Leak]:
    """The answer's text in the sandbox's files. Raises SandboxError if the search fails."""
    parts = _distinctive(gold)
    hashes = _hashes(task)
    await sandbox.put(
        [
            File(path=f"{DIR}/lines", content=_joined({line for lines in parts.values() for line in lines})),
            File(path=f"{DIR}/hashes", content=_joined(set(hashes))),
        ]
    )
    script = f"set -- {shlex.quote(task.base_commit)}\n{_SEARCH}"
    result = await sandbox.run(script, timeout_s=SEARCH_S, keep_bytes=KEEP_BYTES)
    if result.exit_code != 0:
        raise SandboxError(f"looking for the answer in {task.image} ended with status {result.exit_code}")
    rows = [line.split("\t") for line in result.output.decode("utf-8", "replace").splitlines()]
    lines_by_path = await _own_lines(
        sandbox, task, [row for row in rows if row[0] == "line" and len(row) > 2]
    )
    leaks = [_in_files(kind, lines_by_path, lines) for kind, lines in parts.items()]
    leaks.append(_named("hidden file", [row[2] for row in rows if row[0] == "hash"]))
    leaks.append(_named("eval script", [row[1] for row in rows if row[0] == "name"]))
    others = [f"{row[1]}, {row[2]} commits after the base" for row in rows if row[0] == "repository"]
    leaks.append(_named("other repository", others))
    return [leak for leak in leaks if leak is not None]


def answers_in_problem(task: Task, gold: Gold | None) -> list[Leak]:
    """The answer's text in the problem statement."""
    leaks: list[Leak] = []
    if _FILES_CHANGED.search(task.problem):
        leaks.append(Leak("problem", "lists the files changed"))
    if _DIFF.search(task.problem):
        leaks.append(Leak("problem", "holds a diff"))
    for kind, lines in _distinctive(gold).items():
        told = [line for line in lines if line in task.problem]
        # tests often repeat an example from the problem statement
        if told and (kind == "solution" or 2 * len(told) >= len(lines)):
            leaks.append(Leak("problem", f"has {len(told)} of {len(lines)} lines of the {kind}"))
    return leaks


def _distinctive(gold: Gold | None) -> dict[str, list[str]]:
    """Lines of the patches that hardly occur anywhere by chance, by the patch's name."""
    if gold is None:
        return {}
    patches = {"solution": gold.patch, "hidden tests": gold.test_patch}
    return {kind: list(dict.fromkeys(_added(patch))) for kind, patch in patches.items()}


def _added(patch: str) -> Iterator[str]:
    for line in patch.splitlines():
        text = line[1:].strip()
        if not line.startswith("+") or line.startswith("+++ ") or len(text) < MIN_LINE_CHARS:
            continue
        if not _IMPORT_OR_COMMENT.match(text) and len(_WORD.findall(text)) > 1:
            yield text


def _hashes(task: Task) -> list[str]:
    """SHA-256 of the files that only the grader may have."""
    verdict = task.verdict
    contents = [verdict.eval_script.encode("utf-8", "surrogateescape")]
    if isinstance(verdict, ExitCode | R2eExpected | TestsJson):
        contents += [file.content for file in verdict.files]
    if isinstance(verdict, TestsJson):
        contents.append(verdict.parser.encode("utf-8", "surrogateescape"))
    return [hashlib.sha256(content).hexdigest() for content in contents if content.strip()]


async def _own_lines(sandbox: Sandbox, task: Task, rows: list[list[str]]) -> dict[str, set[str]]:
    """The lines found, by path, without those that also occur in the base commit."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for _, path, *line in rows:
        found[path].add("\t".join(line))
    distinct = sorted(set[str]().union(*found.values()))
    if not distinct:
        return {}
    asks = "\n".join(
        f'git grep -qFe {shlex.quote(line)} "$base" 2>/dev/null && echo {number}'
        for number, line in enumerate(distinct)
    )
    base = shlex.quote(task.base_commit)
    script = f'{GIT}base={base}\ngit cat-file -e "$base^{{commit}}" 2>/dev/null || base=HEAD\n{asks}\ntrue'
    result = await sandbox.run(script, timeout_s=SEARCH_S)
    known = {distinct[int(number)] for number in result.output.split()}
    return {path: lines - known for path, lines in found.items()}


def _in_files(kind: str, found: dict[str, set[str]], lines: list[str]) -> Leak | None:
    enough = min(ENOUGH_LINES, (len(lines) + 1) // 2)
    paths = [path for path, has in found.items() if len(has & set(lines)) >= enough > 0]
    return _named(f"{kind} in a file", paths)


def _named(kind: str, names: list[str]) -> Leak | None:
    if not names:
        return None
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return Leak(kind, ", ".join(sorted(names)[:NAMED_AT_MOST]) + more)


def _joined(lines: set[str]) -> bytes:
    return "".join(f"{line}\n" for line in sorted(lines)).encode("utf-8", "surrogateescape")
