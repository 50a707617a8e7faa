#!/usr/bin/env bash
# Runs the checks that need one CUDA device: PYTHON=python3 infra/setup/gpu_check.sh
# It uses the machine's own torch, because set-up would install another one. It needs megatron-core, msgspec, safetensors, transformers
# and pytest too. The short run also needs sglang, smg, Redis and Docker; where they are missing it is left out, and a line says so.
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

echo "gpu-check: the learner's parity, packing, loss and resume tests on the device"
"$python" -m pytest -x -q -m "not cpu_only" tests/trainer/learner

echo "gpu-check: share of the device's peak, memory against the plan, and the time of an export"
"$python" -m benchmarks.device

if "$python" -c "import sglang, smg, docker, arq" 2>/dev/null && command -v dockerd redis-server >/dev/null; then
    echo "gpu-check: two steps of the demo, then of SmolLM2-135M, with SGLang on the device"
    tasks=runs/tasks/gpu-check
    [ -f "$tasks/train.jsonl" ] || {
        "$python" -m trainer.demo tasks --out "$tasks/family" --seed 0 --train 8 --heldout 8
        "$python" -m workers.tasksets import fleet "$tasks/family/train" --out "$tasks/train.jsonl"
        "$python" -m workers.tasksets import fleet "$tasks/family/heldout" --out "$tasks/heldout.jsonl"
    }
    # short_run RECIPE RUN_DIR DTYPE OPTION...
    short_run() {
        local recipe=$1 run=$2 dtype=$3
        shift 3
        "$python" -m infra.local "$recipe" --run-dir "$run" --fresh --device cuda --dtype "$dtype" \
            --prepare "-m trainer.demo images $tasks/family" --prepare "-m workers.verify $tasks/train.jsonl --new" -- \
            --set num_steps=2 --set tasks.train="$PWD/$tasks/train.jsonl" --set tasks.heldout="$PWD/$tasks/heldout.jsonl" \
            --set "tasks.heldout_sets={}" "$@"
    }
    short_run trainer/recipes/demo.toml runs/gpu-check float32 --set evaluation.episodes=8 --set evaluation.greedy_episodes=0
    "$python" -m infra.smollm2 --out models/SmolLM2-135M-Instruct
    short_run trainer/recipes/smollm2_135m.toml runs/gpu-check-smollm2 bfloat16 --set learner.dtype=bf16 \
        --set model="$PWD/models/SmolLM2-135M-Instruct" --set rollout.group_size=2 --set rollout.limits.turns=3 \
        --set batch.groups_per_step=1 --set batch.train_without_signal=true --set evaluation.episodes=4 --set evaluation.greedy_episodes=2
else
    echo "gpu-check: sglang, smg, redis-server or dockerd is missing here: the short run with SGLang was NOT made"
fi
