# shellcheck shell=bash
# The work tree's difference to the commit START, read with a git directory of ours: the repository's own index, configuration, attributes,
# replaced objects and references have no part in it, so nothing there hides a file or starts a program; only files that are not there are left
# out where the index says that they need not be. It lends its objects and, unless
# somebody has touched it since the second SINCE, its file info/exclude, because an image's maker may have left files that it names. The text
# of git.sh goes before this.
own=/swerve-git/tree

# Sets `top` to the work tree's root and `exclude` to a file of ignored paths, and makes our git directory.
make_own_git() {
  local folder common
  top=$(pwd -P)
  until [ -e "$top/.git" ] || [ -z "$top" ]; do top=${top%/*}; done
  folder=$top/.git
  if [ -f "$folder" ]; then
    folder=$(sed -n 's/^gitdir: //p' "$folder")
    case $folder in /*) ;; *) folder=$top/$folder ;; esac
  fi
  if [ -f "$folder/commondir" ]; then
    common=$(cat "$folder/commondir")
    case $common in /*) folder=$common ;; *) folder=$folder/$common ;; esac
  fi
  rm -rf "$own"
  mkdir -p "$own/objects/info" "$own/refs" && cd "${top:-/}" || return
  echo "$folder/objects" >"$own/objects/info/alternates"
  echo 'ref: refs/heads/none' >"$own/HEAD"
  # A hash of SHA-256 has 64 digits.
  [ ${#START} != 64 ] || printf '[core]\n\trepositoryformatversion = 1\n[extensions]\n\tobjectformat = sha256\n' >"$own/config"
  exclude=$folder/info/exclude kinds=MT
  # Files that the image's maker had it ignore are then left out one by one.
  [ "$(stat -c %Z "$exclude")" -le "$SINCE" ] || exclude=/dev/null kinds=AMT
  own_git read-tree "$START" && leave_out_absent
}

# A sparse checkout has no files for some paths of the index, which are no removals.
leave_out_absent() {
  local entry LC_ALL=C
  [ "$(git config --bool core.sparseCheckout)" = true ] || return 0
  git ls-files -z -t | while IFS= read -r -d '' entry; do
    [[ $entry != 'S '* || -e ${entry#S } || -L ${entry#S } ]] || printf '%s\0' "${entry#S }"
  done | sort -z | comm -z -12 - <(own_git ls-files -z | sort -z) | own_git update-index -z --skip-worktree --stdin
  return 0
}

own_git() {
  GIT_DIR=$own GIT_WORK_TREE=${top:-/} GIT_INDEX_FILE=$own/index GIT_NO_REPLACE_OBJECTS=1 \
    git -c core.excludesFile="$exclude" "$@"
}

# Takes files of the kinds of change `kinds` back out of the index's difference if nobody has touched them since then: git finds a difference
# between a file and its own object where the repository's attributes, filters or settings change what is stored, as those of Git LFS do.
leave_out_untouched() {
  local path paths=() some times untouched first number
  while IFS= read -r -d '' path; do paths+=("$path"); done < <(own_git diff --cached --name-only -z --no-renames --diff-filter="$kinds" "$START")
  for ((first = 0; first < ${#paths[@]}; first += 500)); do
    some=("${paths[@]:first:500}") times=() untouched=()
    while IFS= read -r path; do times+=("$path"); done < <(stat -c %Z -- "${some[@]}")
    [ ${#some[@]} = ${#times[@]} ] || continue
    for number in "${!some[@]}"; do
      [ "${times[number]}" -ge "$SINCE" ] || untouched+=("${some[number]}")
    done
    [ ${#untouched[@]} = 0 ] || own_git --literal-pathspecs reset -q "$START" -- "${untouched[@]}"
  done
}

# Prints the difference as a patch, with new files but without ignored ones.
print_difference() {
  make_own_git || exit 1
  own_git add --all --ignore-errors
  leave_out_untouched
  own_git diff --cached --binary --no-color --no-ext-diff --no-textconv --no-renames --src-prefix=a/ --dst-prefix=b/ "$START" >&3
} 3>&1 >/dev/null 2>&1

# Ends with 70 if the file $1, a printed patch, is empty although HEAD has moved from START to other files, and with 71 if git cannot apply it
# to START, or if it makes a file that was there then, though ignored.
check_printed() {
  local path
  if [ ! -s "$1" ]; then
    [ "$(git rev-parse -q --verify 'HEAD^{tree}' || git rev-parse "$START^{tree}")" = "$(git rev-parse "$START^{tree}")" ] || exit 70
    exit 0
  fi
  make_own_git && own_git apply --cached "$1" || exit 71
  while IFS= read -r -d '' path; do
    [ ! -e "$path" ] || [ "$(stat -c %Z -- "$path")" -ge "$SINCE" ] || exit 71
  done < <(own_git diff --cached --name-only -z --no-renames --diff-filter=A "$START")
} >/dev/null 2>&1
