# NFS between nodes, as root. Nothing is written under /etc: after a reboot the same command is run again.
#   where DIRECTORY                     on the head: print the directory without links
#   export DIRECTORY CLIENT...          on the head: let these addresses read the directory
#   unexport DIRECTORY CLIENT...        take that back
#   mount DIRECTORY TARGET SERVER...    on a worker: mount from the first of these addresses that answers
#   unmount DIRECTORY TARGET SERVER...  take that back
set -eu

fail() { printf '%s\n' "$1" >&2; exit 1; }

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; return; fi
  sudo -n true 2>/dev/null || fail "needs root, and sudo asks for a password; run as root: $*"
  sudo -n "$@"
}

source_of() { # what is mounted at a path, empty when nothing is
  while read -r from at _; do
    if [ "$(printf '%b' "$at")" = "$1" ]; then mounted=$from; fi
  done </proc/self/mounts
  printf '%s' "${mounted:-}"
}

verb=$1 directory=$2
shift 2
case $verb in
where)
  [ -d "$directory" ] || fail "there is no directory $directory"
  realpath -- "$directory"
  ;;
export)
  [ -d "$directory" ] || fail "there is no directory $directory"
  command -v exportfs >/dev/null || fail "there is no exportfs: install nfs-kernel-server"
  case $(stat -f -c %T -- "$directory") in
  overlayfs | nfs* | tmpfs) fail "$directory is on $(stat -f -c %T -- "$directory"), which NFS cannot export" ;;
  esac
  outside=$(find "$directory" -type l -exec realpath -- {} + 2>/dev/null | grep -vF -m 1 -- "$directory/" || true)
  [ -z "$outside" ] || fail "$directory has links that lead outside, to $outside: workers would see them broken"
  as_root systemctl start nfs-server 2>/dev/null || as_root service nfs-kernel-server start >/dev/null
  for client in "$@"; do as_root exportfs -o ro,no_subtree_check,crossmnt "$client:$directory"; done
  ;;
unexport)
  for client in "$@"; do as_root exportfs -u "$client:$directory" 2>/dev/null || true; done
  ;;
mount)
  target=$1
  shift
  found=$(source_of "$target")
  for server in "$@"; do
    if [ "$found" = "$server:$directory" ]; then exit 0; fi
  done
  [ -z "$found" ] || fail "$target is a mount of $found already"
  command -v mount.nfs4 >/dev/null || [ -x /sbin/mount.nfs4 ] || fail "there is no mount.nfs4: install nfs-common"
  if [ -d "$target" ] && [ -n "$(ls -A -- "$target" | head -n 1)" ]; then
    fail "$target holds files of its own, which a mount would hide: share = \"local\" uses them"
  fi
  for server in "$@"; do
    timeout 3 bash -c 'exec 3<>"/dev/tcp/$1/2049"' - "$server" 2>/dev/null || continue
    as_root mkdir -p -- "$target"
    as_root mount -t nfs4 -o ro,hard,noatime,rsize=1048576,nconnect=8 "$server:$directory" "$target"
    exit 0
  done
  fail "none of the head's addresses $* answers at port 2049 (NFS)"
  ;;
unmount)
  target=$1
  shift
  found=$(source_of "$target")
  [ -n "$found" ] || exit 0
  for server in "$@"; do
    if [ "$found" = "$server:$directory" ]; then
      as_root umount -- "$target"
      exit 0
    fi
  done
  fail "$target is a mount of $found, which is not this fleet's"
  ;;
esac
