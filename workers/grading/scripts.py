"""What runs in the grading container before the tests: the patch goes in, what it must not touch comes back,
hidden tests follow.

The scripts are files in GRADE_DIR, outside the repository, and say how they ended by their exit status alone:
nothing of the patch can pass for it. No code of the patch runs before the eval script does. Statuses are kept
off the ones shells and git use themselves.
"""

from workers.grading.runner import CONTROL_NAMES, SETTINGS_NAMES
from workers.sandbox.git import GIT

GRADE_DIR = "/swerve-grade"
PATCH = f"{GRADE_DIR}/model.diff"
TESTS = f"{GRADE_DIR}/tests.diff"
EVAL = f"{GRADE_DIR}/eval.sh"
PROTECTED = f"{GRADE_DIR}/protected"  # repository-relative paths, each with a NUL after it
TAMPERED = f"{GRADE_DIR}/tampered"  # the same of settings files that a patch may not keep

APPLIED_BY = {70: "git apply", 71: "git apply --3way", 72: "patch --fuzz"}
DOES_NOT_APPLY = 73
TESTS_DO_NOT_APPLY = 74


def _find(names: tuple[str, ...]) -> str:
    either = " -o ".join(f"-name '{name}'" for name in names)
    return f"find . -path ./.git -prune -o \\( {either} \\) \\( -type f -o -type l \\) -print0"


# Keeps a copy of the files that govern the test runner, as the image has them.
SAVE = f"""
mkdir -p {GRADE_DIR}/control {GRADE_DIR}/settings &&
{_find(CONTROL_NAMES)} | xargs -0 -r cp -a --parents -t {GRADE_DIR}/control &&
{_find(SETTINGS_NAMES)} | xargs -0 -r cp -a --parents -t {GRADE_DIR}/settings
"""

# A path inside .git is refused by git apply, but not by patch.
APPLY = f"""{GIT}
chmod 700 {GRADE_DIR}
undo() {{ git reset -q --hard; git clean -qfd; }}
git apply --whitespace=nowarn {PATCH} && exit 70
git update-index -q --refresh
git apply --3way --whitespace=nowarn {PATCH} && exit 71
undo
header='^(---|\\+\\+\\+|diff|Index:|rename|copy) .*\\.git(/|"|[[:space:]]|$)'
grep -aqE "$header" {PATCH} ||
  {{ patch --batch --forward --fuzz=5 --no-backup-if-mismatch -u -p1 -i {PATCH} && exit 72; }}
undo
exit {DOES_NOT_APPLY}
"""

# One line for each settings file that differs from its copy: path, old and new content, base64, "-" for an
# absent file.
CHANGED_SETTINGS = f"""
show() {{ if [ -e "$1" ]; then base64 -w 0 "$1"; else printf -; fi; }}
{{ {_find(SETTINGS_NAMES)}; cd {GRADE_DIR}/settings && find . -type f -print0; }} | sort -zu |
while IFS= read -r -d '' path; do
  cmp -s "$path" {GRADE_DIR}/settings/"$path" && continue
  echo "$(printf %s "$path" | base64 -w 0) $(show {GRADE_DIR}/settings/"$path") $(show "$path")"
done
"""

# What lies in a restored path's way, a file or link where a directory was, goes first.
_CLEAR_WAY = """
clear_way() {
  parent=$(dirname -- "$1")
  [ "$parent" = . ] && return
  clear_way "$parent"
  if [ -L "$parent" ] || { [ -e "$parent" ] && [ ! -d "$parent" ]; }; then rm -f -- "$parent"; fi
  mkdir -p -- "$parent"
}
"""

# Puts the copies back and removes what was added.
RESTORE_CONTROL = f"""{_CLEAR_WAY}
{_find(CONTROL_NAMES)} | xargs -0 -r rm -f --
(cd {GRADE_DIR}/control && find . \\( -type f -o -type l \\) -print0) | while IFS= read -r -d '' path; do
  clear_way "$path"
  rm -rf -- "$path"
  cp -a {GRADE_DIR}/control/"$path" "$path" || exit 1
done
[ -e {TAMPERED} ] || exit 0
while IFS= read -r -d '' path; do
  rm -rf -- "$path"
  [ -e {GRADE_DIR}/settings/"$path" ] || continue
  clear_way "$path"
  cp -a {GRADE_DIR}/settings/"$path" "$path"
done <{TAMPERED}
"""

# $1 base commit, or "" for the head; $2 the head at the start. Files of the hidden tests are protected
# whether listed or not.
RESTORE_PROTECTED = f"""{GIT}{_CLEAR_WAY}
base=$1
git cat-file -e "$base^{{commit}}" 2>/dev/null || base=$2
{{
  cat {PROTECTED}
  [ ! -e {TESTS} ] || git apply --numstat -z {TESTS} | while IFS=$'\\t' read -r -d '' _ _ path; do
    printf '%s\\0' "$path"
  done
}} | while IFS= read -r -d '' path; do
  rm -rf -- "$path"
  git cat-file -e "$base:$path" 2>/dev/null || continue
  clear_way "$path"
  git checkout -q "$base" -- "$path" || exit 1
done || exit 1
[ ! -e {TESTS} ] || git apply --whitespace=nowarn {TESTS} || exit {TESTS_DO_NOT_APPLY}
"""
