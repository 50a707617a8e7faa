# shellcheck shell=bash
# The owners of a work tree's files, which root makes. The text of git.sh goes before this.

# Sets `owner` to the ids of the work tree's user and group. Where a tree is not of one piece it is the first that is not root: of the
# workdir, or of the git directory, since a builder may have made either as root. A tree of root's that the user $1 may write is this user's.
find_owner() {
  local path mode group
  owner=0:0
  [ -O . ] && [ -O .git ] && [ "${1:-0:0}" = 0:0 ] && return
  for path in . "$(git rev-parse --git-dir)"; do
    [ -O "$path" ] || owner=$(stat -c %u:%g -- "$path")
    [ "$owner" = 0:0 ] || return 0
  done
  read -r mode group < <(stat -c '%a %g' .)
  if ((0$mode & 02)) || { ((0$mode & 020)) && [ "$group" = "${1#*:}" ]; }; then owner=${1:-0:0}; fi
}

# Makes the file $1. What is made later is newer than it.
mark_time() {
  : >|"$1"
  until [ "$1.later" -nt "$1" ]; do : >|"$1.later"; done
  rm -f "$1.later"
}

# Gives what root has made since the file $1 in the work tree and its git directories to the owner of its directory, or to that of the tree
# where that is root, so that code which runs as the user $2 can change it and write beside it. No link is followed, neither on the way to a file
# nor at its end.
hand_over() {
  local owner path parent places=()
  local -A known=() given=() owners=()
  find_owner "$2"
  for path in "$(git rev-parse --show-toplevel)" "$(git rev-parse --git-dir)" "$(git rev-parse --git-common-dir)"; do
    places+=("$(cd -- "${path:-.}" && pwd -P)") || return
  done
  # A directory comes before what is in it.
  while IFS= read -r -d '' path; do
    parent=${path%/*}
    parent=${parent:-/}
    if [ -z "${known[$parent]-}" ]; then
      known[$parent]=$owner
      [ -O "$parent" ] || known[$parent]=$(stat -c %u:%g -- "$parent")
    fi
    known[$path]=${known[$parent]} given[$path]=${known[$parent]} owners[${known[$parent]}]=1
  done < <(find "${places[@]}" -xdev -user 0 -cnewer "$1" -print0)
  unset 'owners[0:0]'
  for owner in "${!owners[@]}"; do
    for path in "${!given[@]}"; do
      [ "${given[$path]}" != "$owner" ] || printf '%s\0' "$path"
    done | xargs -0 chown -h "$owner" -- || return
  done
}
