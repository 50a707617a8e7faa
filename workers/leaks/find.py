"""Finds what a container gives away of its task's answer. This is the one definition, for opening sandboxes and for reports on images.

The agent may see the base commit and its history. Anything else that git holds may come from somebody who knew the answer: later commits,
other branches, remotes, reflogs, stashes, notes, other worktrees, unreachable objects. History may also contain hidden paths; and with a
setup patch, all history contains what the patch undoes.
"""

import posixpath
import re
import shlex
from dataclasses import dataclass

from pipeline.errors import SandboxError, TaskBroken
from pipeline.task import Task
from workers.sandbox.git import GIT
from workers.sandbox.protocol import Sandbox

CHECK_S = 900.0  # the search walks every object of the repository
UNCOMMITTED = "uncommitted"  # not a leak, but it would look like the agent's work

_MARK = b"swerve-leak"
_PATCHED_SOURCE = re.compile(rb"^\+\+\+ b/(.+\.py)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Leak:
    """`kind` names the kind of leak in a few words, `detail` the single one."""

    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.detail})"


# Goes before every script that is given the arguments of `words_of`. `bytecode` prints what Python compiled of the sources.
WORDS = """
base=$1 cut=$2 num_hidden=$3
shift 3
hidden=("${@:1:num_hidden}") sources=("${@:num_hidden + 1}") inside=()
for path in "${hidden[@]}"; do
  case $path in /*) ;; *) inside+=("$path") ;; esac
done
bytecode() {
  local source folder name path
  for source in "${sources[@]}"; do
    case $source in */*) folder=${source%/*} ;; *) folder=. ;; esac
    name=${source##*/} name=${name%.py}
    for path in "$folder/__pycache__/$name".*.pyc "$folder/$name".py[co]; do
      [ ! -e "$path" ] || printf '%s\\n' "$path"
    done
  done
}
is_ancestor() { [ "$1" ] && git merge-base --is-ancestor "$1" "$2" 2>/dev/null; }
in_history() {  # whether a hidden path ever was in the history of commit $1
  [ ${#inside[@]} -gt 0 ] &&
    [ "$(git --literal-pathspecs rev-list -1 --full-history "$1" -- "${inside[@]}")" ]
}
absences() {  # the option for a walk through a partial clone, whose other objects no network reaches
  [ ! "$(git config --get-regexp '^(extensions\\.partialclone|remote\\..*\\.promisor)$')" ] ||
    echo --missing=allow-any
}
folder_of() { (cd -- "$(git rev-parse "$1")" && pwd -P); }
in_repository() {  # with a commit; ends the script if there is one that git cannot read
  git rev-parse -q --verify HEAD >/dev/null 2>&1 && return
  [ ! -e .git ] && return 1
  echo "git finds no commit in $PWD"
  exit 1
}
to_root() { local root && root=$(git rev-parse --show-toplevel) && cd -- "$root"; }
is_repository() {  # whether this directory is the root of a work tree with a commit
  git rev-parse -q --verify HEAD >/dev/null 2>&1 &&
    [ "$(git rev-parse --show-toplevel)" = "$(pwd -P)" ]
}
nested() {  # directories below this one that may be repositories, with a NUL after each
  local path
  find . -name .git -prune -print0 | while IFS= read -r -d '' path; do
    [ "$path" = ./.git ] || printf '%s\\0' "${path%/.git}"
  done
}
modules() {  # git directories of submodules, whether checked out or not, under $1
  [ -d "$1/modules" ] && find "$1/modules" -type f -name HEAD | while IFS= read -r path; do
    [ ! -d "${path%/HEAD}/objects" ] || printf '%s\\n' "${path%/HEAD}"
  done
}
worktrees() {  # all others of this repository; git calls a separate git directory one as well
  local common
  common=$(folder_of --git-common-dir)
  [ ! -d "$common/worktrees" ] || git worktree list --porcelain | sed -n 's/^worktree //p' |
    grep -Fxv -e "$(pwd -P)" -e "$common"
}
"""

# `say KIND DETAIL` reports one leak, `list KIND` the lines of stdin. Most images are small and clean, which `plainly_clean` finds
# out with four processes: the objects that HEAD and the index need are among those that exist, so if their numbers are equal, no
# other object exists. It may answer no for a clean repository.
_CHECK = f"""{GIT}{WORDS}
export GIT_NO_REPLACE_OBJECTS=1 GIT_OPTIONAL_LOCKS=0 LC_ALL=C
where=
say() {{ printf '{_MARK.decode()}\\t%s\\t%s\\n' "$1" "$2${{where:+ in $where}}"; found=1; }}
list() {{
  local lines
  mapfile -t lines
  [ ${{#lines[@]}} -eq 0 ] || say "$1" "${{#lines[@]}}: ${{lines[*]:0:4}}"
}}
settle() {{ [ "$first_only" ] && [ "$found" ] && exit 0; }}

names() {{  # what git has names for besides the past of HEAD
  list remote < <(git config --name-only --get-regexp '^remote\\..*url$')
  list ref < <(comm -23 <(git for-each-ref --format='%(refname)' | sort) \\
    <(git for-each-ref --format='%(refname)' --merged HEAD | sort))
  list worktree < <(worktrees)
  list 'in the git directory' < <(strangers "$(folder_of --git-common-dir)"
    git count-objects -v 2>&1 >/dev/null | sed 's/^warning: //')
}}
strangers() {{  # what git does not put into git directory $1, such as a merge or rebase underway
  local path
  for path in "$1"/*; do
    case ${{path##*/}} in
      HEAD | config | config.worktree | description | index | sharedindex.* | info | objects | refs | packed-refs) ;;
      hooks | logs | branches | shallow | modules | worktrees | COMMIT_EDITMSG | *_HEAD) ;;
      *) [ ! -e "$path" ] || printf '%s\n' "$path" ;;
    esac
  done
}}
objects() {{  # all that no commit up to HEAD, nor the index, needs; and ids in logs that lead there
  local common
  common=$(folder_of --git-common-dir) || exit 1
  git for-each-ref --format='%(objectname)' --merged HEAD |
    git rev-list --objects --indexed-objects $(absences) --stdin HEAD >"$scratch/walk" || exit 1
  cut -d' ' -f1 "$scratch/walk" | sort -u >"$scratch/reachable"
  git cat-file --batch-all-objects --batch-check='%(objectname)' | sort -u >"$scratch/all" || exit 1
  list 'unreachable object' < <(comm -13 "$scratch/reachable" "$scratch/all" |
    git cat-file --batch-check='%(objecttype) %(objectname)')
  list 'reflog or head' < <({{ cat "$common"/*_HEAD "$common"/worktrees/*/*HEAD "$common"/worktrees/*/logs/HEAD
    find "$common/logs" -type f -exec cat {{}} +; }} 2>/dev/null | grep -oE '[0-9a-f]{{40,64}}' |
    grep -v '^0*$' | sort -u | comm -13 "$scratch/reachable" -)
}}
past() {{
  local ahead
  if [ "$cut" ]; then
    [ "$(git rev-list --count HEAD)" = 1 ] || say history "before the setup patch"
  elif in_history HEAD; then
    say history "hidden paths"
  elif is_ancestor "$base" HEAD; then
    ahead=$(git rev-list --count "$base..HEAD") || exit 1
    [ "$ahead" -le 1 ] || say history "$ahead commits after the base"
  fi
}}
others() {{  # repositories in this one
  local top used=() folder
  top=$(pwd -P)
  while IFS= read -r -d '' folder; do
    cd -- "$top/$folder" && is_repository || continue
    used+=("$(folder_of --git-common-dir)")
    where=${{folder#./}}
    names
    objects
  done < <(cd "$top" && nested)
  where=
  cd -- "$top"
  list 'unused module' < <(comm -13 <(printf '%s\\n' "${{used[@]}}" | sort) \\
    <(modules "$(folder_of --git-common-dir)" | sort))
}}

plainly_clean() {{
  local key number all=0 walk file text
  [ -d .git ] && [ ! "$cut" ] && [ ${{#inside[@]}} -eq 0 ] || return
  [ ! -e .git/worktrees ] && [ ! -e .git/modules ] && [ ! -e .git/objects/info/alternates ] || return
  [[ $(<.git/config) != *'[remote '* ]] && [ ! "$(strangers .git)" ] || return
  while read -r key number; do
    case $key in count: | in-pack: | garbage:) all=$((all + number)) ;; esac
  done < <(git count-objects -v)
  [ "$all" -gt 0 ] && [ "$all" -le 5000 ] || return
  mapfile -t walk < <(git rev-list --objects --indexed-objects HEAD)
  [ ${{#walk[@]}} -eq "$all" ] && [ "${{walk[0]}}" = "${{base:-${{walk[0]}}}}" ] || return
  shopt -s globstar nullglob
  for file in .git/*_HEAD .git/logs/**; do
    [ ! -f "$file" ] || text+=" "$(<"$file")
  done
  text=${{text//[!0-9a-f]/ }}
  for word in ${{text//0000000000000000000000000000000000000000/}}; do
    [ ${{#word}} -lt 40 ] || [[ " ${{walk[*]}} " = *" $word "* ]] || return
  done
  [ "$(find . -name .git -prune)" = ./.git ] && [ ! "$(git status --porcelain)" ]
}}

for path in "${{hidden[@]}}"; do
  {{ [ -e "$path" ] || [ -L "$path" ]; }} && say 'hidden path' "$path"
done
list bytecode < <(bytecode)
[ ! "$found" ] && plainly_clean && exit 0
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
shopt -u globstar nullglob
in_repository || exit 0
past
to_root || exit 1
names
settle
objects
settle
others
settle
list {UNCOMMITTED} < <(git status --porcelain --ignore-submodules=dirty)
exit 0
"""


async def find_leaks(sandbox: Sandbox, task: Task, *, first_only: bool = False) -> list[Leak]:
    """What an agent would find of the answer in this sandbox, and what is UNCOMMITTED. `first_only` stops at the first leak.

    Raises SandboxError if the search fails.
    """
    script = f"first_only={'1' if first_only else ''} found=\nset -- {words_of(task)}\n{_CHECK}"
    result = await sandbox.run(script, timeout_s=CHECK_S)
    if result.exit_code != 0:
        tail = result.output[-300:].decode("utf-8", "replace").strip()
        raise SandboxError(f"looking for leaks in {task.image} ended with status {result.exit_code}: {tail}")
    lines = (line.split(b"\t") for line in result.output.splitlines())
    return [
        Leak(line[1].decode(), b"\t".join(line[2:]).decode("utf-8", "replace"))
        for line in lines
        if line[0] == _MARK and len(line) > 2
    ]


def hiding(task: Task) -> str:
    """The command that removes hidden paths from the work tree; "" if there are none."""
    if not task.hidden_paths:
        return ""
    return f"rm -rf -- {shlex.join(_hidden(task))}\n"


def words_of(task: Task) -> str:
    """The arguments for WORDS, quoted. Raises TaskBroken for a path that cannot be hidden."""
    hidden = _hidden(task)
    cut = "1" if task.setup_patch.strip() else ""
    patched = [name.decode("utf-8", "surrogateescape") for name in _PATCHED_SOURCE.findall(task.setup_patch)]
    sources = [path for path in [*hidden, *patched] if path.endswith(".py")]
    return shlex.join([task.base_commit, cut, str(len(hidden)), *hidden, *sources])


def _hidden(task: Task) -> list[str]:
    """Hidden paths, relative to the workdir if inside it, else absolute."""
    return [_placed(task, path) for path in task.hidden_paths]


def _placed(task: Task, path: str) -> str:
    workdir = posixpath.normpath(task.workdir)
    full = posixpath.normpath(posixpath.join(workdir, path))
    relative = posixpath.relpath(full, workdir)
    holds_workdir = full == "/" or posixpath.commonpath([full, workdir]) == full
    if "\0" in path or not path.strip() or holds_workdir or relative.split("/")[0] == ".git":
        raise TaskBroken(f"hidden_paths of {task.id}: {path!r} cannot be taken away")
    return full if relative.startswith("../") else relative
