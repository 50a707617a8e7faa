#!/usr/bin/env bash
# Lint, type check and every test, with Redis and Docker up. What was started here is stopped whatever happens.
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly python=.venv/bin/python

stop_services() { "$python" -m infra.services down >/dev/null; }
trap stop_services EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

bash infra/setup/setup.sh tests
"$python" -m infra.services up
"$python" -m infra.images.build task-base
"$python" -m ruff check --quiet .
"$python" -m basedpyright
# Tests that need a CUDA device have their own target, gpu-check.
"$python" -m pytest --maxfail=10 -q -m "not gpu"
