"""The whole test suite: static checks, then every test with real guests; the summary is the last line.

Promises to leave the machine as it was: the test volume is mounted in a mount namespace of its own, and its
file goes with it. It must not use or touch a service that runs here. Neighbours: `check`, and
`tests/conftest.py`, which gets the image and the volume by environment variables.

    image (cached) ─► unshare -m ─► XFS loop volume ─► pytest ─► unmount ─► same exit code
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import check
from bootstrap import INTERRUPTED, ROOT, FailedError, cache_dir, say, stop

from image import ImageError, build_image
from microvm.errors import HostError
from microvm.host.volume import make_loop_volume, remove_loop_volume

GIB: Final = 2**30
VOLUME_GIB: Final = 12  # the largest test holds a 4096 MiB guest, its checkpoint and its template
SMALLEST_VOLUME_GIB: Final = 8
LEFT_FREE_GIB: Final = 2
INSIDE: Final = "MICROVM_TEST_INSIDE"
# A test that hangs says where, long before CI ends the whole run.
HANG_S: Final = 600


def main() -> None:
    """The command `tools/test [--all] [pytest arguments]`."""
    arguments = sys.argv[1:]
    if os.geteuid() != 0:
        stop("test", FailedError("guests need jails and a mounted volume; run it as root: sudo tools/test"))
    try:
        if os.environ.get(INSIDE):
            raise SystemExit(_run_inside(arguments))
        raise SystemExit(_run(arguments))
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except FailedError as error:
        stop("test", error)
    except ImageError as error:
        stop("test", FailedError(f"building the image: {error}"))
    except HostError as error:
        stop("test", FailedError(f"making the test volume: {error.message}"))


def _run(arguments: list[str]) -> int:
    selected = [argument for argument in arguments if argument != "--all"]
    if not selected:
        say("static checks")
        if failed := check.run_checks((*check.STATIC, check.async_check())):
            raise FailedError("static checks: " + ", ".join(failed))
    image = cache_dir() / "image"
    image.parent.mkdir(parents=True, exist_ok=True)
    build_image(image, progress=say)
    _remove_stale_volumes()
    directory = Path(tempfile.mkdtemp(prefix=f"volume-{os.getpid()}-", dir=cache_dir()))
    env = {**os.environ, INSIDE: str(directory), "MICROVM_TEST_IMAGE": str(image)}
    # The namespace dies with its last process, and the loop device with its mount: nothing outlives a kill.
    unshare = ["unshare", "--mount", "--propagation", "private", "--", sys.executable, __file__]
    try:
        return subprocess.run([*unshare, *arguments], env=env, check=False).returncode
    finally:
        shutil.rmtree(directory)


def _run_inside(arguments: list[str]) -> int:
    directory = Path(os.environ[INSIDE])
    mountpoint = directory / "vm"
    make_loop_volume(directory / "volume.xfs", mountpoint, _volume_gib(directory) * GIB)
    env = {**os.environ, "MICROVM_TEST_VOLUME": str(mountpoint)}
    env.pop(INSIDE)
    argv = [str(check.BIN / "pytest"), "-o", f"faulthandler_timeout={HANG_S}", *(arguments or ["tests"])]
    try:
        say("tests")
        return subprocess.run(argv, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, check=False).returncode
    finally:
        remove_loop_volume(mountpoint)


def _volume_gib(directory: Path) -> int:
    free_gib = shutil.disk_usage(directory).free // GIB
    size_gib = min(VOLUME_GIB, free_gib - LEFT_FREE_GIB)
    if size_gib < SMALLEST_VOLUME_GIB:
        needed = SMALLEST_VOLUME_GIB + LEFT_FREE_GIB
        raise FailedError(
            f"{directory} has {free_gib} GiB free and {needed} GiB are needed: set XDG_CACHE_HOME"
        )
    return size_gib


def _remove_stale_volumes() -> None:
    """Files of runs that were killed: their process is gone, so their namespace and mount are too."""
    for directory in cache_dir().glob("volume-*-*"):
        if not Path("/proc", directory.name.split("-")[1]).exists():
            shutil.rmtree(directory)


if __name__ == "__main__":
    main()
