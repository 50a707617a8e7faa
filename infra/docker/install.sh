#!/bin/sh
# Makes the virtual environment /opt/swerve, inside an image build.
#   install.sh LIST,... [REQUIREMENTS FILE] [PACKAGES WITHOUT THEIR DEPENDENCIES]      lists as in extras.py
# If wheels were fetched beforehand it uses only those; otherwise it uses the package index.
set -eu
cd /build

lists=$1 requirements=${2:-} without_dependencies=${3:-}
index=
if ls infra/docker/wheels/*.whl >/dev/null 2>&1; then
    index="--no-index --find-links infra/docker/wheels"
fi

install() {
    # shellcheck disable=SC2086 # two words or none
    /opt/swerve/bin/pip --disable-pip-version-check install --quiet --no-cache-dir --no-compile \
        --constraint constraints.txt $index "$@"
}

python3 -m venv /opt/swerve
# shellcheck disable=SC2046 # one word each
python3 infra/setup/extras.py $(echo "$lists" | tr , ' ') >/tmp/requirements.txt
install --requirement /tmp/requirements.txt ${requirements:+--requirement "$requirements"}
# shellcheck disable=SC2086 # one word each
[ -z "$without_dependencies" ] || install --no-deps $without_dependencies
/opt/swerve/bin/pip uninstall --quiet --yes pip
if [ -f infra/docker/wheels/sandbox-init ]; then
    mkdir -p /opt/swerve/share/swerve && cp infra/docker/wheels/sandbox-init /opt/swerve/share/swerve/
fi
