# shellcheck shell=bash
# shellcheck disable=SC2154 # task_paths.sh, whose text goes before this, sets the variables
# Removes what find.sh finds. Status 0 means that it completed; find.sh must tell whether anything is left.
# Git directories are not purged but rebuilt from one commit and its history, so that even unexpected kinds of leaks are removed.
# Branch, index, configuration, hooks, excludes and the tags in that history are kept.

# Prints the commit that the agent starts from: HEAD itself if that leaks nothing. It includes uncommitted files of the image,
# because the grader's container has them too and they are not the agent's work. Several commits after the base become one.
start() {
  local tree parent=HEAD
  tree=$(git write-tree) || return
  if is_ancestor "$base" HEAD; then parent=$(git rev-parse "$base^{commit}"); fi
  if [ "$cut" ] || in_history "$parent"; then
    commit_tree "$tree"
  elif [ "$tree" != "$(git rev-parse 'HEAD^{tree}')" ] || in_history HEAD ||
    [ "$(git rev-list --count "$parent..HEAD")" -gt 1 ]; then
    commit_tree "$tree" -p "$parent"
  else
    git rev-parse HEAD
  fi
}

without_remotes() {  # removes the sections about other repositories from configuration file $1
  git config --file "$1" --name-only --list |
    sed -nE 's/^((remote|branch|url|http|credential)(\..*)?)\.[^.]+$/\1/p' | sort -u |
    while IFS= read -r section; do git config --file "$1" --remove-section "$section" || return; done
}
copy() {  # copies everything but objects and refs from $1 and, for a linked worktree, its own directory $2, to $3
  local name
  for name in config info hooks; do
    [ ! -e "$1/$name" ] || cp -a "$1/$name" "$3/" || return
  done
  for name in "$2"/index "$2"/sharedindex.* "$2"/config.worktree; do
    [ ! -e "$name" ] || cp -a "$name" "$3/" || return
  done
  rm -f "$3/info/refs"
  [ ! -d "$1/modules" ] || mv "$1/modules" "$3/" || return
  without_remotes "$3/config"
}
stores() {  # prints the object directories elsewhere that git directory $1 borrows from
  [ ! -e "$1/objects/info/alternates" ] || (cd -- "$1/objects" &&
    grep -v '^#' info/alternates | while IFS= read -r path; do (cd -- "$path" && pwd -P); done)
}
fill() {  # fills the new git directory $1 with commit $2 from the old directory $3
  local branch pack
  mkdir -p "$1"/objects/pack "$1"/objects/info "$1"/refs/heads "$1"/refs/tags || return
  git for-each-ref --format='%(objectname) %(refname)' --merged "$2" refs/tags >"$1/packed-refs"
  # shellcheck disable=SC2046 # one word or none
  { echo "$2"; cut -d' ' -f1 "$1/packed-refs"; } |
    git pack-objects -q --revs --indexed-objects $(absences) --delta-base-offset "$1/objects/pack/pack"       >/dev/null || return
  if [ "$(absences)" ]; then
    for pack in "$1"/objects/pack/*.pack; do touch "${pack%.pack}.promisor"; done
    git config --file "$1/config" extensions.partialclone nobody
  fi
  branch=$(git symbolic-ref -q HEAD)
  case $branch in
    refs/heads/*)
      mkdir -p "$(dirname "$1/$branch")" && echo "$2" >"$1/$branch" && echo "ref: $branch" >"$1/HEAD" ;;
    *) echo "$2" >"$1/HEAD" ;;
  esac || return
  if [ -s "$3/shallow" ]; then
    git --git-dir="$1" cat-file --batch-check='%(objectname)' <"$3/shallow" | sed '/missing/d' >"$1/shallow"
    [ -s "$1/shallow" ] || rm -f "$1/shallow"
  fi
}
remove() {  # removes the directories on stdin, except those that contain this one
  local path
  while IFS= read -r path; do
    case $(pwd -P)/ in "$path"/*) ;; *) rm -rf -- "$path" ;; esac
  done
}
anew() {  # rebuilds the repository of this work tree, with commit $1 as its HEAD
  local own common owner place new elsewhere path
  own=$(folder_of --git-dir) && common=$(folder_of --git-common-dir) || return
  place=$common elsewhere=$(worktrees; stores "$common")
  for path in "$common"/worktrees/*; do
    [ "$path" = "$own" ] || rm -rf -- "$path"  # otherwise the objects that its index needs would be packed, too
  done
  if [ "$own" != "$common" ]; then
    place=$(pwd -P)/.git
    rm -f "$common/index"
    git config --file "$common/config" --unset core.worktree
    git config --file "$common/config" core.bare false
  fi
  new=$place.swerve
  rm -rf "$new" && mkdir "$new" && copy "$common" "$own" "$new" && fill "$new" "$1" "$common" || return
  owner=$(stat -c %u:%g "$common")
  rm -rf "$common" "$place" && mv "$new" "$place" || return
  [ -z "$elsewhere" ] || remove <<<"$elsewhere"
  git update-index -q --refresh
  chown -R "$owner" "$place"
}

export GIT_NO_REPLACE_OBJECTS=1 LC_ALL=C
[ ${#hidden[@]} -eq 0 ] || rm -rf -- "${hidden[@]}"
bytecode | while IFS= read -r path; do rm -f -- "$path"; done
in_repository || exit 0
stage_all
commit=$(start) || exit 1
to_root || exit 1
top=$(pwd -P)
common=$(folder_of --git-common-dir)
used=()
while IFS= read -r -d '' folder; do
  { cd -- "$top/$folder" && is_repository; } || continue
  [ "$(folder_of --git-common-dir)" != "$common" ] || continue
  anew "$(git rev-parse HEAD)" || exit 1
  used+=("$(folder_of --git-common-dir)")
done < <(nested)
cd -- "$top" || exit 1
comm -13 <(printf '%s\n' "${used[@]}" | sort) <(modules "$common" | sort) |
  while IFS= read -r path; do rm -rf -- "$path"; done
anew "$commit" && [ "$(git rev-parse --verify HEAD)" = "$commit" ]
