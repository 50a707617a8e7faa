#!/usr/bin/env bash
# Makes .venv at the repository's root from constraints.txt, and installs the Debian packages that are missing.
# A second run only compares a stamp, unless one of its input files has changed.
#   setup.sh [tests]        tests: also the programs that only tests need
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly venv=.venv
readonly stamp="$venv/.setup-stamp"
readonly inputs=(constraints.txt pyproject.toml infra/setup/setup.sh infra/setup/extras.py infra/setup/engine.txt infra/setup/no-deps.txt infra/setup/oracles.txt benchmarks/no-deps.txt workers/tasksets/rendering.py
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
    command -v git >/dev/null || missing+=(git)
    command -v curl >/dev/null || missing+=(curl)
    command -v iptables >/dev/null || missing+=(iptables)
    command -v musl-gcc >/dev/null || missing+=(gcc musl-tools)
    if [ "${1:-}" = tests ]; then
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
    as_root apt-get -q -y update >/dev/null
    # Services are started by infra.services where none answers, not by the packages.
    as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
        apt-get -q -y install --no-install-recommends "${missing[@]}" >/dev/null
}

install_packages() {
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet --constraint constraints.txt)
    say "installing Python packages into $venv (some minutes the first time)"
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    # It is installed first and by itself, because pip then prefers a local CPU build to the CUDA one.
    "${pip[@]}" torch==2.13.0
    "$venv/bin/python" infra/setup/extras.py base workers trainer sinks tasksets serving bench dev |
        "${pip[@]}" --requirement /dev/stdin --requirement infra/setup/engine.txt
    "${pip[@]}" --no-deps --requirement infra/setup/no-deps.txt
    "${pip[@]}" --no-deps --requirement benchmarks/no-deps.txt
    # The checkout itself: the command `swerve`, and our packages for users who work in another directory.
    "${pip[@]}" --no-deps --no-build-isolation --editable .
    # Old rows get their eval scripts from a release that cannot be installed beside the one that grades.
    "$venv/bin/python" -m workers.tasksets.rendering
    install_oracles
    bash infra/setup/init.sh "$venv/share/swerve/sandbox-init"
}

# Older releases that tests compare us with, each in a folder of its own: only one release can be in the environment.
install_oracles() {
    local name release folder
    sed 's/ *#.*//; /^$/d; s/==/ /' infra/setup/oracles.txt | while read -r name release; do
        folder="$venv/share/$name/$release"
        rm -rf "$folder"
        "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --target "$folder" "$name==$release" </dev/null
    done
}

fingerprint="$(sha256sum "${inputs[@]}" | sha256sum | cut -c1-64)"
install_missing_programs "${1:-}"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$fingerprint" ]; then
    exit 0
fi
began=$SECONDS
install_packages
printf '%s\n' "$fingerprint" >"$stamp"
say "done in $((SECONDS - began)) s"
