"""Git inside a container, deaf to whatever configuration the image or the agent left about."""

# No configuration but the repository's own, and of that nothing that starts a program.
GIT = """
git() {
  GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_ATTR_NOSYSTEM=1 GIT_TERMINAL_PROMPT=0 command git \\
    -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.pager=cat \\
    -c core.attributesFile=/dev/null -c core.excludesFile=/dev/null -c core.autocrlf=false "$@"
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
