# shellcheck shell=bash
# Commits of ours; the text of git.sh goes before this. The commit is the same in every container, because its author is fixed and its
# time is that of HEAD.
stage_all() {  # puts all files that are not ignored into the repository's index
  rm -f "$(git rev-parse --git-dir)/index.lock"
  git add --all --ignore-errors >/dev/null 2>&1
  return 0
}
commit_tree() {  # prints a commit of tree $1 with the parents given as `-p`
  local time
  time=$(git log -1 --format=%ct HEAD) || return
  GIT_AUTHOR_NAME=swerve GIT_AUTHOR_EMAIL=swerve@localhost GIT_AUTHOR_DATE="$time +0000" \
    GIT_COMMITTER_NAME=swerve GIT_COMMITTER_EMAIL=swerve@localhost GIT_COMMITTER_DATE="$time +0000" \
    git commit-tree "$@" -m base
}
