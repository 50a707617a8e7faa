#!/usr/bin/env bash
# Makes two virtual environments on a machine with NVIDIA GPUs: .venv with the learner, .venv-engine with SGLang, whose own metadata asks
# for another torch. Needs NVIDIA's driver, and an index of packages. The learner's has what its tests need, too, for `make gpu-check`.
#   PYTHON               Python 3.11 or newer (python3)
#   SWERVE_TORCH_INDEX   where torch comes from; by default PyTorch's index for the newest CUDA that the driver can run
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly python=${PYTHON:-python3}

say() { printf 'setup-gpu: %s\n' "$*"; }

fail() {
    say "$*" >&2
    exit 1
}

# The newest CUDA for which torch is built and that the driver can run.
torch_index() {
    local driver=$1
    if [ "${driver%%.*}" -ge 580 ]; then
        echo https://download.pytorch.org/whl/cu130
    elif [ "${driver%%.*}" -ge 525 ]; then
        echo https://download.pytorch.org/whl/cu126
    else
        return 1
    fi
}

# environment DIRECTORY: makes it where it is missing.
environment() { [ -x "$1/bin/python" ] || "$python" -m venv "$1"; }

command -v nvidia-smi >/dev/null || fail 'nvidia-smi is missing: install the NVIDIA driver of your distribution first'
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1) && [ -n "$driver" ] ||
    fail 'nvidia-smi finds no GPU: check the driver with nvidia-smi'
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$python is older than 3.11; name another as PYTHON"
index=${SWERVE_TORCH_INDEX:-$(torch_index "$driver")} || fail "driver $driver is too old for torch 2.13: install 525 or newer"

say "driver $driver: the learner into .venv, torch from $index"
environment .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt)
# A torch for the CPU, as `make setup` installs it, has the same version.
reinstall=()
if .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' 2>/dev/null; then reinstall=(--force-reinstall); fi
"${pip[@]}" "${reinstall[@]}" --index-url "$index" torch==2.13.0
"$python" infra/setup/extras.py base workers trainer tasksets serving dev | "${pip[@]}" --requirement /dev/stdin
"${pip[@]}" --no-deps --requirement infra/setup/no-deps.txt
rm -rf .venv/lib/python3*/site-packages/tests # of swesmith; it would hide the one of this checkout
"${pip[@]}" --no-deps --no-build-isolation --editable .

say 'SGLang into .venv-engine'
environment .venv-engine
"$python" infra/setup/extras.py base | .venv-engine/bin/python -m pip --disable-pip-version-check install --quiet --requirement /dev/stdin
.venv-engine/bin/python -m pip --disable-pip-version-check install --quiet "$(grep '^sglang==' constraints.txt)"

.venv/bin/python - <<'CHECK'
import sys

import torch

from trainer.learner.devices import recognise

if not torch.cuda.is_available():
    sys.exit(f"setup-gpu: torch {torch.__version__} sees no CUDA device; compare its CUDA with the driver's in nvidia-smi")
name, memory_bytes = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
known = recognise(name, memory_bytes)
print(f"setup-gpu: torch {torch.__version__} sees {torch.cuda.device_count()} x {name}")
print(f"setup-gpu: {known.name} in a plan" if known else "setup-gpu: no plan knows this GPU; trainer/learner/devices.py has those")
CHECK
say 'next: make gpu-check, and engines with .venv-engine/bin/python -m infra.serving.engine --device cuda'
