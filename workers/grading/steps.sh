#!/bin/bash
# The steps in a grading container, each a function. `steps.step` sends the functions that a step needs, with a call of the first. There is
# nothing else in this file.
#
# Arguments are variables in capitals, which `steps.step` sets: GRADE is the directory with the grader's own files, HEAD the repository's
# commit at the start, and the others are explained where they are read. The grader judges a step by its exit status alone, which nothing in
# the patch can forge, as no code of the patch runs before the eval script does. The statuses differ from those that shells and git use;
# steps.py lists them.
#
# shellcheck disable=SC2153 # a variable in capitals is no misspelling of another

# ---- Files of the work tree

# Prints the path of each file or link that find's expression in the arguments selects, with a NUL after it.
find_files() {
  find . \( -path ./.git -o -name site-packages -o -name dist-packages -o -name node_modules \) -prune -o \
    \( "$@" \) \( -type f -o -type l \) -print0
}

# Removes files and links that block the directory of a path. A file or link that the commit $base has there is restored.
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

# Succeeds if one of the directories of a path is a link.
behind_link() {
  local parent=${1%/*}
  [ "$parent" = "$1" ] && return 1
  [ -L "$parent" ] || behind_link "$parent"
}

# Restores the path $2 from its copy in $1.
put_back() {
  open_way "$2"
  rm -rf -- "$2"
  case $2 in */*) mkdir -p -- "${2%/*}" ;; esac
  cp -a "$1/$2" "$2"
}

# ---- Installations of Python

# Sets `packages` to the directories of packages that exist, of any Python. The work tree may have some.
find_packages() {
  packages=(
    /usr/lib/python3*/dist-packages
    /usr/local/lib/python3*/*-packages
    /opt/*/lib/python3*/site-packages
    /opt/*/envs/*/lib/python3*/site-packages
    /*env*/lib/python3*/site-packages
    *env*/lib/python3*/site-packages
    .*env*/lib/python3*/site-packages
    .tox/*/lib/python3*/site-packages
    .nox/*/lib/python3*/site-packages
    "${VIRTUAL_ENV:-/nowhere}"/lib/python3*/site-packages
    "${CONDA_PREFIX:-/nowhere}"/lib/python3*/site-packages
    ~/*env*/lib/python3*/site-packages
    ~/.*env*/lib/python3*/site-packages
    ~/*conda*/lib/python3*/site-packages
    ~/*conda*/envs/*/lib/python3*/site-packages
    ~/.pyenv/versions/*/lib/python3*/site-packages
    ~/.virtualenvs/*/lib/python3*/site-packages
    ~/.cache/pypoetry/virtualenvs/*/lib/python3*/site-packages
    ~/.local/share/uv/python/*/lib/python3*/site-packages
  )
}

# Sets `folders` to these, to those of the installations in PLACES, and to the user's directory of each Python that may be there, which
# Python 3.5 and newer also reads.
find_installations() {
  local place entry python version folder home=~ pythons entries packages
  local -A versions different
  shopt -s nullglob
  find_packages
  folders=("${packages[@]}")
  for place in "${PLACES[@]}"; do
    case $place in '~'*) place=$home${place#'~'} ;; esac
    folders+=("$place"/lib/python3*/site-packages)
  done
  pythons=("${folders[@]}" ~/.local/lib/python3.*)
  IFS=: read -r -a entries <<<"${TASK_PATH-}:$PATH"
  for entry in "${entries[@]}"; do pythons+=("${entry:-.}"/python3.*); done
  for python in "${pythons[@]}"; do
    [[ $python =~ /python(3[.][0-9]+)(/|$) ]] && versions[${BASH_REMATCH[1]}]=1
  done
  [ ${#versions[@]} != 0 ] || for version in 3.{5..16}; do versions[$version]=1; done
  for version in "${!versions[@]}"; do folders+=(~/.local/lib/"python$version"/site-packages); done
  for folder in "${folders[@]}"; do different[$folder]=1; done
  folders=("${!different[@]}")
  shopt -u nullglob
}

# Makes folders with the owner and the mode of the closest one that was there, so that a user who may write beside them can go on to do so.
make_folders() {
  local folder there path
  for folder; do
    there=$folder
    until [ -d "${there:-/}" ]; do there=${there%/*}; done
    [ "$there" != "$folder" ] || continue
    mkdir -p -- "$folder"
    [[ $(stat -c %u:%A "${there:-/}") != 0:d????-??-? ]] || continue
    path=$folder
    until [ "$path" = "$there" ]; do
      chown --reference="${there:-/}" -- "$path" && chmod --reference="${there:-/}" -- "$path" || return
      path=${path%/*}
    done
  done
}

# Writes the files INSTALLED, with the texts TEXTS, into the packages of every Python; FOLDER is the folder that they need there, or empty.
# CODE is written as CODE_NAME into a directory whose path replaces PLACE in the texts.
#
# The files get an old time, because eval scripts may look for files of the environment that a patch made.
install_files() {
  local folders place path paths position
  find_installations
  make_folders "${folders[@]/%//$FOLDER}"
  for place in /usr/local/lib ~/.local/lib; do [ -w "$place" ] && break; done
  [ -z "$CODE_NAME" ] || printf %s "$CODE" >"$place/$CODE_NAME"
  for position in "${!INSTALLED[@]}"; do
    paths=("${folders[@]/%//${INSTALLED[position]}}")
    for path in "${paths[@]}"; do printf %s "${TEXTS[position]//PLACE/$place}" >"$path"; done
    touch -ct 200001010000 "${paths[@]}"
  done
}

# Prints the facts that decide whether DIRECTORIES may be searched for modules, each entry with a letter before and a NUL after it: the
# content of each of them (d), installed modules (i), other modules of the repository (f), packages of HEAD (p).
print_modules() {
  local folders folder directory entry path
  find_installations
  shopt -s nullglob dotglob
  for directory in "${DIRECTORIES[@]}"; do
    behind_link "$directory/" || for entry in "$directory"/*; do printf 'd%s\0' "$entry"; done
  done
  for folder in "${folders[@]}"; do
    for entry in "$folder"/*; do printf 'i%s\0' "${entry##*/}"; done
  done
  find_files -name '*.py' -o -name '*.so' -o -type l | while IFS= read -r -d '' path; do printf 'f%s\0' "${path#./}"; done
  git ls-tree -r -z --name-only HEAD | while IFS= read -r -d '' path; do
    case /$path in */__init__.py) printf 'p%s\0' "$path" ;; esac
  done
}

# Makes every Python search DIRECTORIES of the repository last. Python reads .pth files in the order of their names, "easy-install.pth"
# before this one.
search_directories() {
  local folders folder directory
  find_installations
  for folder in "${folders[@]}"; do
    [ -d "$folder" ] || continue
    for directory in "${DIRECTORIES[@]}"; do echo "$PWD/$directory"; done >"$folder/zz_directories_of_the_repository.pth" || exit 1
  done
}

# ---- The patch

# Sets `left_out` to patterns of repository-relative paths in git apply's form: installed packages, compiled modules, which Python may
# load instead of any module beside them, and what the shell reads or runs by itself. ON_PATH are directories that scripts add to the PATH,
# PROGRAMS those of languages and test runners.
find_left_out() {
  local configuration folders folder inside program
  # No fix adds a program of such a name to a directory of the PATH: it would be there to be run by mistake.
  local programs=(
    '[' activate awk bash cat cmp command cp cut dash date diff echo egrep env false find git grep head kill ls mkdir mv nice printf rm
    sed sh sleep sort su sudo tail tee test timeout tr true type uniq wc which xargs zsh "${PROGRAMS[@]}"
  )
  left_out=('*site-packages/*' '*dist-packages/*' 'node_modules/*' '*/node_modules/*' '*.pyc')
  for configuration in */pyvenv.cfg .*/pyvenv.cfg */*/pyvenv.cfg; do
    [ -e "$configuration" ] && left_out+=("${configuration%/*}" "${configuration%/*}/*")
  done
  case ${BASH_ENV-} in
    "$PWD"/*) left_out+=("${BASH_ENV#"$PWD"/}") ;;
    /* | '') ;;
    *) left_out+=("$BASH_ENV") ;;
  esac
  IFS=: read -r -a folders <<<"$TASK_PATH"
  for folder in "${ON_PATH[@]}" "${folders[@]}"; do
    folder=${folder%/}
    case $folder in
      "$PWD" | . | '') inside= ;;
      "$PWD"/*) inside=${folder#"$PWD"/}/ ;;
      /*) continue ;;
      *) inside=$folder/ ;;
    esac
    for program in "${programs[@]}"; do left_out+=("$inside$program"); done
  done
}

# Succeeds if any header of the patch names a file that is left out.
reaches_left_out() {
  local path pattern
  while IFS= read -r path; do
    # shellcheck disable=SC2053 # they are patterns
    for pattern in "${left_out[@]}"; do [[ $path == $pattern ]] && return; done
  done < <(grep -aE '^(---|\+\+\+|Index:) ' "$GRADE/model.diff" | sed -E 's/^[^ ]* "?[^/]*\///; s/[\t"].*$//')
  return 1
}

undo_patch() {
  git reset -q --hard
  [ -z "$was" ] || { git checkout -q "$was" -- . && git reset -q; }
  git ls-files -z --others --exclude-standard | sort -z | comm -z -13 "$GRADE/untracked" - | xargs -0 -r rm -f --
}
names_git() {
  grep -aqE '^(---|\+\+\+|diff|Index:|rename|copy) .*\.git(/|"|[[:space:]]|$)' "$GRADE/model.diff"
}

# Applies the patch by the first command that accepts it, without the files that are left out; the exit status tells which one did. The
# files for the witness are installed before.
#
# git apply refuses a path inside .git, but patch does not. So patch is used only if LOOSELY is 1 and no header names such a path.
apply_patch() {
  local left_out was taken
  find_left_out
  chmod 700 "$GRADE"
  # `start` is as old as the first step. The patch is applied once the file system's clock has moved on.
  : >"$GRADE/start"
  install_files
  until [ "$GRADE/start.later" -nt "$GRADE/start" ]; do : >"$GRADE/start.later"; done
  taken=(--whitespace=nowarn "${left_out[@]/#/--exclude=}")
  git apply "${taken[@]}" "$GRADE/model.diff" && exit 70
  git update-index -q --refresh
  was=$(git -c user.name=swerve -c user.email=swerve@localhost stash create)
  git ls-files -z --others --exclude-standard | sort -z >"$GRADE/untracked"
  git apply --3way "${taken[@]}" "$GRADE/model.diff" && exit 71
  undo_patch
  [ "$LOOSELY" = 1 ] && ! names_git && ! reaches_left_out &&
    patch --batch --forward --fuzz=5 --no-backup-if-mismatch -u -p1 -i "$GRADE/model.diff" && exit 72
  undo_patch
  exit 73
}

# ---- Files that govern the test runner. GOVERNING and SETTINGS are expressions for find

# Copies the files that GOVERNING selects, as the image has them, and separately those that SETTINGS selects.
save_governing() {
  mkdir -p "$GRADE/governing" "$GRADE/settings" &&
    find_files "${GOVERNING[@]}" | xargs -0 -r cp -a --parents -t "$GRADE/governing" &&
    find_files "${SETTINGS[@]}" | xargs -0 -r cp -a --parents -t "$GRADE/settings"
}

show() {
  if [ -e "$1" ]; then base64 -w 0 "$1"; else printf -; fi
}
# Prints a line for each file that SETTINGS selects and that differs from its copy: path, old and new content in base64, "-" for an absent
# file.
print_changed_settings() {
  local path
  { find_files "${SETTINGS[@]}"; cd "$GRADE/settings" && find . -type f -print0; } | sort -zu |
    while IFS= read -r -d '' path; do
      cmp -s "$path" "$GRADE/settings/$path" && continue
      echo "$(printf %s "$path" | base64 -w 0) $(show "$GRADE/settings/$path") $(show "$path")"
    done
}

# Restores the files that GOVERNING selects from their copies and removes those that were added, then restores the settings files that are
# listed as `tampered`. NAMED are paths, some of which may not exist.
restore_governing() {
  local path base=$HEAD
  for path in "${NAMED[@]}"; do open_way "$path"; done
  find_files "${GOVERNING[@]}" | xargs -0 -r rm -f --
  (cd "$GRADE/governing" && find . \( -type f -o -type l \) -print0) | while IFS= read -r -d '' path; do
    put_back "$GRADE/governing" "${path#./}" || exit 1
  done || exit 1
  [ -e "$GRADE/tampered" ] || exit 0
  while IFS= read -r -d '' path; do
    rm -rf -- "$path"
    [ ! -e "$GRADE/settings/$path" ] || put_back "$GRADE/settings" "${path#./}" || exit 1
  done <"$GRADE/tampered"
}

# ---- Files with tests

# New modules are removed from the directories that Python searches before its own, if they would hide one of Python's own or an installed
# one: from the directories that commands run in, those of PYTHONPATH, and those that pytest puts first, which for each file of tests is the
# closest one that is no package. Those of .pth files come after the installed modules, so they hide none.
#
# SEARCHED are directories that commands run in. STANDARD and ALWAYS are names of modules with slashes around them: Python's, and those that
# may not be hidden even where the repository has them.
search() {
  local folder=${1%/}
  case $folder in "$PWD") folder=. ;; "$PWD"/*) folder=${folder#"$PWD"/} ;; /* | '') return ;; esac
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
  local name=$1 folder compiled
  [[ $STANDARD == *"/$name/"* || $ALWAYS == *"/$name/"* ]] && return
  for folder in "${packages[@]}" ~/.local/lib/python3.{5..16}/site-packages; do
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
  for folder in "${SEARCHED[@]}"; do search "$folder"; done
  IFS=: read -r -a entries <<<"${PYTHONPATH-}"
  for folder in "${entries[@]}"; do search "$folder"; done
  while IFS= read -r -d '' path; do search_for "$path"; done \
    < <(cat "$GRADE/protected"; grep -z '[.]py$' "$GRADE/tested"; git ls-files -z -- conftest.py '*/conftest.py')
}
unhide() {
  local path name folder packages
  local -A searched
  shopt -s nullglob
  find_packages
  for path in "${new[@]}"; do
    name=${path##*/} folder=.
    case $path in */*) folder=${path%/*} ;; esac
    case /$path in */org/python | */org/python[./]*) name=__init__.py folder=${path%/python*} ;; esac
    case $name in
      __init__.*)
        [ "$folder" = . ] && continue
        name=${folder##*/}
        case $folder in */*) folder=${folder%/*} ;; *) folder=. ;; esac ;;
      *.py | *.pyc | *.so) name=${name%%.*} ;;
      *) [ -L "$path" ] || continue ;;
    esac
    hides "$name" || continue
    search_all
    is_searched "$folder" || continue
    [ -n "$(git ls-tree "$HEAD" -- "$path")" ] && continue
    if [ "$folder" = . ]; then folder=; else folder=$folder/; fi
    [[ $ALWAYS != *"/$name/"* ]] && [ -n "$(git ls-tree "$HEAD" -- "$folder$name.py" "$folder$name/__init__.py")" ] && continue
    rm -f -- "$path"
  done
  shopt -u nullglob
}

# Sets `new` to the files that came with the patch, `is_new` to the same by path, and `hiding` to the indices of those that Python would
# find instead of a module, by the module's path without its ending; the path of a package ends with a slash.
find_new() {
  local path name folder
  while IFS= read -r -d '' path; do
    path=${path#./} name=${path##*/}
    folder=/${path%"$name"}
    case $name in
      __init__.*) hiding[$folder]+=" ${#new[@]}" ;;
      *.py | *.pyc | *.so) hiding[$folder${name%%.*}]+=" ${#new[@]}" ;;
      *) [ ! -L "$path" ] || hiding[$folder$name/]+=" ${#new[@]}" ;;
    esac
    new+=("$path") is_new[$path]=1
  done < <(find_files -newer "$GRADE/start")
}
uncover() {
  local path=$1 number places=()
  case $path in *.py) places+=("/${path%.py}/" "/${path%.py}") ;; esac
  while [ "$path" != "${path%/*}" ]; do path=${path%/*}; places+=("/$path"); done
  for path in "${places[@]}"; do
    for number in ${hiding[$path]-}; do
      git cat-file -e "$base:./${new[number]}" 2>/dev/null || rm -f -- "${new[number]}"
    done
  done
}
restore() {
  local path gone=() present=()
  while IFS= read -r -d '' path; do present+=("$path"); done < <(git ls-tree -z --name-only "$base" -- "$@")
  for path; do open_way "$path"; done
  for path; do
    behind_link "$path" || { [ ! -e "$path" ] && [ ! -L "$path" ]; } || gone+=("$path")
  done
  [ ${#gone[@]} = 0 ] || rm -rf -- "${gone[@]}"
  [ ${#present[@]} = 0 ] || git --literal-pathspecs checkout -q "$base" -- "${present[@]}"
}
restore_changed() {
  local path changed=()
  git --literal-pathspecs diff --name-only -z --no-renames --no-ext-diff --ignore-submodules --relative "$base" -- "$@" \
    >"$GRADE/changed" || return 1
  while IFS= read -r -d '' path; do changed+=("$path"); done <"$GRADE/changed"
  [ ${#changed[@]} = 0 ] || restore "${changed[@]}" || return 1
  for path; do
    [ -z "${is_new[$path]-}" ] || git cat-file -e "$base:./$path" 2>/dev/null || rm -f -- "$path"
  done
}
# Restores the paths in the list $1 by the function $2.
restore_listed() {
  local path listed=() start
  while IFS= read -r -d '' path; do listed+=("$path"); done <"$1"
  for path in "${listed[@]}"; do uncover "$path"; done
  for ((start = 0; start < ${#listed[@]}; start += 500)); do
    "$2" "${listed[@]:start:500}" || exit 1
  done
}

# Restores the files of the hidden tests and applies these. BASE is the base commit, or "" for HEAD.
#
# Files that are listed as `tested` are restored if the patch changed them, and removed if it added them. Git gets many paths in one call,
# because each call reads the index. Files of the patch that Python would find in place of a listed module are removed first, because
# they may be listed themselves. GRADE is empty at the end, so code under test cannot compare its tests with anything there.
restore_protected() {
  local base=$HEAD new=()
  local -A is_new hiding
  find_new
  unhide
  restore_listed "$GRADE/tested" restore_changed
  [ "$BASE" = "$HEAD" ] || [ -z "$BASE" ] || ! git cat-file -e "$BASE^{commit}" 2>/dev/null || base=$BASE
  restore_listed "$GRADE/protected" restore
  if [ ! -e "$GRADE/tests.diff" ] || git apply --whitespace=nowarn "$GRADE/tests.diff"; then
    rm -rf "${GRADE:?}"/*
    exit
  fi
  export GIT_INDEX_FILE=$GRADE/index
  git read-tree "$base" && git apply --cached --check "$GRADE/tests.diff" || exit 74
  exit 76
}

# ---- Reading files

look() {
  local path kind start
  while IFS= read -r path; do
    [ -f "$path" ] || continue
    kind=-
    [ -x "$path" ] && kind=x
    IFS= read -r -n 2 start <"$path" 2>/dev/null
    [ "$start" = '#!' ] && kind=x
    echo "$(printf %s "$path" | base64 -w 0) $kind $(head -c "$READ_BYTES" "$path" | base64 -w 0)"
  done
}
# Prints a line for each file among LISTED, a newline-separated list in base64: path, "x" for a script or "-", and at most READ_BYTES of
# its content. CONFTESTS=1 adds each conftest.py that names plugins.
look_at_files() {
  base64 -d <<<"$LISTED" | look 2>/dev/null
  [ "$CONFTESTS" = 0 ] || git ls-files -z -- conftest.py '*/conftest.py' | xargs -0 -r grep -l pytest_plugins -- | look 2>/dev/null
  true
}

# Prints the file that the parser wrote. The parser's own output is ignored.
parse_log() {
  command -v python3 >/dev/null || exit 75
  python3 "$GRADE/parser.py" "$GRADE/stdout.log" "$GRADE/stderr.log" "$GRADE/parsed.json" >/dev/null 2>&1 || exit 1
  cat "$GRADE/parsed.json"
}
