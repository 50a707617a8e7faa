# shellcheck shell=bash
# The work tree's difference to the commit START, read with a git directory of ours: the repository's own index, configuration, attributes,
# replaced objects and references have no part in it, so nothing there hides a file or starts a program. It lends its objects and, unless
# somebody has touched it since the second SINCE, its file info/exclude, because an image's maker may have left files that it names. The text
# of git.sh goes before this.
own=/swerve-git/tree

# Sets `top` to the work tree's root and `exclude` to a file of ignored paths, and makes our git directory.
make_own_git() {
  local folder
  top=$PWD
  until [ -e "$top/.git" ] || [ -z "$top" ]; do top=${top%/*}; done
  folder=$top/.git
  if [ -f "$folder" ]; then
    folder=$(sed -n 's/^gitdir: //p' "$folder")
    case $folder in /*) ;; *) folder=$top/$folder ;; esac
  fi
  if [ -f "$folder/commondir" ]; then folder=$folder/$(cat "$folder/commondir"); fi
  rm -rf "$own"
  mkdir -p "$own/objects/info" "$own/refs" && cd "${top:-/}" || return
  echo "$folder/objects" >"$own/objects/info/alternates"
  echo 'ref: refs/heads/none' >"$own/HEAD"
  # A hash of SHA-256 has 64 digits.
  [ ${#START} != 64 ] || printf '[core]\n\trepositoryformatversion = 1\n[extensions]\n\tobjectformat = sha256\n' >"$own/config"
  exclude=$folder/info/exclude
  [ "$(stat -c %Z "$exclude")" -le "$SINCE" ] || exclude=/dev/null
  own_git read-tree "$START"
}

own_git() {
  GIT_DIR=$own GIT_WORK_TREE=${top:-/} GIT_INDEX_FILE=$own/index GIT_NO_REPLACE_OBJECTS=1 \
    git -c core.excludesFile="$exclude" "$@"
}

# Takes files back into the index that nobody has touched since then: git finds a difference between a file and its own object
# where the repository's attributes or filters change what is stored, as those of Git LFS do.
leave_out_untouched() {
  local path paths=() times=() untouched=() number
  while IFS= read -r -d '' path; do paths+=("$path"); done < <(own_git diff --cached --name-only -z --no-renames --diff-filter=M "$START")
  [ ${#paths[@]} != 0 ] || return
  while IFS= read -r path; do times+=("$path"); done < <(stat -c %Z -- "${paths[@]}")
  [ ${#paths[@]} = ${#times[@]} ] || return
  for number in "${!paths[@]}"; do
    [ "${times[number]}" -ge "$SINCE" ] || untouched+=("${paths[number]}")
  done
  [ ${#untouched[@]} = 0 ] || own_git --literal-pathspecs reset -q "$START" -- "${untouched[@]}"
}

# Prints the difference as a patch, with new files but without ignored ones.
print_difference() {
  make_own_git || exit 1
  own_git add --all --ignore-errors
  leave_out_untouched
  own_git diff --cached --binary --no-color --no-ext-diff --no-textconv --no-renames --src-prefix=a/ --dst-prefix=b/ "$START" >&3
} 3>&1 >/dev/null 2>&1

# Ends with 70 if the file $1, a printed patch, is empty although HEAD has moved from START, and with 71 if git cannot apply it to START.
check_printed() {
  local head
  if [ -s "$1" ]; then
    make_own_git && own_git apply --cached --check "$1" || exit 71
  else
    head=$(git rev-parse -q --verify HEAD)
    [ -z "$head" ] || [ "$head" = "$START" ] || exit 70
  fi
} >/dev/null 2>&1
