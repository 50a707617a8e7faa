# shellcheck shell=bash
# Git in a container, which ignores configuration that the image or the agent may have left: it reads only the repository's own
# configuration, and of that nothing that starts a program. The repository may belong to anybody, which git before 2.38 believes a file only.
# Nothing is fetched, since a repository may name the program that would do it.
# What this prints, on a full disk, is no part of a difference; and a pipe in the file's place would never end.
{
  [ -d /swerve-git ] || mkdir /swerve-git
  [ ! -e /swerve-git/.gitconfig ] || [ -f /swerve-git/.gitconfig ] || rm -rf /swerve-git/.gitconfig
  printf '[safe]\n\tdirectory = *\n' >|/swerve-git/.gitconfig
} 2>/dev/null
git() {
  HOME=/swerve-git XDG_CONFIG_HOME=/swerve-git GIT_CONFIG_GLOBAL=/swerve-git/.gitconfig \
    GIT_CONFIG_NOSYSTEM=1 GIT_ATTR_NOSYSTEM=1 GIT_TERMINAL_PROMPT=0 GIT_ALLOW_PROTOCOL=none GIT_NO_LAZY_FETCH=1 command git \
    -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.pager=cat \
    -c core.attributesFile=/dev/null -c core.excludesFile=/dev/null -c core.autocrlf=false "$@"
}
