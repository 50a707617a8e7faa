# shellcheck shell=bash
# Sourced by the batch files: what they have in common. What a site sets is in site.local.sh beside it, which holds a password and is
# nobody else's to read:
#   export SWERVE_REDIS_URL=rediss://... SWERVE_ROUTER_URL=http://NODE:30000
#   export SWERVE_SHARED=/shared/swerve           on a file system that all nodes see under this path; default: runs/ here
#   export SWERVE_PYTHON=/shared/venv/bin/python  default: .venv here
#   export SWERVE_MODEL=/shared/models/...        what engines start from
# Slurm copies a batch file away before it runs it; paths begin at the directory of submission, the repository's root.
if [ -f infra/cluster/slurm/site.local.sh ]; then
    # shellcheck source=/dev/null
    . infra/cluster/slurm/site.local.sh
fi
export SWERVE_SHARED=${SWERVE_SHARED:-$PWD/runs} SWERVE_PYTHON=${SWERVE_PYTHON:-$PWD/.venv/bin/python}

say() { printf '%s job %s: %s\n' "$(date +%H:%M:%S)" "${SLURM_JOB_ID:-none}" "$*"; }

# need VARIABLE...: ends the job unless each is set.
need() {
    local variable
    for variable in "$@"; do
        [ -n "${!variable:-}" ] || { say "$variable is not set: set it in infra/cluster/slurm/site.local.sh" >&2 && exit 2; }
    done
}

# The same job again, with the same output file.
requeue() {
    say 'its time is up: queued again'
    scontrol requeue "$SLURM_JOB_ID"
}

# Waits for process $1 to end, however many signals are trapped meanwhile. Its exit status.
await_end() {
    local status=0
    while kill -0 "$1" 2>/dev/null; do wait "$1" && status=0 || status=$?; done
    return "$status"
}
