#!/usr/bin/env bash
# Fetches every wheel that our images need into infra/docker/wheels, with this machine's own pip configuration (index, certificates,
# local wheels), and copies process 1 of the sandboxes there. Image builds then need no network. It can be
# skipped where builds can reach an index.
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly python=.venv/bin/python
readonly out=infra/docker/wheels
readonly pip=("$python" -m pip --disable-pip-version-check wheel --quiet --constraint constraints.txt
    --wheel-dir "$out" --find-links "$out")

"${pip[@]}" torch==2.13.0
"$python" infra/setup/extras.py base workers trainer serving |
    "${pip[@]}" --requirement /dev/stdin --requirement infra/setup/engine.txt
# Only Pythons before 3.11.3, such as Debian's in our base image, need this dependency.
"${pip[@]}" async-timeout
"${pip[@]}" --no-deps --requirement infra/setup/no-deps.txt
cp .venv/share/swerve/sandbox-init "$out/sandbox-init"
du -sh "$out"
