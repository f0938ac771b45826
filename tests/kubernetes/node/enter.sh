#!/bin/bash
# A machine of its own for the cluster: its root and its state, in namespaces that end with this process.
# usage: enter.sh ROOT STATE CONFIGURATION
set -e
root=$1 state=$2 configuration=$3
mount --make-rprivate /
mkdir -p "$state"/{changed,scratch,merged,containerd,kubelet,etcd,volumes,log}
mount -t overlay -o "lowerdir=$root,upperdir=$state/changed,workdir=$state/scratch" overlay "$state/merged"
cd "$state/merged"
mkdir -p node old run tmp sys proc dev var/lib/{containerd,kubelet,etcd} var/volumes
mount --bind "$configuration" node
for name in containerd kubelet etcd; do mount --bind "$state/$name" "var/lib/$name"; done
mount --bind "$state/volumes" var/volumes
mount -t proc proc proc
mount -t sysfs sysfs sys
mount --rbind /sys/fs/cgroup sys/fs/cgroup
mount --rbind /dev dev
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mkdir -p run/lock
pivot_root . old
cd /
umount -l /old
mount --make-rshared /
exec bash /node/start.sh
