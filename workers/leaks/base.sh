# shellcheck shell=bash
# shellcheck disable=SC2154 # task_paths.sh, whose text goes before this, sets the variables
# Prints the work tree's root, the git directory, `git ls-tree` of the base commit, nothing, and the history; a NUL after each.
git rev-parse -q --verify HEAD >/dev/null 2>&1 || exit 0
git cat-file -e "$base^{commit}" 2>/dev/null || base=HEAD
printf '%s\0' "$(git rev-parse --show-toplevel)" "$(folder_of --git-common-dir)"
git ls-tree -r -z --full-tree "$base" && printf '\0' && git rev-list HEAD "$base"
