# shellcheck shell=bash
# shellcheck disable=SC2154 # task_paths.sh, whose text goes before this, sets the variables
# Prints the leaks of the task's answer in a container, one a line: "swerve-leak", its kind and its detail, with tabs between.
#
# Most images are small and clean, which `plainly_clean` detects with four processes: the objects that HEAD and the index need are
# among those that exist, so if their numbers are equal, no other object exists. It may fail for a clean repository.
export GIT_NO_REPLACE_OBJECTS=1 GIT_OPTIONAL_LOCKS=0 LC_ALL=C
where='' found=''
say() {  # reports one leak of kind $1 with detail $2
  printf 'swerve-leak\t%s\t%s\n' "$1" "$2${where:+ in $where}"
  found=1
}
list() {  # reports the lines of stdin as one leak of kind $1
  local lines
  mapfile -t lines
  [ ${#lines[@]} -eq 0 ] || say "$1" "${#lines[@]}: ${lines[*]:0:4}"
}
settle() { [ "$first_only" ] && [ "$found" ] && exit 0; }

names() {  # reports remotes, refs outside the history of HEAD, other worktrees, and unexpected files of git
  list remote < <(git config --name-only --get-regexp '^remote\..*url$')
  list ref < <(comm -23 <(git for-each-ref --format='%(refname)' | sort) \
    <(git for-each-ref --format='%(refname)' --merged HEAD | sort))
  list worktree < <(worktrees)
  list 'in the git directory' < <(strangers "$(folder_of --git-common-dir)"
    git count-objects -v 2>&1 >/dev/null | sed 's/^warning: //')
}
strangers() {  # prints files in git directory $1 that git does not normally have there, such as those of an unfinished merge
  local path
  for path in "$1"/*; do
    case ${path##*/} in
      HEAD | config | config.worktree | description | index | sharedindex.* | info | objects | refs | packed-refs) ;;
      hooks | logs | branches | shallow | modules | worktrees | COMMIT_EDITMSG | *_HEAD) ;;
      *) [ ! -e "$path" ] || printf '%s\n' "$path" ;;
    esac
  done
}
objects() {  # reports objects that neither the history of HEAD nor the index needs, and ids of such objects in logs
  local common
  common=$(folder_of --git-common-dir) || exit 1
  # shellcheck disable=SC2046 # one word or none
  git for-each-ref --format='%(objectname)' --merged HEAD |
    git rev-list --objects --indexed-objects $(absences) --stdin HEAD >"$scratch/walk" || exit 1
  cut -d' ' -f1 "$scratch/walk" | sort -u >"$scratch/reachable"
  git cat-file --batch-all-objects --batch-check='%(objectname)' | sort -u >"$scratch/all" || exit 1
  list 'unreachable object' < <(comm -13 "$scratch/reachable" "$scratch/all" |
    git cat-file --batch-check='%(objecttype) %(objectname)')
  list 'reflog or head' < <({ cat "$common"/*_HEAD "$common"/worktrees/*/*HEAD "$common"/worktrees/*/logs/HEAD
    find "$common/logs" -type f -exec cat {} +; } 2>/dev/null | grep -oE '[0-9a-f]{40,64}' |
    grep -v '^0*$' | sort -u | comm -13 "$scratch/reachable" -)
}
past() {
  local ahead
  if [ "$cut" ]; then
    [ "$(git rev-list --count HEAD)" = 1 ] || say history "before the setup patch"
  elif in_history HEAD; then
    say history "hidden paths"
  elif is_ancestor "$base" HEAD; then
    ahead=$(git rev-list --count "$base..HEAD") || exit 1
    [ "$ahead" -le 1 ] || say history "$ahead commits after the base"
  fi
}
others() {  # reports leaks of the repositories in this one
  local top used=() folder
  top=$(pwd -P)
  while IFS= read -r -d '' folder; do
    { cd -- "$top/$folder" && is_repository; } || continue
    used+=("$(folder_of --git-common-dir)")
    where=${folder#./}
    names
    objects
  done < <(cd "$top" && nested)
  where=
  cd -- "$top" || exit 1
  list 'unused module' < <(comm -13 <(printf '%s\n' "${used[@]}" | sort) \
    <(modules "$(folder_of --git-common-dir)" | sort))
}

plainly_clean() {
  local key number all=0 walk file text
  [ -d .git ] && [ ! "$cut" ] && [ ${#inside[@]} -eq 0 ] || return
  [ ! -e .git/worktrees ] && [ ! -e .git/modules ] && [ ! -e .git/objects/info/alternates ] || return
  [[ $(<.git/config) != *'[remote '* ]] && [ ! "$(strangers .git)" ] || return
  while read -r key number; do
    case $key in count: | in-pack: | garbage:) all=$((all + number)) ;; esac
  done < <(git count-objects -v)
  [ "$all" -gt 0 ] && [ "$all" -le 5000 ] || return
  mapfile -t walk < <(git rev-list --objects --indexed-objects HEAD)
  [ ${#walk[@]} -eq "$all" ] && [ "${walk[0]}" = "${base:-${walk[0]}}" ] || return
  shopt -s globstar nullglob
  for file in .git/*_HEAD .git/logs/**; do
    [ ! -f "$file" ] || text+=" "$(<"$file")
  done
  text=${text//[!0-9a-f]/ }
  for word in ${text//0000000000000000000000000000000000000000/}; do
    [ ${#word} -lt 40 ] || [[ " ${walk[*]} " = *" $word "* ]] || return
  done
  [ "$(find . -name .git -prune)" = ./.git ] && [ ! "$(git status --porcelain)" ]
}

for path in "${hidden[@]}"; do
  { [ -e "$path" ] || [ -L "$path" ]; } && say 'hidden path' "$path"
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
list uncommitted < <(git status --porcelain --ignore-submodules=dirty)
exit 0
