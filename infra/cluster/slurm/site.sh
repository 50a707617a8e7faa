# shellcheck shell=bash
# Common part of the batch files, which source it. A site's settings are in site.local.sh beside it; it holds a password, so let nobody
# else read it:
#   export SWERVE_REDIS_URL=rediss://... SWERVE_ROUTER_URL=http://NODE:30000
#   export SWERVE_SHARED=/shared/swerve           on a file system that all nodes see under this path; default: runs/ here
#   export SWERVE_PYTHON=/shared/venv/bin/python  default: .venv here
#   export SWERVE_MODEL=/shared/models/...        the model that engines start with
#   export SWERVE_JUDGE_ROUTER_URL=http://NODE:30000 SWERVE_JUDGE_MODEL=/shared/models/...     for a judge that is a model: jobs of
#                                                 router and engines that get SWERVE_FOR=judge use these instead
# Slurm runs a copy of a batch file, so paths are relative to the directory of submission, the repository's root.
if [ -f infra/cluster/slurm/site.local.sh ]; then
    # shellcheck source=/dev/null
    . infra/cluster/slurm/site.local.sh
fi
export SWERVE_SHARED=${SWERVE_SHARED:-$PWD/runs} SWERVE_PYTHON=${SWERVE_PYTHON:-$PWD/.venv/bin/python}
if [ "${SWERVE_FOR:-}" = judge ]; then
    export SWERVE_ROUTER_URL=${SWERVE_JUDGE_ROUTER_URL:-} SWERVE_MODEL=${SWERVE_JUDGE_MODEL:-} SWERVE_SHARED=$SWERVE_SHARED/judge
fi

say() { printf '%s job %s: %s\n' "$(date +%H:%M:%S)" "${SLURM_JOB_ID:-none}" "$*"; }

# need VARIABLE...: ends the job with status 2 unless all are set.
need() {
    local variable
    for variable in "$@"; do
        [ -n "${!variable:-}" ] || { say "$variable is not set: set it in infra/cluster/slurm/site.local.sh" >&2 && exit 2; }
    done
}

# Puts the same job back into Slurm's queue, with the same output file.
requeue() {
    say 'the time limit is near: requeued'
    scontrol requeue "$SLURM_JOB_ID"
}

# Waits until process $1 has ended, even if trapped signals interrupt the wait. Returns its exit status.
await_end() {
    local status=0
    while kill -0 "$1" 2>/dev/null; do wait "$1" && status=0 || status=$?; done
    return "$status"
}
