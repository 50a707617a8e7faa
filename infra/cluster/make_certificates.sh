#!/usr/bin/env bash
# Makes a certificate authority, and certificates for TLS to Redis and to Docker hosts.
#
#   make_certificates.sh --out DIR [--days N] [--server NAME[,NAME...]]... [--client NAME]...
#
# Each --server is a machine: its first NAME names the folder, and clients may use all of its NAMEs (host names or addresses).
# Each --client uses servers: a worker host, or the trainer. Every folder contains ca.pem, cert.pem and key.pem, as DOCKER_CERT_PATH
# requires; for Redis see docs/deploy.md. The authority's own key is DIR/ca-key.pem: keep it off the cluster.
#
# A second run keeps certificates that have the same names and are valid for another 30 days, and replaces the others. The authority stays.
set -euo pipefail

readonly keep_s=$((30 * 24 * 3600))
out='' days=825
servers=() clients=()

say() { printf 'certificates: %s\n' "$*"; }

misuse() {
    printf 'certificates: %s\n' "$*" >&2
    exit 2
}

parse() {
    while [ $# -gt 0 ]; do
        [ $# -ge 2 ] || misuse "$1 needs a value; see the head of $0"
        case $1 in
            --out) out=$2 ;;
            --days) days=$2 ;;
            --server) servers+=("$2") ;;
            --client) clients+=("$2") ;;
            *) misuse "unknown option $1; known are --out, --days, --server, --client" ;;
        esac
        shift 2
    done
    [ -n "$out" ] || misuse 'give --out DIR'
    [[ $days =~ ^[1-9][0-9]*$ ]] || misuse "--days $days: give a whole number of days"
    [ $((${#servers[@]} + ${#clients[@]})) -gt 0 ] || misuse 'give at least one --server or --client'
    local name seen=' '
    for name in "${servers[@]}" "${clients[@]}"; do
        [[ $name =~ ^[A-Za-z0-9][A-Za-z0-9.,:*-]*$ ]] || misuse "$name: names are host names or addresses, separated by commas"
        [[ $seen != *" ${name%%,*} "* ]] || misuse "${name%%,*} is given twice: its folder can hold one certificate"
        seen+="${name%%,*} "
    done
}

good() { [ -f "$1" ] && openssl x509 -in "$1" -noout -checkend "$keep_s" >/dev/null; }

issued() { openssl verify -CAfile "$out/ca.pem" "$1" >/dev/null 2>&1; }

make_key() { openssl genpkey -quiet -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"; }

make_authority() {
    if good "$out/ca.pem" && [ -f "$out/ca-key.pem" ]; then return; fi
    [ ! -e "$out/ca.pem" ] || misuse "$out/ca.pem expires soon, or its key is gone: move $out away, make all certificates anew and distribute them"
    make_key "$out/ca-key.pem"
    openssl req -x509 -new -key "$out/ca-key.pem" -out "$out/ca.pem" -sha256 -days 3650 -subj '/CN=swerve authority' \
        -addext 'basicConstraints=critical,CA:TRUE,pathlen:0' -addext 'keyUsage=critical,keyCertSign,cRLSign'
    say "authority in $out/ca.pem"
}

# 10.0.0.7,node7 -> IP:10.0.0.7,DNS:node7
alternative_names() {
    local name names=''
    for name in ${1//,/ }; do
        if [[ $name =~ ^[0-9.]+$|: ]]; then names+=",IP:$name"; else names+=",DNS:$name"; fi
    done
    printf '%s' "${names#,}"
}

# make_certificate NAMES USAGE
make_certificate() {
    local folder="$out/${1%%,*}"
    local key="$folder/key.pem" request="$folder/request.pem" certificate="$folder/cert.pem" made_for="$folder/made-for"
    if good "$certificate" && [ "$(cat "$made_for" 2>/dev/null)" = "$2 $1" ] && issued "$certificate"; then return; fi
    mkdir -p "$folder"
    make_key "$key"
    openssl req -new -key "$key" -out "$request" -subj "/CN=${1%%,*}"
    openssl x509 -req -in "$request" -out "$certificate" -sha256 -days "$days" -CA "$out/ca.pem" -CAkey "$out/ca-key.pem" \
        -set_serial "0x$(openssl rand -hex 16)" -extfile <(
            printf 'basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n'
            printf 'extendedKeyUsage=%s\nsubjectAltName=%s\n' "$2" "$(alternative_names "$1")"
            printf 'subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n'
        ) 2>/dev/null
    rm "$request"
    cp "$out/ca.pem" "$folder/ca.pem"
    chmod 644 "$certificate" "$folder/ca.pem"
    printf '%s\n' "$2 $1" >"$made_for"
    say "$2 in $folder, for $1"
}

parse "$@"
umask 077
mkdir -p "$out"
make_authority
for names in "${servers[@]}"; do make_certificate "$names" serverAuth; done
for names in "${clients[@]}"; do make_certificate "$names" clientAuth; done
