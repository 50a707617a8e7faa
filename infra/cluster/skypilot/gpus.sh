#!/usr/bin/env bash
# What each machine of gpus.yaml runs. SkyPilot sets the rank of this one and the addresses of all. A run in SWERVE_RUN_DIR is resumed.
set -euo pipefail
readonly python=.venv/bin/python first_port=30001
mapfile -t addresses <<<"$SKYPILOT_NODE_IPS"
gpus=$SKYPILOT_NUM_GPUS_PER_NODE rank=$SKYPILOT_NODE_RANK

# first_gpu RANK: the first GPU of a machine that is not the learner's.
first_gpu() { if [ "$1" -lt "$LEARNER_NODES" ]; then echo "$LEARNER_GPUS"; else echo 0; fi; }

# Addresses of all engines, in the order of machines and GPUs.
engine_urls() {
    local node number
    for node in "${!addresses[@]}"; do
        for number in $(seq 0 $(((gpus - $(first_gpu "$node")) / ENGINE_GPUS - 1))); do
            echo "http://${addresses[node]}:$((first_port + number))"
        done
    done
}

# The engines of this machine. One that ends is started again.
start_engines() {
    local number devices first passed_on
    read -ra passed_on <<<"$ENGINE_FLAGS"
    first=$(first_gpu "$rank")
    for number in $(seq 0 $(((gpus - first) / ENGINE_GPUS - 1))); do
        devices=$(seq -s , $((first + number * ENGINE_GPUS)) $((first + (number + 1) * ENGINE_GPUS - 1)))
        while true; do
            CUDA_VISIBLE_DEVICES=$devices .venv-engine/bin/python -m infra.serving.engine --model "$SWERVE_MODEL" --device cuda --host 0.0.0.0 \
                --port $((first_port + number)) --tensor-parallel "$ENGINE_GPUS" -- "${passed_on[@]}" || true
            sleep 5
        done &
    done
}

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
start_engines
if [ "$rank" -eq 0 ]; then
    flags=()
    while read -r url; do flags+=("--engine=$url"); done < <(engine_urls)
    "$python" -m infra.serving.router --host 0.0.0.0 --port 30000 "${flags[@]}" &
fi
if [ "$rank" -ge "$LEARNER_NODES" ]; then
    wait
    exit
fi
export SWERVE_ROUTER_URL=http://${addresses[0]}:30000 CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=8 NCCL_DEBUG=WARN
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True # each step packs different lengths, which fragments memory
resume=()
if [ -f "$SWERVE_RUN_DIR/run.json" ]; then resume=(--resume); fi
"$python" -m torch.distributed.run --nnodes "$LEARNER_NODES" --node-rank "$rank" --nproc-per-node "$LEARNER_GPUS" \
    --master-addr "${addresses[0]}" --master-port 29500 -m trainer.run "$SWERVE_RECIPE" --run-dir "$SWERVE_RUN_DIR" "${resume[@]}"
