#!/bin/sh
# Runs a command without the device nodes of GPUs, as in a container that has the driver's library but not its devices.
#
#   sh docs/learn/hide-gpu-nodes.sh partywall doctor
#
# It needs unshare and mount (util-linux), and permission to create a mount namespace: root's, or that of a user
# namespace. For other processes nothing changes.
set -eu

if [ "${1:-}" != --inside ]; then
    [ $# -gt 0 ] || {
        echo "usage: $0 COMMAND [ARGUMENT…]" >&2
        exit 2
    }
    for user in "" "--user --map-root-user"; do
        # Two words or none.
        # shellcheck disable=SC2086
        unshare $user --mount true 2>/dev/null && exec unshare $user --mount sh "$0" --inside "$@"
    done
    echo "$0: cannot create a mount namespace: run it as root, or permit user namespaces" >&2
    exit 1
fi
shift

dev=$(mktemp -d)
mount -t tmpfs none "$dev" || {
    rmdir "$dev"
    exit 1
}
mkdir "$dev/shm"
mount --rbind /dev/shm "$dev/shm"
for node in null zero full random urandom tty; do
    : >"$dev/$node"
    mount --bind "/dev/$node" "$dev/$node"
done
ln -s /proc/self/fd "$dev/fd"
# The driver's library creates missing nodes if it can.
mount -o remount,ro "$dev"
mount --move "$dev" /dev
rmdir "$dev"
exec "$@"
