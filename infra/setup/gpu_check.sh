#!/usr/bin/env bash
# The tests marked gpu, on a machine with a CUDA device: PYTHON=python3 infra/setup/gpu_check.sh
# The machine brings its own torch; set-up would install another. Needs megatron-core, msgspec and pytest beside it.
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly python=${PYTHON:-python3}

"$python" - <<'CHECK'
import sys

import torch

if not torch.cuda.is_available():
    sys.exit("gpu-check: torch sees no CUDA device")
print(f"gpu-check: {torch.cuda.get_device_name()}, torch {torch.__version__}")
CHECK
"$python" -m pytest -x -q -m gpu tests/trainer
