"""Git commands for use inside a container. They ignore configuration that the image or the agent may have left."""

# Reads only the repository's own configuration, and of that nothing that starts a program.
GIT = """
git() {
  GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_ATTR_NOSYSTEM=1 GIT_TERMINAL_PROMPT=0 command git \\
    -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.pager=cat \\
    -c core.attributesFile=/dev/null -c core.excludesFile=/dev/null -c core.autocrlf=false "$@"
}
"""

# Goes after GIT. `stage_all` makes the index what `diff_since` would compare. `commit_tree` prints a commit of tree $1 with the
# parents given as `-p`. The commit is the same in every container, because its author is fixed and its time is HEAD's.
COMMIT_TREE = """
stage_all() {
  rm -f "$(git rev-parse --git-dir)/index.lock"
  git add --all --ignore-errors >/dev/null 2>&1
  return 0
}
commit_tree() {
  local time
  time=$(git log -1 --format=%ct HEAD) || return
  GIT_AUTHOR_NAME=swerve GIT_AUTHOR_EMAIL=swerve@localhost GIT_AUTHOR_DATE="$time +0000" \\
    GIT_COMMITTER_NAME=swerve GIT_COMMITTER_EMAIL=swerve@localhost GIT_COMMITTER_DATE="$time +0000" \\
    git commit-tree "$@" -m base
}
"""

HEAD = GIT + "git rev-parse --verify HEAD 2>/dev/null"


def diff_since(commit: str) -> str:
    """The command that prints the workdir's changes since `commit`, new files included, as a git patch."""
    return f"""{GIT}
rm -f .git/index.lock
git add --all --ignore-errors >/dev/null 2>&1
git diff --cached --binary --no-color --no-ext-diff --no-textconv --no-renames \\
  --src-prefix=a/ --dst-prefix=b/ {commit or "HEAD"} 2>/dev/null
"""
