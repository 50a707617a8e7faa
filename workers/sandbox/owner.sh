# shellcheck shell=bash
# The owner of a work tree, whose files root makes for it. The text of git.sh goes before this.

# Sets `owner` to the ids of the work tree's user and group. Where a tree is not of one piece it is the first that is not root: of the
# workdir, or of the git directory, since a builder may have made either as root.
find_owner() {
  local path
  owner=0:0
  [ -O . ] && [ -O .git ] && return
  for path in . "$(git rev-parse --git-dir)"; do
    [ -O "$path" ] || owner=$(stat -c %u:%g -- "$path")
    [ "$owner" = 0:0 ] || return
  done
}

# Makes the file $1. What is made later is newer than it.
mark_time() {
  : >|"$1"
  until [ "$1.later" -nt "$1" ]; do : >|"$1.later"; done
  rm -f "$1.later"
}

# Gives to the owner what root has made since the file $1 in the work tree and its git directories, so that code which runs as that user can
# change it and write beside it. No link is followed, neither on the way to a file nor at its end.
hand_over() {
  local owner places=()
  find_owner
  [ "$owner" != 0:0 ] || return 0
  places=("$(git rev-parse --show-toplevel)" "$(git rev-parse --absolute-git-dir)" "$(cd "$(git rev-parse --git-common-dir)" && pwd -P)")
  find "${places[@]}" -xdev -user 0 -newer "$1" -exec chown -h "$owner" {} +
}
