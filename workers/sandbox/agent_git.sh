# shellcheck shell=bash
# Gives the commands of an agent a git whose differences can be applied: writes CONFIG, which GIT_CONFIG_GLOBAL names, from what the image has
# for the whole system and for its user. What changes what a difference looks like, or runs a program, is left out, and so are includes, whose
# content is listed in their place. The repository's own configuration stays.
is_left_out() {
  case ${1,,} in
    diff.* | color.* | pager.* | format.* | include.* | includeif.* | trace2.* | gpg.* | safe.*) ;;
    interactive.difffilter | log.showsignature | commit.gpgsign | tag.gpgsign | push.gpgsign | init.templatedir) ;;
    core.pager | core.editor | core.hookspath | core.fsmonitor | core.attributesfile | core.sshcommand | core.askpass | core.alternaterefscommand) ;;
    core.autocrlf | core.eol | core.safecrlf | core.quotepath | core.abbrev | core.filemode | core.symlinks | core.ignorecase) ;;
    core.precomposeunicode | core.worktree | core.bare | core.checkstat | core.trustctime) ;;
    *) return 1 ;;
  esac
}
list() { [ ! -e "$1" ] || command git config --file "$1" --includes --list -z; }
configure_git() {
  local entry key value version major minor
  command -v git >/dev/null || return 0
  # shellcheck disable=SC2153 # it is set where this is sent
  mkdir -p "${CONFIG%/*}" && : >"$CONFIG" || return 0
  while IFS= read -r -d '' entry; do
    key=${entry%%$'\n'*} value=true
    is_left_out "$key" && continue
    [ "$key" = "$entry" ] || value=${entry#*$'\n'}
    command git config --file "$CONFIG" --add "$key" "$value"
  done < <(
    command git config --system --includes --list -z
    list "${XDG_CONFIG_HOME:-$HOME/.config}/git/config"
    list ~/.gitconfig
  )
  printf '[safe]\n\tdirectory = *\n[core]\n\tattributesFile = /dev/null\n' >>"$CONFIG"
  # Before 2.32 git knows no GIT_CONFIG_GLOBAL.
  version=$(command git --version) && IFS=. read -r major minor _ <<<"${version#git version }"
  ((major * 1000 + minor >= 2032)) && return
  rm -f "${XDG_CONFIG_HOME:-$HOME/.config}/git/config" && cp "$CONFIG" ~/.gitconfig
}
configure_git >/dev/null 2>&1
