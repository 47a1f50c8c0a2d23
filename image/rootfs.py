"""The root file system: tars, one over the other, as an ext4 image, without mounting and without root.

It must not decide what is in the tars. mke2fs reads a tar from 1.47.1 on and dates everything by
SOURCE_DATE_EPOCH, so that it is the tools tree's, not the machine's, that runs.
"""

from __future__ import annotations

import os
import tarfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from image.tree import linked, run

_JOURNAL_MIB: Final = 16
"""A VM's disk is small and its journal lies in every reflink: a quarter of what mke2fs would choose."""

_RESERVED_PERCENT: Final = 1
"""Kept for root: the supervisor still writes when a job has filled the disk."""

_BLOCK: Final = 512
_LEFT_OUT: Final = ("./dev/",)
"""Device nodes: the guest mounts devtmpfs, and a builder who is not root has none in its tar."""


def merge(tars: Sequence[Path], output: Path) -> None:
    """One tar of several, members' bytes as they are; of two files of a name, the later tar's stays."""
    later: set[str] = set()
    plans: list[tuple[Path, list[tuple[int, int]]]] = []
    for path in reversed(tars):
        names, ranges = _members(path, later)
        later |= names
        plans.insert(0, (path, ranges))
    with output.open("wb") as target:
        for path, ranges in plans:
            with path.open("rb") as source:
                for start, end in ranges:
                    _copy(source.fileno(), target.fileno(), start, end - start)
        os.write(target.fileno(), b"\0" * _BLOCK * 2)


def _members(path: Path, skip: set[str]) -> tuple[set[str], list[tuple[int, int]]]:
    """The names in a tar, and the byte ranges to keep of it, adjacent ones joined."""
    with tarfile.open(path, "r:") as tar:
        members = tar.getmembers()
    names = {member.name for member in members}
    ranges: list[tuple[int, int]] = []
    for member in members:
        data = member.size if member.isreg() else 0
        end = member.offset_data + -(-data // _BLOCK) * _BLOCK
        unwanted = member.name in skip and not member.isdir()
        if unwanted or member.name.startswith(_LEFT_OUT):
            continue
        if ranges and ranges[-1][1] == member.offset:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((member.offset, end))
    return names, ranges


def _copy(source: int, target: int, offset: int, count: int) -> None:
    while count:
        done = os.sendfile(target, source, offset, count)
        assert done, "a tar became shorter while it was read"
        offset += done
        count -= done


def make_ext4(tools: Path, tar: Path, disk_gib: int, epoch: int, identity: str, output: Path) -> None:
    """Write an ext4 image of a tar, sparse, the same bytes for the same arguments.

    Args:
        tools: An unpacked tree with mke2fs and libarchive.
        tar: The contents.
        disk_gib: The image's size.
        epoch: The time of the file system's birth.
        identity: A SHA-256, in hex, that names the contents; UUID and hash seed come from it.
        output: The image; replaced.

    Raises:
        ImageError: mke2fs refused, for want of room for instance.
    """
    output.unlink(missing_ok=True)
    seed = str(uuid.UUID(hex=identity[:32], version=4))
    options = f"hash_seed={seed},lazy_itable_init=0,lazy_journal_init=0,root_owner=0:0"
    arguments = [
        "-q",
        "-F",
        "-t",
        "ext4",
        "-b",
        "4096",
        "-m",
        str(_RESERVED_PERCENT),
        "-J",
        f"size={_JOURNAL_MIB}",
    ]
    arguments += ["-U", seed, "-L", "microvm", "-E", options, "-d", str(tar), str(output), f"{disk_gib}G"]
    environment = {"SOURCE_DATE_EPOCH": str(epoch), "MKE2FS_CONFIG": str(tools / "etc/mke2fs.conf")}
    run(linked(tools.absolute(), "usr/sbin/mke2fs", arguments), environment)
