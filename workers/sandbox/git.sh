# shellcheck shell=bash
# Git in a container, which ignores configuration that the image or the agent may have left: it reads only the repository's own
# configuration, and of that nothing that starts a program.
git() {
  GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_ATTR_NOSYSTEM=1 GIT_TERMINAL_PROMPT=0 command git \
    -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.pager=cat \
    -c core.attributesFile=/dev/null -c core.excludesFile=/dev/null -c core.autocrlf=false "$@"
}
