#!/usr/bin/env bash
# Lint and type check. The type check, which takes a minute, is left out where its input is what it last found no error in.
#   lint.sh [lint|types]        one of them only
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly python=.venv/bin/python
readonly stamp=.venv/.types-stamp

began=$SECONDS
if [ "${1:-lint}" = lint ]; then
    "$python" -m ruff check --quiet .
    echo "lint: $((SECONDS - began)) s"
fi
[ "${1:-types}" = types ] || exit 0

# Everything that it reads: our code, and the packages by their versions.
input=$({
    find infra pipeline trainer workers swerve.py pyproject.toml constraints.txt \( -name '*.py' -o -name '*.pyi' -o -name '*.toml' -o -name '*.txt' \) -type f -print0 |
        sort -z | xargs -0 sha256sum
    ls .venv/lib/python3*/site-packages
} | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$input" ]; then
    echo "type check: nothing changed since it last found no error"
    exit 0
fi
began=$SECONDS
"$python" -m basedpyright
printf '%s\n' "$input" >"$stamp"
echo "type check: $((SECONDS - began)) s"
