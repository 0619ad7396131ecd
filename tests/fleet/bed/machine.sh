#!/usr/bin/env bash
# Process 1 of one machine of the bed: gives itself a root file system of its own, says "ready", and stays.
#
#     machine.sh NAME DISK READ_ONLY_PATH...
#
# It runs in new mount, pid, network, uts and ipc namespaces. The root is this machine's own root with everything
# written laid over it in DISK/upper, so that nothing a test does on a node reaches the machine it runs on. A start with
# the same DISK finds what was written before, as after a reboot; /run, /dev/shm, the boot's id and all processes are new.
set -euo pipefail
name=$1
disk=$2
shift 2

umask 022
mount --make-rprivate /
root=$disk/root
mkdir -p "$root" "$disk/work"
mount -t overlay -o "lowerdir=/,upperdir=$disk/upper,workdir=$disk/work" "$name" "$root"

mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys" # of this network namespace: only its interfaces are in it
mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"
mount --rbind /dev "$root/dev"
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
mount -t tmpfs -o mode=755 run "$root/run"

for path in "$@"; do
    mkdir -p "$root$path"
    mount --bind "$path" "$root$path"
    mount -o remount,bind,ro "$root$path"
done

cd "$root"
pivot_root . .
umount -l .
cd /
hostname "$name"
cat /proc/sys/kernel/random/uuid >/run/boot_id
mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
ip link set lo up
mkdir -p /run/sshd /run/lock
echo ready
# A shell that waits also collects the orphans that are handed to process 1.
while :; do
    sleep 3600 &
    wait $!
done
