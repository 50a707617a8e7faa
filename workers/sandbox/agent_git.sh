# shellcheck shell=bash
# Makes an agent's git print differences that can be applied: takes out of the image's system-wide and global configuration what changes the
# look of a difference, or starts a program when one is made. The rest stays, and so does all that the repository's own configuration says.
# The files are changed in place, because a variable that names another file would hold for the project's own tests too, which may set a
# HOME of theirs.
is_left_out() {
  case ${1,,} in
    attr.* | color.* | diff.* | format.* | gpg.* | pager.* | submodule.*.ignore | trace2.*) ;;
    commit.gpgsign | init.templatedir | interactive.difffilter | log.showsignature | push.gpgsign | tag.forcesignannotated | tag.gpgsign) ;;
    core.abbrev | core.attributesfile | core.bigfilethreshold | core.checkstat | core.compression | core.fsmonitor | core.fsync*) ;;
    core.hookspath | core.ignorecase | core.ignorestat | core.pager | core.precomposeunicode | core.quotepath) ;;
    core.autocrlf | core.eol | core.filemode | core.safecrlf | core.symlinks | core.trustctime | core.worktree | core.bare) ;;
    *) return 1 ;;
  esac
}

print_entries() { command git config "$@" --includes --show-origin --list -z; }

configure_git() {
  local git folder file origin entry key
  local -A seen
  git=$(type -P git) || return
  folder=${XDG_CONFIG_HOME:-}
  [ -n "$folder" ] || folder=~/.config
  rm -f /etc/gitattributes "${git%/bin/git}/etc/gitattributes" "$folder/git/attributes"
  trust # first, because conditions of includes are asked of the repository
  while IFS= read -r -d '' origin && IFS= read -r -d '' entry; do
    key=${entry%%$'\n'*}
    [[ $origin != file:* || -n ${seen[$origin $key]-} ]] && continue
    seen[$origin $key]=1
    is_left_out "$key" || continue
    # Without this key hooks of the repository would begin to run.
    if [ "$key" = core.hookspath ]; then
      command git config --file "${origin#file:}" --replace-all "$key" /dev/null
    else
      command git config --file "${origin#file:}" --unset-all "$key"
    fi
    [ -O ~ ] || [[ ${origin#file:} != ~/* ]] || chown -h "$(stat -c %u:%g ~)" "${origin#file:}"
  done < <(
    print_entries --system
    for file in "${GIT_CONFIG_GLOBAL:-}" "$folder/git/config" ~/.gitconfig; do
      [ ! -e "$file" ] || print_entries --file "$file"
    done
  )
}
configure_git >/dev/null 2>&1
