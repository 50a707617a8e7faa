"""The scripts that run in the grading container before the tests: apply the patch, restore what it must not touch, apply the
hidden tests.

Their inputs are files in GRADE_DIR, outside the repository. They report how they ended by their exit status alone, which
nothing in the patch can forge: no code of the patch runs before the eval script does. The statuses differ from those that
shells and git use.
"""

import re
import shlex
from collections.abc import Iterable

from workers.grading.governing import (
    GOVERNING_DIRECTORIES,
    RUNNER_MODULES,
    STANDARD_MODULES,
    GoverningFiles,
)
from workers.grading.witness import PACKAGES, USER_PACKAGES, installer
from workers.sandbox.git import GIT

GRADE_DIR = "/swerve-grade"
PATCH = f"{GRADE_DIR}/model.diff"
TESTS = f"{GRADE_DIR}/tests.diff"
EVAL = f"{GRADE_DIR}/eval.sh"
PROTECTED = f"{GRADE_DIR}/protected"  # repository-relative paths, each with a NUL after it
TESTED = f"{GRADE_DIR}/tested"  # the same for further files with tests, which HEAD may have
TAMPERED = f"{GRADE_DIR}/tampered"  # the same for settings files that a patch may not keep
START = f"{GRADE_DIR}/start"  # made in the first step: files that are not older came with the patch
PARSER = f"{GRADE_DIR}/parser.py"
LOG = f"{GRADE_DIR}/stdout.log"
NO_LOG = f"{GRADE_DIR}/stderr.log"
PARSED = f"{GRADE_DIR}/parsed.json"

APPLIED_BY = {70: "git apply", 71: "git apply --3way", 72: "patch --fuzz"}
DOES_NOT_APPLY = 73
TESTS_DO_NOT_APPLY = 74  # not even to the base commit
NO_PYTHON = 75
IN_THE_WAY = 76  # the hidden tests apply to the base commit, but not with the patch

# Prints what the parser wrote. What the parser prints is ignored.
PARSE = f"""
command -v python3 >/dev/null || exit {NO_PYTHON}
python3 {PARSER} {LOG} {NO_LOG} {PARSED} >/dev/null 2>&1 || exit 1
cat {PARSED}
"""

# No fix adds a program of such a name to a directory of the PATH: it would be there to be run by mistake. In bash's notation.
PROGRAMS = """
'[' activate awk bash bun bundle cargo cat cmake cmp command conda coverage cp ctest cut dash date deno diff
dotnet echo egrep env false find git gmake go gradle grep hatch head java jest kill ls make mamba mkdir mocha mv
mvn nice ninja node nox npm npx perl php phpunit pip pip3 pnpm poetry printf prove py.test pytest python python2
python3 'python3.[0-9]' 'python3.[0-9][0-9]' rake rm rspec ruby rustc sed sh sleep sort su sudo tail tee test
timeout tox tr true type uniq uv uvx vitest wc which xargs yarn zsh
""".replace("\n", " ")
INSTALLED = ("*site-packages/*", "*dist-packages/*", "node_modules/*", "*/node_modules/*")
COMPILED = ("*.pyc",)  # a compiled module may claim to stand for any module beside it

_PRUNED = "\\( -path ./.git -o -name site-packages -o -name dist-packages -o -name node_modules \\) -prune -o"
_COPY = "xargs -0 -r cp -a --parents -t"


def apply(governing: GoverningFiles, *, loosely: bool) -> str:
    """Installs the witness, then applies the patch by the first command that accepts it, without the files that it may not
    bring.

    START is as old as the first step. The patch is applied once the file system's clock has moved on.

    git apply refuses a path inside .git, but patch does not; it is used only if `loosely`.
    """
    return f"""{GIT}{_left_out(governing)}
chmod 700 {GRADE_DIR}
: >{START}
{installer(governing.surveyed.places)}
until [ {START}.later -nt {START} ]; do : >{START}.later; done
taken=(--whitespace=nowarn "${{left_out[@]/#/--exclude=}}")
git apply "${{taken[@]}}" {PATCH} && exit 70
git update-index -q --refresh
was=$(git -c user.name=swerve -c user.email=swerve@localhost stash create)
git ls-files -z --others --exclude-standard | sort -z >{GRADE_DIR}/untracked
undo() {{
  git reset -q --hard
  [ -z "$was" ] || {{ git checkout -q "$was" -- . && git reset -q; }}
  git ls-files -z --others --exclude-standard | sort -z | comm -z -13 {GRADE_DIR}/untracked - | xargs -0 -r rm -f --
}}
git apply --3way "${{taken[@]}}" {PATCH} && exit 71
undo
header='^(---|\\+\\+\\+|diff|Index:|rename|copy) .*\\.git(/|"|[[:space:]]|$)'
{"false" if loosely else "true"} || grep -aqE "$header" {PATCH} || reaches_left_out ||
  {{ patch --batch --forward --fuzz=5 --no-backup-if-mismatch -u -p1 -i {PATCH} && exit 72; }}
undo
exit {DOES_NOT_APPLY}
"""


def _left_out(governing: GoverningFiles) -> str:
    """Sets `left_out`, patterns of repository-relative paths in git apply's form: installed packages, compiled modules, and
    what the shell reads or runs by itself.
    """
    return f"""
image_path={shlex.quote("".join(f"{entry}:" for entry in governing.surveyed.program_directories))}$TASK_PATH
left_out=({_quoted((*INSTALLED, *COMPILED))})
for configuration in */pyvenv.cfg .*/pyvenv.cfg */*/pyvenv.cfg; do
  [ -e "$configuration" ] && left_out+=("${{configuration%/*}}" "${{configuration%/*}}/*")
done
case ${{BASH_ENV-}} in "$PWD"/*) left_out+=("${{BASH_ENV#"$PWD"/}}") ;; /*|'') ;; *) left_out+=("$BASH_ENV") ;; esac
IFS=: read -r -a folders <<<"$image_path"
for folder in "${{folders[@]}}"; do
  folder=${{folder%/}}
  case $folder in "$PWD"|.|'') inside= ;; "$PWD"/*) inside=${{folder#"$PWD"/}}/ ;; /*) continue ;; *) inside=$folder/ ;; esac
  for program in {PROGRAMS}; do left_out+=("$inside$program"); done
done
reaches_left_out() {{
  local path pattern
  while IFS= read -r path; do
    for pattern in "${{left_out[@]}}"; do [[ $path == $pattern ]] && return; done
  done < <(grep -aE '^(---|\\+\\+\\+|Index:) ' {PATCH} | sed -E 's/^[^ ]* "?[^/]*\\///; s/[\\t"].*$//')
  return 1
}}
"""


def save(governing: GoverningFiles) -> str:
    """Keeps a copy of the files that govern the test runner, as the image has them."""
    return f"""
mkdir -p {GRADE_DIR}/governing {GRADE_DIR}/settings &&
{_governing(governing)} | {_COPY} {GRADE_DIR}/governing &&
{_find(_named(governing.settings))} | {_COPY} {GRADE_DIR}/settings
"""


def changed_settings(governing: GoverningFiles) -> str:
    """Prints a line for each settings file that differs from its copy: path, old and new content in base64, "-" for an absent
    file.
    """
    return f"""
show() {{ if [ -e "$1" ]; then base64 -w 0 "$1"; else printf -; fi; }}
{{ {_find(_named(governing.settings))}; cd {GRADE_DIR}/settings && find . -type f -print0; }} | sort -zu |
while IFS= read -r -d '' path; do
  cmp -s "$path" {GRADE_DIR}/settings/"$path" && continue
  echo "$(printf %s "$path" | base64 -w 0) $(show {GRADE_DIR}/settings/"$path") $(show "$path")"
done
"""


# `open_way` removes a file or link where the commit $base has a directory, or nothing, on the way to a path. What that has
# there itself returns.
_OPEN_WAY = """
open_way() {
  local parent=${1%/*}
  [ "$parent" = "$1" ] || [ "$parent" = . ] && return
  open_way "$parent"
  [ -d "$parent" ] && [ ! -L "$parent" ] && return
  [ -e "$parent" ] || [ -L "$parent" ] || return
  case $(git ls-tree "$base" -- "$parent") in
    *' blob '*) git --literal-pathspecs checkout -q "$base" -- "$parent" ;;
    *) rm -f -- "$parent" ;;
  esac
}
put_back() {
  open_way "$2"
  rm -rf -- "$2"
  case $2 in */*) mkdir -p -- "${2%/*}" ;; esac
  cp -a "$1/$2" "$2"
}
"""


def restore_governing(governing: GoverningFiles) -> str:
    """Puts the copies back and removes what was added. $1 is HEAD at the start."""
    listed = [path for path in governing.surveyed.paths if "/" in path]
    return f"""{GIT}{_OPEN_WAY}
base=$1
for path in {_quoted(listed)}; do open_way "$path"; done
{_governing(governing)} | xargs -0 -r rm -f --
(cd {GRADE_DIR}/governing && find . \\( -type f -o -type l \\) -print0) | while IFS= read -r -d '' path; do
  put_back {GRADE_DIR}/governing "${{path#./}}" || exit 1
done || exit 1
[ -e {TAMPERED} ] || exit 0
while IFS= read -r -d '' path; do
  rm -rf -- "$path"
  [ ! -e {GRADE_DIR}/settings/"$path" ] || put_back {GRADE_DIR}/settings "${{path#./}}" || exit 1
done <{TAMPERED}
"""


# Removes new modules from the directories that Python searches before its own, if these would hide one of Python's own or an
# installed one: the directories that commands run in, those of PYTHONPATH, and those that pytest puts first, which for each file
# of tests is the closest one that is no package. Those of .pth files come after the installed modules, so they hide none.
_UNHIDE = """
declare -A searched
standard=STANDARD always=ALWAYS
search() {
  local folder=${1%/}
  case $folder in "$PWD") folder=. ;; "$PWD"/*) folder=${folder#"$PWD"/} ;; /*|'') return ;; esac
  folder=${folder#./}
  searched[${folder:-.}]=1
}
search_for() {
  local folder=.
  case $1 in */*) folder=${1%/*} ;; esac
  while [ "$folder" != . ] && [ -e "$folder/__init__.py" ]; do
    case $folder in */*) folder=${folder%/*} ;; *) folder=. ;; esac
  done
  searched[$folder]=1
}
hides() {
  local name=$1 folder
  [[ $standard == *"/$name/"* || $always == *"/$name/"* ]] && return
  for folder in "${installations[@]}"; do
    [ -e "$folder/$name.py" ] || [ -e "$folder/$name" ] && return
    compiled=("$folder/$name".*so)
    [ ${#compiled[@]} = 0 ] || return 0
  done
  return 1
}
is_searched() {
  local tests
  [ -n "${searched[$1]-}" ] && return
  [ -e "$1/__init__.py" ] && return 1
  tests=("$1"/test_*.py "$1"/*_test.py "$1"/conftest.p[y])
  [ ${#tests[@]} != 0 ]
}
search_all() {
  local path folder entries
  [ ${#searched[@]} = 0 ] || return
  for folder in SEARCHED; do search "$folder"; done
  IFS=: read -r -a entries <<<"${PYTHONPATH-}"
  for folder in "${entries[@]}"; do search "$folder"; done
  while IFS= read -r -d '' path; do search_for "$path"; done \\
    < <(cat PROTECTED TESTED; git ls-files -z -- conftest.py '*/conftest.py')
}
unhide() {
  local path name folder
  shopt -s nullglob
  installations=(PACKAGES)
  while IFS= read -r -d '' path; do
    path=${path#./} name=${path##*/} folder=.
    case $path in */*) folder=${path%/*} ;; esac
    case $name in
      __init__.*)
        [ "$folder" = . ] && continue
        name=${folder##*/}
        case $folder in */*) folder=${folder%/*} ;; *) folder=. ;; esac ;;
      *.py|*.pyc|*.so) name=${name%%.*} ;;
      *) [ -L "$path" ] || continue ;;
    esac
    hides "$name" || continue
    search_all
    is_searched "$folder" || continue
    [ -n "$(git ls-tree "$head" -- "$path")" ] && continue
    [ "$folder" = . ] && folder= || folder=$folder/
    [[ $always != *"/$name/"* ]] && [ -n "$(git ls-tree "$head" -- "$folder$name.py" "$folder$name/__init__.py")" ] && continue
    rm -f -- "$path"
  done < <(find . PRUNED \\( -type f -o -type l \\) -newer START -print0)
  shopt -u nullglob
}
"""


def _unhide(governing: GoverningFiles) -> str:
    words = {
        "STANDARD": f"/{'/'.join(STANDARD_MODULES)}/",
        "ALWAYS": f"/{'/'.join(RUNNER_MODULES)}/",
        "PACKAGES": f"{' '.join(PACKAGES)} {USER_PACKAGES}",
        "SEARCHED": _quoted(governing.surveyed.searched),
        "PROTECTED": PROTECTED,
        "TESTED": TESTED,
        "PRUNED": _PRUNED,
        "START": START,
    }
    return re.sub("|".join(words), lambda word: words[word[0]], _UNHIDE)


def _governing(governing: GoverningFiles) -> str:
    folders = [f"{folder}/*" for folder in GOVERNING_DIRECTORIES]
    return _find(
        [*_named(governing.names), *_at([f"*/{folder}" for folder in folders]), *_at(governing.paths, "./")]
    )


def _find(tests: Iterable[str]) -> str:
    return f"find . {_PRUNED} \\( {' -o '.join(tests)} \\) \\( -type f -o -type l \\) -print0"


def _named(names: Iterable[str]) -> list[str]:
    return [f"-name {shlex.quote(name)}" for name in names]


def _at(paths: Iterable[str], prefix: str = "") -> list[str]:
    return [f"-path {shlex.quote(prefix + path)}" for path in paths]


def _quoted(words: Iterable[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)


def restore_protected(governing: GoverningFiles) -> str:
    """Restores the files of the hidden tests and applies these. $1 is the base commit, or "" for HEAD; $2 HEAD at the start.

    Of the listed files in TESTED that are not protected, those count that HEAD has. Many paths at a time, because each call of git
    reads the index. Files of the patch that Python would find in place of a
    protected module are removed first, because they may be protected themselves. In the end GRADE_DIR is empty: code under test
    finds nothing there to compare its tests with.
    """
    return f"""{GIT}{_OPEN_WAY}{_unhide(governing)}{_RESTORE}"""


_RESTORE = f"""
behind_link() {{
  local parent=${{1%/*}}
  [ "$parent" = "$1" ] && return 1
  [ -L "$parent" ] || behind_link "$parent"
}}
uncover() {{
  local path=$1 entry
  entries=()
  case $path in *.py) entries+=("${{path%.py}}"/__init__.* "${{path%.py}}"*.so) ;; esac
  while [ "$path" != "${{path%/*}}" ]; do path=${{path%/*}}; entries+=("$path".py "$path".pyc "$path".*so); done
  for entry in "${{entries[@]}}"; do
    [ -e "$entry" ] && [ ! "$entry" -ot {START} ] && ! git cat-file -e "$base:./$entry" 2>/dev/null && rm -f -- "$entry"
  done
}}
restore() {{
  local path wanted=() gone=() present=()
  local -A there=()
  while IFS= read -r -d '' path; do
    there[$path]=1 present+=("$path")
  done < <(git ls-tree -z --name-only "$base" -- "$@")
  for path; do [ -z "${{there[$path]-}}" ] && [ -n "${{optional[$path]-}}" ] || wanted+=("$path"); done
  for path in "${{wanted[@]}}"; do open_way "$path"; done
  for path in "${{wanted[@]}}"; do
    behind_link "$path" || {{ [ ! -e "$path" ] && [ ! -L "$path" ]; }} || gone+=("$path")
  done
  [ ${{#gone[@]}} = 0 ] || rm -rf -- "${{gone[@]}}"
  [ ${{#present[@]}} = 0 ] || git --literal-pathspecs checkout -q "$base" -- "${{present[@]}}"
}}
restore_listed() {{
  local list path listed=() start
  for list; do
    while IFS= read -r -d '' path; do listed+=("$path"); done <"$list"
  done
  shopt -s nullglob
  for path in "${{listed[@]}}"; do uncover "$path"; done
  shopt -u nullglob
  for ((start = 0; start < ${{#listed[@]}}; start += 500)); do
    restore "${{listed[@]:start:500}}" || exit 1
  done
}}
head=$2
unhide
declare -A optional
while IFS= read -r -d '' path; do optional[$path]=1; done <{TESTED}
while IFS= read -r -d '' path; do optional[$path]=; done <{PROTECTED}
if [ "$1" != "$head" ] && [ -n "$1" ] && git cat-file -e "$1^{{commit}}" 2>/dev/null; then
  base=$head
  restore_listed {TESTED}
  base=$1
  restore_listed {PROTECTED}
else
  base=$head
  restore_listed {TESTED} {PROTECTED}
fi
if [ ! -e {TESTS} ] || git apply --whitespace=nowarn {TESTS}; then
  rm -rf {GRADE_DIR}/*
  exit
fi
export GIT_INDEX_FILE={GRADE_DIR}/index
git read-tree "$base" && git apply --cached --check {TESTS} || exit {TESTS_DO_NOT_APPLY}
exit {IN_THE_WAY}
"""
