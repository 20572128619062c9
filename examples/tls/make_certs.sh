#!/bin/sh
# Certificates for mutual TLS between Pagoda's services, with openssl: an authority, and a pair of files a service.
#
#   make_certs.sh DIRECTORY [NAME[=HOST,HOST...]]...
#   make_certs.sh certs frontend=frontend.example.com,10.0.0.7 scheduler worker
#
# A certificate is good for its name, the given hosts (DNS names or addresses), localhost and the loopback addresses.
# Without names: frontend, scheduler and worker. Run again, it makes new pairs from the same authority: services show
# them to new connections without a restart. DAYS (default 90) says how long pairs are good; the authority is for ten
# years. Keep ca.key away from the services.
set -eu
umask 077
directory=${1:?usage: make_certs.sh DIRECTORY [NAME[=HOST,HOST...]]...}
shift
[ $# -gt 0 ] || set -- frontend scheduler worker
mkdir -p "$directory"
cd "$directory"

new_key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1"; }

if [ ! -e ca.key ]; then
    new_key ca.key
    openssl req -x509 -new -key ca.key -sha256 -days 3650 -subj "/CN=Pagoda services" -out ca.crt \
        -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign,cRLSign"
    chmod 644 ca.crt
fi

for service in "$@"; do
    name=${service%%=*}
    names="DNS:$name,DNS:localhost,IP:127.0.0.1,IP:::1"
    case $service in *=*) hosts=${service#*=} ;; *) hosts= ;; esac
    for host in $(echo "$hosts" | tr , ' '); do
        case $host in
            *:*) names="$names,IP:$host" ;;
            *[!0-9.]*) names="$names,DNS:$host" ;;
            *) names="$names,IP:$host" ;;
        esac
    done
    printf '%s\n' "subjectAltName=$names" "basicConstraints=CA:FALSE" "keyUsage=digitalSignature" \
        "extendedKeyUsage=serverAuth,clientAuth" >"$name.extensions"
    new_key "$name.key.new"
    openssl req -new -key "$name.key.new" -subj "/CN=$name" -out "$name.request"
    openssl x509 -req -in "$name.request" -CA ca.crt -CAkey ca.key -set_serial "0x$(openssl rand -hex 16)" \
        -sha256 -days "${DAYS:-90}" -extfile "$name.extensions" -out "$name.crt.new" 2>"$name.log" ||
        { cat "$name.log" >&2; exit 1; }
    chmod 644 "$name.crt.new"
    rm "$name.extensions" "$name.request" "$name.log"
    # Both in place at almost the same moment; a service that sees only one keeps what it has.
    mv "$name.key.new" "$name.key"
    mv "$name.crt.new" "$name.crt"
    echo "$directory/$name.crt: $names"
done
