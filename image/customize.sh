#!/bin/sh
# Run by mmdebstrap as `customize ROOT` when the packages are in place: makes a Debian tree into our guest.
# Everything written here must be the same on every run, hence no dates and no generated ids.
set -eu
root=$1

chroot "$root" groupadd --gid 1000 agent
chroot "$root" useradd --uid 1000 --gid 1000 --home-dir /workspace --no-create-home --shell /bin/bash agent
mkdir -m 0755 "$root/workspace"
chown 1000:1000 "$root/workspace"

if [ -n "${MICROVM_IMAGE_SCRIPT:-}" ]; then
    cp "$MICROVM_IMAGE_SCRIPT" "$root/microvm-script"
    chroot "$root" /bin/bash -eu /microvm-script
    rm "$root/microvm-script"
fi

echo microvm >"$root/etc/hostname"
printf '127.0.0.1\tlocalhost\n127.0.1.1\tmicrovm\n::1\tlocalhost ip6-localhost ip6-loopback\n' >"$root/etc/hosts"
echo '/dev/vda / ext4 rw,noatime 0 0' >"$root/etc/fstab"
# A clone becomes somebody when it is configured: identity, resolver and keys are never part of an image.
rm -f "$root/etc/resolv.conf" "$root/etc/machine-id" "$root/var/lib/dbus/machine-id" "$root"/etc/ssh/ssh_host_*
: >"$root/etc/resolv.conf"
: >"$root/etc/machine-id"

# The build machine's mirror and APT settings stay on the build machine; user and group backups, logs and
# caches differ from run to run or are dead weight.
rm -rf "$root"/etc/apt/sources.list "$root"/etc/apt/sources.list.d/* "$root"/etc/apt/apt.conf.d/99mmdebstrap
rm -f "$root"/etc/passwd- "$root"/etc/group- "$root"/etc/shadow- "$root"/etc/gshadow- \
    "$root"/etc/subuid- "$root"/etc/subgid-
find "$root/var/log" "$root/var/cache" -type f -delete
rm -rf "$root"/var/lib/apt/lists/* "$root"/root/.cache "$root"/root/.npm

mkdir -p "$root/usr/lib/microvm"
chroot "$root" dpkg-query --show --showformat='${Package} ${Version} ${Architecture}\n' \
    >"$root/usr/lib/microvm/packages.txt"
