#!/usr/bin/env bash
# Runs lint, type check and tests, with Redis and Docker running. At the end it stops the services that it started, and no others.
#   test.sh quick|all
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly python=.venv/bin/python

started=
# shellcheck disable=SC2086 # one word for each service
stop_services() { [ -z "$started" ] || "$python" -m infra.services down $started >/dev/null; }
trap stop_services EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

bash infra/setup/setup.sh tests
failed=
services=$("$python" -m infra.services up) || failed=yes
echo "$services"
started=$(sed -n 's/^\(.*\): started .*/\1/p' <<<"$services")
[ -z "$failed" ] || exit 1
"$python" -m infra.images.build task-base
bash infra/setup/lint.sh lint
# Beside the tests, which leave a fifth of two cores idle.
bash infra/setup/lint.sh types &
types=$!
setpriv --pdeathsig KILL "$python" -m tests.suite "$1" || failed=yes
wait "$types" || {
    echo "the type check found errors, see above" >&2
    failed=yes
}
[ -z "$failed" ] || exit 1
