#!/usr/bin/env bash
# Compiles process 1 of the sandboxes (workers/sandbox/init.c, connections.c, starvation.c) for this machine's processor:
#   init.sh OUT
# The binary is static and linked against musl, so that it is small and runs in any image.
set -euo pipefail
cd "$(dirname "$0")/../.."

mkdir -p "$(dirname "$1")"
musl-gcc -static -Os -s -Wall -Wextra -Wno-clobbered -o "$1" workers/sandbox/init.c workers/sandbox/connections.c \
    workers/sandbox/starvation.c
