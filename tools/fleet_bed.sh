#!/usr/bin/env bash
# Sees to it that whole fleets can be tested on this machine (make test-fleet), or says what is missing and fails.
#
# Installed, where root has apt-get: Docker's engine, OpenSSH, iproute2, ping, sshfs. Services that the packages bring are not
# needed; every node of a test has its own.
set -euo pipefail

fail() {
    echo "fleet_bed: $1" >&2
    exit 1
}

[ "$(uname -s)" = Linux ] || fail "Linux is needed, for nodes are made of its namespaces; this is $(uname -s)"
[ "$(id -u)" = 0 ] || fail "root is needed, for namespaces, mounts and Docker: sudo make test-fleet"

PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
packages=()
need() {
    command -v "$1" >/dev/null || packages+=("$2")
}
need dockerd docker.io
need containerd containerd
need runc runc
need sshd openssh-server
need ssh openssh-client
need ip iproute2
need ping iputils-ping
need pkill procps
need sshfs sshfs
need unshare util-linux
[ ${#packages[@]} = 0 ] && exit 0

command -v apt-get >/dev/null ||
    fail "missing: ${packages[*]} (names of Debian's packages; here is no apt-get to install them)"
echo "fleet_bed: installing ${packages[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
{ apt-get update -qq && apt-get install -y -qq --no-install-recommends "${packages[@]}"; } >/dev/null ||
    fail "could not be installed: ${packages[*]}; try apt-get install ${packages[*]}"
