#!/usr/bin/env bash
# The learner's processes of one pod, under torchrun. If there is a run, it is resumed. TERM goes to torchrun only, which passes it on
# once: rank 0 stops with a checkpoint, and the other ranks follow it.
set -euo pipefail
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=540 # less than the pod's grace period
ending=''
trap 'ending=yes; kill -TERM "$torchrun"' TERM

resume=()
if [ -f "$SWERVE_RUN_DIR/run.json" ]; then resume=(--resume); fi
torchrun --nnodes "$NODES" --node-rank "${HOSTNAME##*-}" --nproc-per-node "$GPUS" --master-addr trainer-0.trainer --master-port 29500 \
    -m trainer.run "$SWERVE_RECIPE" --run-dir "$SWERVE_RUN_DIR" "${resume[@]}" &
torchrun=$!
status=0
while kill -0 "$torchrun" 2>/dev/null; do wait "$torchrun" && status=0 || status=$?; done
if [ "$status" -eq 0 ] && [ -z "$ending" ]; then
    echo 'the run is finished; kubectl scale statefulset trainer --replicas=0 gives its GPUs back'
    trap 'exit 0' TERM
    sleep infinity &
    wait $!
fi
exit "$status"
