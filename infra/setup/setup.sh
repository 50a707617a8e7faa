#!/usr/bin/env bash
# Makes .venv at the repository's root from constraints.txt, and installs the Debian packages that are missing.
# A second run only compares stamps, unless one of its input files has changed.
#   setup.sh [run|tests]    run: also what a run starts from, the file system of the base image
#                           tests: that too, and the programs and releases that only tests need
# Debian's packages and the base image need nothing from .venv and are made while that is filled.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PIP_USER=0 # whatever the user's settings say

readonly purpose=${1:-}
readonly venv=.venv
readonly apt_lock=/var/lock/swerve-apt.lock # of the machine: a run that was killed may have left an apt-get that goes on
readonly stamp="$venv/.setup-stamp"
readonly oracles_stamp="$venv/.oracles-stamp"
readonly inputs=(constraints.txt pyproject.toml infra/setup/setup.sh infra/setup/extras.py infra/setup/engine.txt infra/setup/no-deps.txt
    benchmarks/no-deps.txt workers/tasksets/rendering.py
    infra/setup/init.sh workers/sandbox/init.c workers/sandbox/connections.c workers/sandbox/connections.h workers/sandbox/frames.h
    workers/sandbox/starvation.c workers/sandbox/starvation.h)

say() { printf 'setup: %s\n' "$*"; }

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

install_missing_programs() {
    local missing=()
    command -v redis-server >/dev/null || missing+=(redis-server)
    command -v dockerd >/dev/null || missing+=(docker.io)
    command -v docker-registry >/dev/null || missing+=(docker-registry) # for tests
    command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
    [ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || missing+=(debian-archive-keyring) # Ubuntu has none by itself
    command -v git >/dev/null || missing+=(git)
    command -v curl >/dev/null || missing+=(curl)
    command -v iptables >/dev/null || missing+=(iptables)
    python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
    command -v musl-gcc >/dev/null || missing+=(gcc musl-tools)
    if [ "$purpose" = tests ]; then
        # Tests open the pages of a run in it. The package playwright then downloads no browser of its own.
        command -v chromium >/dev/null || missing+=(chromium)
        # Tests check the cluster's files with these; none of them is started as a service.
        command -v systemd-analyze >/dev/null || missing+=(systemd)
        command -v slurmctld >/dev/null || missing+=(slurmctld)
        command -v openssl >/dev/null || missing+=(openssl)
        command -v promtool >/dev/null || missing+=(prometheus)
    fi
    [ ${#missing[@]} -eq 0 ] && return
    command -v apt-get >/dev/null || {
        say "please install ${missing[*]}: this is not a Debian system" >&2
        exit 1
    }
    say "installing ${missing[*]}"
    as_root flock "$apt_lock" apt-get -q -y update >/dev/null
    # Since Debian 13 docker.io is without the command.
    if ! command -v docker >/dev/null && apt-cache show docker-cli >/dev/null 2>&1; then missing+=(docker-cli); fi
    local policy=/usr/sbin/policy-rc.d forbids='' status=0
    # Services are started by infra.services where none answers, not by the packages.
    if [ ! -e "$policy" ]; then
        forbids=yes
        as_root install -m 755 /dev/stdin "$policy" <<<$'#!/bin/sh\nexit 101'
    fi
    as_root flock "$apt_lock" env DEBIAN_FRONTEND=noninteractive \
        apt-get -q -y -o DPkg::Lock::Timeout=600 install --no-install-recommends "${missing[@]}" >/dev/null || status=$?
    [ -z "$forbids" ] || as_root rm -f "$policy"
    return "$status"
}

# install WORD...: by uv, which takes a tenth of pip's time, or by pip where uv does not find what pip is configured to find.
install() {
    local settings=() cert=${PIP_CERT:-} index=${PIP_INDEX_URL:-}
    [ -n "$cert" ] || cert=$("$venv/bin/python" -m pip config get global.cert 2>/dev/null) || true
    [ -n "$index" ] || index=$("$venv/bin/python" -m pip config get global.index-url 2>/dev/null) || true
    [ -z "$cert" ] || settings+=(SSL_CERT_FILE="$cert")
    [ -z "$index" ] || settings+=(UV_DEFAULT_INDEX="$index")
    env "${settings[@]}" "$venv/bin/uv" --no-config pip install --quiet --python "$venv/bin/python" --constraint constraints.txt "$@" ||
        "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --constraint constraints.txt "$@"
}

install_packages() {
    local wanted="$venv/requirements.txt"
    say "installing Python packages into $venv (a minute the first time)"
    # An interrupted one has no pip yet.
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || python3 -m venv --clear "$venv"
    # It is installed first and by itself, because pip then prefers a local CPU build to the CUDA one; uv leaves it as it is.
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --constraint constraints.txt torch==2.13.0 uv
    "$venv/bin/python" infra/setup/extras.py base workers trainer sinks tasksets serving bench dev >"$wanted"
    install --requirement "$wanted" --requirement infra/setup/engine.txt
    install --no-deps --requirement infra/setup/no-deps.txt --requirement benchmarks/no-deps.txt
    # The wheel of swesmith has a package with the name `tests`, which would hide the one of this checkout.
    rm -rf "$venv"/lib/python3*/site-packages/tests
    # The checkout itself: the command `swerve`, and our packages for users who work in another directory.
    install --no-deps --no-build-isolation --editable .
    # Old rows get their eval scripts from a release that cannot be installed beside the one that grades.
    "$venv/bin/python" -m workers.tasksets.rendering
}

# Older releases that tests compare us with, each in a folder of its own: only one release can be in the environment.
install_oracles() {
    local name release folder
    sed 's/ *#.*//; /^$/d; s/==/ /' infra/setup/oracles.txt | while read -r name release; do
        folder="$venv/share/$name/$release"
        rm -rf "$folder"
        # Its own version, not the one of constraints.txt.
        "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --target "$folder" "$name==$release" </dev/null
    done
}

# is_done STAMP FILE...: whether STAMP was written for these files as they are.
is_done() { [ -f "$1" ] && [ "$(cat "$1")" = "$(fingerprint "${@:2}")" ]; }
fingerprint() { sha256sum "$@" | sha256sum | cut -c1-64; }

began=$SECONDS
# One at a time, those included that a killed run has left behind.
mkdir -p "$venv"
exec 9<"$venv"
flock 9
# Without it there is no environment to fill; all else that is missing can wait for the end of that.
if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then install_missing_programs; fi
{
    install_missing_programs
    [ -z "$purpose" ] || python3 -m infra.images.build --prepare task-base
} &
beside=$!
trap 'kill "$beside" 2>/dev/null || true' EXIT
if ! is_done "$stamp" "${inputs[@]}"; then install_packages; fi
wait "$beside"
trap - EXIT
if ! is_done "$stamp" "${inputs[@]}"; then
    bash infra/setup/init.sh "$venv/share/swerve/sandbox-init"
    fingerprint "${inputs[@]}" >"$stamp"
fi
if [ "$purpose" = tests ] && ! is_done "$oracles_stamp" infra/setup/oracles.txt "$stamp"; then
    install_oracles
    fingerprint infra/setup/oracles.txt "$stamp" >"$oracles_stamp"
fi
[ $((SECONDS - began)) -lt 5 ] || say "done in $((SECONDS - began)) s"
