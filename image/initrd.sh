#!/bin/sh
# /init of the initrd: load the drivers of the devices that are there, mount the disk, become its init.
# `microvm.probe` on the kernel's command line: say that a guest got this far, and power off.
PATH=/bin

mount -t devtmpfs -o nosuid,mode=0755 dev /dev
mount -t proc -o nosuid,nodev,noexec proc /proc
mount -t sysfs -o nosuid,nodev,noexec sys /sys

init=/usr/lib/microvm/init
read -r line </proc/cmdline
for word in $line; do
    case $word in
        init=*) init=${word#init=} ;;
        microvm.probe)
            echo MICROVM-PROBE-OK
            poweroff -f
            ;;
    esac
done

load() {
    for module in "/modules/$1"/*.ko; do
        [ -e "$module" ] && insmod "$module"
    done
}

load bus
for device in /sys/bus/virtio/devices/*; do
    read -r id <"$device/device" && load "$id"
done

if ! mount -t ext4 -o rw,noatime /dev/vda /root; then
    echo "microvm: cannot mount the disk /dev/vda"
    poweroff -f
fi
mount -o move /dev /root/dev
mount -o move /proc /root/proc
mount -o move /sys /root/sys
exec switch_root /root "$init"
