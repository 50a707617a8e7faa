#!/usr/bin/env bash
# Makes a Debian or Ubuntu host a node of a Swerve fleet. As root:
#
#   node_setup.sh --role ROLE [--role ROLE]... [OPTIONS]     ROLE: worker, judge, engine, receiver, router, redis, collector, trainer
#
#   --dry-run              print what would be done, and change nothing
#   --start                start the units too, and restart those that run an older program; otherwise they are only enabled
#   --workers N            worker processes, swerve-worker@1 to @N (1); concurrent episodes of each: SWERVE_SLOTS
#   --judges N             judge processes, swerve-judge@1 to @N (1); rollouts that each judges at once: SWERVE_JUDGE_SLOTS
#   --gpus 0,1,...         engines, one unit for each GPU number (0)
#   --data-root DIR        where Docker keeps images and containers (/var/lib/docker): the largest, fastest disk
#   --docker-tls DIR       let workers on other hosts use this Docker host, at port 2376, with the certificates in DIR (make_certificates.sh)
#   --python PROGRAM       Python 3.11 or newer (python3)
#
# A second run changes only what differs. Settings in /etc/swerve are written once and then kept; in Docker's daemon.json it sets only
# our keys. It never restarts Redis. infra/README.md gives the reason for each setting.
set -euo pipefail
source_dir=$(cd "$(dirname "$0")/../.." && pwd)
readonly source_dir home=/opt/swerve settings=/etc/swerve state=/var/lib/swerve units=/etc/systemd/system
readonly daemon_json=/etc/docker/daemon.json docker_drop_in=$units/docker.service.d/swerve-tls.conf

roles=() gpus=0 workers=1 judges=1 data_root=/var/lib/docker docker_tls='' python=python3 dry_run='' start=''
num_changes=0 program_changed='' units_changed='' docker_changed=''

say() { printf 'node: %s\n' "$*"; }

fail() {
    printf 'node: %s\n' "$*" >&2
    exit 2
}

has_role() { [[ " ${roles[*]} " == *" $1 "* ]]; }

parse() {
    while [ $# -gt 0 ]; do
        case $1 in
            --dry-run) dry_run=yes && shift && continue ;;
            --start) start=yes && shift && continue ;;
            --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0" && exit 0 ;;
        esac
        [ $# -ge 2 ] || fail "$1 needs a value, or is unknown; see --help"
        case $1 in
            --role) roles+=("$2") ;;
            --workers) workers=$2 ;;
            --judges) judges=$2 ;;
            --gpus) gpus=$2 ;;
            --data-root) data_root=$2 ;;
            --docker-tls) docker_tls=$2 ;;
            --python) python=$2 ;;
            *) fail "unknown option $1; see --help" ;;
        esac
        shift 2
    done
}

check() {
    [ ${#roles[@]} -gt 0 ] || fail 'give at least one --role; see --help'
    local role
    for role in "${roles[@]}"; do
        case $role in worker | judge | engine | receiver | router | redis | collector | trainer) ;; *) fail "no role is called $role; see --help" ;; esac
    done
    [[ $workers =~ ^[1-9][0-9]*$ ]] || fail "--workers $workers: give a whole number of at least 1"
    [[ $judges =~ ^[1-9][0-9]*$ ]] || fail "--judges $judges: give a whole number of at least 1"
    [[ $gpus =~ ^[0-9](,[0-9])*$ ]] || fail "--gpus $gpus: give digits separated by commas, as in 0,1; the port is 3010 and the digit"
    [[ $data_root == /* ]] || fail "--data-root $data_root: give an absolute path"
    if [ -n "$docker_tls" ]; then
        has_role worker || fail '--docker-tls is of use with --role worker'
        [ -f "$docker_tls/ca.pem" ] && [ -f "$docker_tls/cert.pem" ] && [ -f "$docker_tls/key.pem" ] ||
            fail "--docker-tls $docker_tls: it must hold ca.pem, cert.pem and key.pem; see make_certificates.sh"
    fi
    command -v apt-get >/dev/null || fail 'this is neither Debian nor Ubuntu: apt-get is missing'
    [ -n "$dry_run" ] || [ "$(id -u)" -eq 0 ] || fail 'run it as root, or with --dry-run'
}

# do_it SENTENCE COMMAND...: runs the command, or prints it with --dry-run.
do_it() {
    local what=$1
    shift
    num_changes=$((num_changes + 1))
    if [ -n "$dry_run" ]; then say "would $what"; else say "$what" && "$@"; fi
}

# put FILE MODE, content on standard input. Status 1 if the file has that content already.
put() {
    local file=$1 mode=$2 content
    content=$(cat && printf .)
    if [ -f "$file" ] && [ "$(cat "$file" && printf .)" = "$content" ]; then return 1; fi
    do_it "write $file" write_file "$file" "$mode" "${content%.}"
}

write_file() {
    install -D -m "$2" /dev/null "$1.new"
    printf '%s' "$3" >"$1.new"
    mv "$1.new" "$1"
}

install_packages() {
    local wanted=(ca-certificates python3 python3-venv) missing=() package
    if has_role worker; then
        wanted+=(iptables gcc musl-tools)
        command -v dockerd >/dev/null || wanted+=(docker.io)
    fi
    if has_role redis; then wanted+=(redis-server); fi
    for package in "${wanted[@]}"; do
        [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] && return
    do_it "install ${missing[*]}" apt_install "${missing[@]}"
}

apt_install() {
    apt-get -q -y update >/dev/null
    DEBIAN_FRONTEND=noninteractive apt-get -q -y install --no-install-recommends "$@" >/dev/null
}

make_user() {
    if ! getent passwd swerve >/dev/null; then
        do_it 'make the user swerve' useradd --system --user-group --home-dir "$state" --shell /usr/sbin/nologin swerve
    fi
    if has_role worker && [[ " $(id -nG swerve 2>/dev/null) " != *' docker '* ]]; then
        do_it 'let swerve use Docker (which is as good as root on this host)' usermod --append --groups docker swerve
    fi
    local directory
    for directory in "$state" "$settings"; do
        [ -d "$directory" ] || do_it "make $directory" install -d -m 0750 -o root -g swerve "$directory"
    done
}

program_files() { (cd "$source_dir" && find constraints.txt pyproject.toml infra pipeline workers trainer \
    -path infra/docker/wheels -prune -o -name __pycache__ -prune -o -type f -print | LC_ALL=C sort); }

install_program() {
    local fingerprint extras=(base) no_deps=()
    if has_role worker || has_role judge; then extras+=(workers); fi
    if has_role worker; then no_deps+=(swebench multi-swe-bench swesmith); fi
    if has_role router; then extras+=(serving); fi
    if has_role engine; then extras+=(sglang); fi
    fingerprint=$( (printf '%s\n' "${roles[*]} ${extras[*]}" && cd "$source_dir" && program_files | tr '\n' '\0' | xargs -0 sha256sum) | sha256sum)
    if [ "$(cat "$home/.installed" 2>/dev/null)" = "$fingerprint" ]; then return; fi
    program_changed=yes
    if [ "$source_dir" != "$home" ]; then do_it "copy the program to $home" copy_program; fi
    do_it "make $home/.venv with ${extras[*]}" make_venv "${extras[*]}" "${no_deps[*]}"
    if has_role trainer; then do_it "make $home/.venv-trainer with the learner" make_trainer_venv; fi
    do_it 'note what is installed' write_file "$home/.installed" 0644 "$fingerprint"
}

copy_program() {
    install -d -m 0755 "$home"
    rm -rf "${home:?}/infra" "${home:?}/pipeline" "${home:?}/workers" "${home:?}/trainer"
    program_files | tar -C "$source_dir" -cf - --owner=0 --group=0 --mode=u=rwX,go=rX --files-from=- | tar -C "$home" -xf -
}

make_venv() {
    local pip=("$home/.venv/bin/python" -m pip --disable-pip-version-check install --quiet) lists=${1/ sglang/}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$python is older than 3.11; name another with --python"
    [ -x "$home/.venv/bin/python" ] || "$python" -m venv "$home/.venv"
    # shellcheck disable=SC2086 # one word each
    "$python" "$home/infra/setup/extras.py" $lists >"$home/.requirements"
    "${pip[@]}" --constraint "$home/constraints.txt" --requirement "$home/.requirements"
    # shellcheck disable=SC2086 # one word each
    [ -z "$2" ] || "${pip[@]}" --constraint "$home/constraints.txt" --no-deps $2
    if has_role worker; then bash "$home/infra/setup/init.sh" "$home/.venv/share/swerve/sandbox-init"; fi
    # It is installed with the CUDA packages that it requires, because our constraints are for a CPU.
    if [[ $1 == *sglang* ]]; then "${pip[@]}" "$(grep '^sglang==' "$home/constraints.txt")"; fi
}

# The learner has an environment of its own, because an engine needs another torch. Pip's index gives torch for CUDA.
make_trainer_venv() {
    local pip=("$home/.venv-trainer/bin/python" -m pip --disable-pip-version-check install --quiet)
    command -v nvidia-smi >/dev/null || say 'nvidia-smi is missing: install the NVIDIA driver before the learner starts'
    [ -x "$home/.venv-trainer/bin/python" ] || "$python" -m venv "$home/.venv-trainer"
    "$python" "$home/infra/setup/extras.py" base trainer >"$home/.requirements-trainer"
    "${pip[@]}" --constraint "$home/constraints.txt" ${SWERVE_TORCH_INDEX:+--extra-index-url "$SWERVE_TORCH_INDEX"} \
        --requirement "$home/.requirements-trainer"
}

configure_host() {
    put /etc/sysctl.d/90-swerve.conf 0644 <<'SYSCTL' && do_it 'apply the kernel settings' sysctl --quiet --system
# For hundreds of containers, each with watchers, processes and connections.
fs.inotify.max_user_instances = 8192
fs.inotify.max_user_watches = 1048576
kernel.pid_max = 4194304
net.core.somaxconn = 4096
net.ipv4.neigh.default.gc_thresh3 = 8192
# Redis forks to rewrite its log.
vm.overcommit_memory = 1
SYSCTL
    [ -f "$settings/swerve.env" ] || do_it "write $settings/swerve.env, to be filled in" \
        install -m 0640 -o root -g swerve "$source_dir/infra/cluster/swerve.env" "$settings/swerve.env"
    if has_role router && [ ! -f "$settings/router.env" ]; then
        put "$settings/router.env" 0644 <<<'SWERVE_ROUTER_FLAGS=--engine http://ENGINE:30100'
    fi
    if has_role redis && [ ! -d "$settings/redis.d" ]; then
        do_it "make $settings/redis.d, for password and maxmemory" install -d -m 0750 -o root -g swerve "$settings/redis.d"
    fi
}

# Our settings are merged into the existing ones.
wanted_daemon_json() {
    python3 - "$daemon_json" "$source_dir/infra/cluster/daemon.json" "$data_root" <<'MERGE'
import json
import pathlib
import sys

there, ours = (pathlib.Path(path) for path in sys.argv[1:3])
settings = json.loads(there.read_text()) if there.exists() and there.read_text().strip() else {}
settings |= json.loads(ours.read_text()) | {"data-root": sys.argv[3]}
print(json.dumps(settings, indent=2, sort_keys=True))
MERGE
}

configure_docker() {
    has_role worker || return 0
    local wanted
    wanted=$(wanted_daemon_json) || fail "$daemon_json cannot be read; correct it"
    if put "$daemon_json" 0644 <<<"$wanted"; then docker_changed=yes; fi
    if [ -n "$docker_tls" ]; then
        local part
        for part in ca cert key; do
            if put "$settings/tls/docker/$part.pem" 0600 <"$docker_tls/$part.pem"; then docker_changed=yes; fi
        done
        if put "$docker_drop_in" 0644 <<TLS; then units_changed=yes docker_changed=yes; fi
# Listens on TCP too, for workers on other hosts with a certificate of our authority.
[Service]
ExecStart=
ExecStart=$(command -v dockerd || echo /usr/sbin/dockerd) -H fd:// -H tcp://0.0.0.0:2376 --tlsverify --tlscacert=$settings/tls/docker/ca.pem --tlscert=$settings/tls/docker/cert.pem --tlskey=$settings/tls/docker/key.pem
TLS
    fi
}

unit_names() {
    local role number
    for role in "${roles[@]}"; do
        case $role in
            worker) for number in $(seq "$workers"); do echo "swerve-worker@$number.service"; done ;;
            judge) for number in $(seq "$judges"); do echo "swerve-judge@$number.service"; done ;;
            trainer) ;; # people, Slurm or another scheduler start it
            engine) for number in ${gpus//,/ }; do echo "swerve-engine@$number.service"; done ;;
            *) echo "swerve-$role.service" ;;
        esac
    done
}

install_units() {
    local file name
    for file in "$source_dir"/infra/cluster/systemd/*; do
        if put "$units/${file##*/}" 0644 <"$file"; then units_changed=yes; fi
    done
    [ -z "$units_changed" ] || do_it 'have systemd read its units' systemctl daemon-reload
    if [ -n "$docker_changed" ]; then do_it 'restart Docker (its containers end; the workers return their episodes to the queue)' systemctl restart docker; fi
    if has_role redis && systemctl --quiet is-enabled redis-server.service 2>/dev/null; then
        do_it "disable the distribution's Redis" systemctl disable --quiet --now redis-server.service
    fi
    for name in $(unit_names); do
        systemctl --quiet is-enabled "$name" 2>/dev/null || do_it "enable $name" systemctl enable --quiet "$name"
        start_or_restart "$name"
    done
}

# A restarted worker drains first; an engine or the router is unavailable for a while.
start_or_restart() {
    if ! systemctl --quiet is-active "$1" 2>/dev/null; then
        [ -z "$start" ] || do_it "start $1" systemctl start "$1"
    elif [ -n "$program_changed$units_changed" ] && [[ $1 != swerve-redis.service ]]; then
        if [ -n "$start" ]; then do_it "restart $1" systemctl restart "$1"; else say "$1 still runs the old program: systemctl restart $1"; fi
    fi
}

parse "$@"
check
install_packages
make_user
install_program
configure_host
configure_docker
install_units
if [ "$num_changes" -eq 0 ]; then say 'nothing to do'; fi
if grep -q 'PASSWORD@' "$settings/swerve.env" 2>/dev/null; then say "next: fill in $settings/swerve.env, then start the units"; fi
