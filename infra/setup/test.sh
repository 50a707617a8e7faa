#!/usr/bin/env bash
# Runs lint, type check and tests, with Redis and Docker running. At the end it stops the services that it started, and no others.
#   test.sh quick|all|changed
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly python=.venv/bin/python

export DOCKER_CONTEXT=default # whatever the user's settings say

services=$(mktemp) suite='' types=''
# shellcheck disable=SC2086 # one word for each service
stop_services() {
    local started
    started=$(sed -n 's/^\(.*\): started .*/\1/p' "$services")
    rm -f "$services"
    [ -z "$started" ] || "$python" -m infra.services down $started >/dev/null
}
# end STATUS [SIGNAL]: the suite has heard Ctrl-C by itself and ends what its tests have begun.
end() {
    trap '' INT TERM
    [ -z "$types" ] || kill "$types" 2>/dev/null || true
    [ -z "$suite" ] || { [ -z "${2:-}" ] || kill "-$2" "$suite" 2>/dev/null || true; }
    [ -z "$suite" ] || wait "$suite" || true
    exit "$1"
}
trap stop_services EXIT
trap 'end 130' INT
trap 'end 143 TERM' TERM

bash infra/setup/setup.sh tests
"$python" -m infra.services up | tee "$services"
"$python" -m infra.images.build task-base
bash infra/setup/lint.sh lint
# Beside the tests, which leave a fifth of two cores idle.
bash infra/setup/lint.sh types &
types=$!
setpriv --pdeathsig KILL "$python" -m tests.suite "$1" &
suite=$!
failed=
wait "$suite" || failed=yes
suite=
wait "$types" || {
    echo "the type check found errors, see above" >&2
    failed=yes
}
[ -z "$failed" ] || exit 1
