# shellcheck shell=bash
# shellcheck disable=SC2034 # the script that follows reads the variables
# The arguments and functions that the scripts of this folder share. The text of git.sh goes before this, and another script after it.
#
#     $1 base commit   $2 "1": a setup patch cuts the history off   $3 "1": the first leak is enough   $4 number of hidden paths
#     then the hidden paths, then Python sources whose bytecode may give the answer away
base=$1 cut=$2 first_only=$3 num_hidden=$4
shift 4
hidden=("${@:1:num_hidden}") sources=("${@:num_hidden + 1}") inside=()
for path in "${hidden[@]}"; do
  case $path in /*) ;; *) inside+=("$path") ;; esac
done
bytecode() {  # prints the files that Python compiled from the sources
  local source folder name path
  for source in "${sources[@]}"; do
    case $source in */*) folder=${source%/*} ;; *) folder=. ;; esac
    name=${source##*/} name=${name%.py}
    for path in "$folder/__pycache__/$name".*.pyc "$folder/$name".py[co]; do
      [ ! -e "$path" ] || printf '%s\n' "$path"
    done
  done
}
is_ancestor() { [ "$1" ] && git merge-base --is-ancestor "$1" "$2" 2>/dev/null; }
in_history() {  # succeeds if a hidden path ever was in the history of commit $1
  [ ${#inside[@]} -gt 0 ] &&
    [ "$(git --literal-pathspecs rev-list -1 --full-history "$1" -- "${inside[@]}")" ]
}
absences() {  # prints the option for a walk through a partial clone, whose missing objects cannot be fetched
  [ ! "$(git config --get-regexp '^(extensions\.partialclone|remote\..*\.promisor)$')" ] ||
    echo --missing=allow-any
}
folder_of() { (cd -- "$(git rev-parse "$1")" && pwd -P); }
in_repository() {  # succeeds in a repository with a commit; ends the script if git cannot read the repository
  git rev-parse -q --verify HEAD >/dev/null 2>&1 && return
  [ ! -e .git ] && return 1
  echo "git finds no commit in $PWD"
  exit 1
}
to_root() {
  local root
  root=$(git rev-parse --show-toplevel) && cd -- "$root" || return
}
is_repository() {  # succeeds if this directory is the root of a work tree with a commit
  git rev-parse -q --verify HEAD >/dev/null 2>&1 &&
    [ "$(git rev-parse --show-toplevel)" = "$(pwd -P)" ]
}
nested() {  # prints directories below this one that may be repositories, with a NUL after each
  local path
  find . -name .git -prune -print0 | while IFS= read -r -d '' path; do
    [ "$path" = ./.git ] || printf '%s\0' "${path%/.git}"
  done
}
modules() {  # prints the git directories of submodules under $1, whether checked out or not
  [ -d "$1/modules" ] && find "$1/modules" -type f -name HEAD | while IFS= read -r path; do
    [ ! -d "${path%/HEAD}/objects" ] || printf '%s\n' "${path%/HEAD}"
  done
}
worktrees() {  # prints all other worktrees of this repository; git also lists a separate git directory
  local common
  common=$(folder_of --git-common-dir)
  [ ! -d "$common/worktrees" ] || git worktree list --porcelain | sed -n 's/^worktree //p' |
    grep -Fxv -e "$(pwd -P)" -e "$common"
}
