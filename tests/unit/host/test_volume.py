"""The volume check, and a real loop volume in a mount namespace of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from microvm.errors import HostError
from microvm.host.volume import MIN_VOLUME_BYTES, check_reflink, free_bytes, make_loop_volume, total_bytes

REPOSITORY = Path(__file__).parents[3]
PRELUDE = """
import json, os, subprocess, sys
from pathlib import Path
from microvm.errors import HostError
from microvm.host.volume import *
file, mountpoint, size = Path(sys.argv[1]) / "xfs.img", Path(sys.argv[1]) / "vm", MIN_VOLUME_BYTES
"""


def run_unshared(script: str, directory: Path) -> Any:
    """Runs a script whose mounts nobody else sees and that vanish with it; returns the JSON it prints."""
    unshared = ["unshare", "--mount", "--propagation", "private"]
    done = subprocess.run(
        [*unshared, sys.executable, "-c", PRELUDE + script, str(directory)],
        stdout=subprocess.PIPE, check=True, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.root
def test_a_volume_that_shares_blocks_passes_and_stays_empty(reflink_directory: Path) -> None:
    check_reflink(reflink_directory)
    assert os.listdir(reflink_directory) == []
    assert 0 < free_bytes(reflink_directory) <= total_bytes(reflink_directory) <= 4 << 30


def test_a_volume_that_cannot_says_how_to_get_one() -> None:
    with pytest.raises(HostError, match=r"mkfs\.xfs -m reflink=1") as caught:
        check_reflink("/dev/shm")  # a tmpfs
    assert caught.value.path == "/dev/shm"


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="ENOENT"):
        check_reflink(tmp_path / "absent")
    with pytest.raises(HostError, match="ENOENT"):
        free_bytes(tmp_path / "absent")


@pytest.mark.root
def test_a_loop_volume_is_made_once_kept_and_mounted_again(tmp_path: Path) -> None:
    seen = run_unshared(
        """
done = [make_loop_volume(file, mountpoint, size), make_loop_volume(file, mountpoint, size)]
check_reflink(mountpoint)
(mountpoint / "kept").write_text("content")
remove_loop_volume(mountpoint)
remove_loop_volume(mountpoint)
# What a weekly fstrim of the host may do to the backing file.
subprocess.run(["fallocate", "--dig-holes", str(file)], check=True)
holey = file.stat().st_blocks * 512
done.append(make_loop_volume(file, mountpoint, 2 * size))
print(json.dumps({
    "done": done, "kept": (mountpoint / "kept").read_text(), "backing": str(mounted_file(mountpoint)),
    "holey": holey, "allocated": file.stat().st_blocks * 512, "size": file.stat().st_size,
    "mode": mountpoint.stat().st_mode & 0o777,
    "options": [line.split()[3] for line in open("/proc/mounts") if line.split()[1] == str(mountpoint)],
}))
""",
        tmp_path,
    )
    assert seen["done"] == [True, False, True]
    assert seen["kept"] == "content"
    assert seen["backing"] == str(tmp_path / "xfs.img")
    assert seen["holey"] < MIN_VOLUME_BYTES <= seen["allocated"]
    assert seen["size"] == MIN_VOLUME_BYTES
    assert seen["mode"] == 0o700
    assert {"nosuid", "nodev", "noexec", "noatime"} <= set(seen["options"][0].split(","))
    assert sorted(os.listdir(tmp_path)) == ["vm", "xfs.img"]


@pytest.mark.root
def test_a_mount_of_something_else_is_left_alone(tmp_path: Path) -> None:
    seen = run_unshared(
        """
mountpoint.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "none", str(mountpoint)], check=True)
try:
    make_loop_volume(file, mountpoint, size)
except HostError as error:
    print(json.dumps({"message": error.message, "made": file.exists()}))
""",
        tmp_path,
    )
    assert "something else is mounted there" in seen["message"]
    assert not seen["made"]


def test_too_little_room_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="are needed"):
        make_loop_volume(tmp_path / "xfs.img", tmp_path / "vm", 1 << 60)
    assert os.listdir(tmp_path) == ["vm"]


@pytest.mark.root
def test_a_failing_tool_is_quoted_and_leaves_nothing_mounted(tmp_path: Path) -> None:
    (tmp_path / "xfs.img").write_bytes(b"no file system" * 100_000)
    with pytest.raises(HostError, match=r"^mount .*vm"):
        make_loop_volume(tmp_path / "xfs.img", tmp_path / "vm", MIN_VOLUME_BYTES)
    assert not os.path.ismount(tmp_path / "vm")
