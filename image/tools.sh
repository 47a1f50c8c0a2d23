#!/bin/sh
# Run by mmdebstrap as `tools.sh ROOT` when the tools' packages are unpacked: notes which they are.
set -eu
cd "$1/var/cache/apt/archives"
for deb in *.deb; do
    echo "${deb%.deb}" | sed 's/%3a/:/; s/_/ /g'
done | LC_ALL=C sort >"$1/packages.txt"
