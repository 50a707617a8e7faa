#!/usr/bin/env bash
# Runs lint, type check and the tests of the files that changed since main. It takes minutes; `make test` runs all tests.
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly python=.venv/bin/python

"$python" -m ruff check --quiet .
"$python" -m basedpyright
mapfile -t tests < <("$python" infra/setup/touched.py)
if [ "${#tests[@]}" -eq 0 ]; then
    echo "no test belongs to what changed since main"
    exit 0
fi
printf 'the tests of %d files\n' "${#tests[@]}"
"$python" -m infra.services up
"$python" -m pytest --maxfail=10 -q -m "not gpu and not slow" --numprocesses 2 --dist loadscope "${tests[@]}"
