"""Trees that were unpacked: taking a package tar apart, and running its programs without installing them.

Programs run through the tree's own dynamic linker, so that neither root nor the machine's libraries matter;
where a program needs its paths to be true, in a chroot, for a builder who is not root in a user namespace.
It must not know what the programs do.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from image.errors import ImageError

LIBRARIES: Final = "usr/lib/x86_64-linux-gnu"
LINKER: Final = f"{LIBRARIES}/ld-linux-x86-64.so.2"


def unpack(tar: Path, directory: Path, names: Sequence[str], *, leave: Sequence[str] = ()) -> None:
    """Unpack some of a tar, owned by whoever runs this.

    Args:
        tar: The archive, its members named "./…".
        directory: Made if it is not there.
        names: What to take, as tar's patterns without the "./".
        leave: What to leave out of that.

    Raises:
        ImageError: tar failed; a name that is not there counts.
    """
    directory.mkdir(parents=True, exist_ok=True)
    command = [
        "tar",
        f"--directory={directory}",
        "--no-same-owner",
        "--extract",
        f"--file={tar}",
        "--wildcards",
    ]
    command += [f"--exclude=./{name}" for name in leave] + [f"./{name}" for name in names]
    run(command)


def linked(root: Path, program: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs a program of a tree through the tree's own linker and libraries."""
    return [*linker(root), str(root / program), *arguments]


def linker(root: Path) -> list[str]:
    """The command that starts a tree's dynamic linker, kept to the tree's libraries."""
    return [str(root / LINKER), "--inhibit-cache", "--library-path", str(root / LIBRARIES)]


def rooted(root: Path, arguments: Sequence[str]) -> list[str]:
    """The command that runs a program with a tree as its root directory."""
    enter = ["chroot", str(root), *arguments]
    return enter if os.geteuid() == 0 else ["unshare", "--map-root-user", *enter]


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a program to its end with a fixed environment; its standard output.

    Raises:
        ImageError: It is missing or failed; what it said is in the message.
    """
    variables = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", **(environment or {})}
    try:
        done = subprocess.run(
            command,
            check=False,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            umask=0o022,
        )
    except OSError as error:
        raise ImageError(f"cannot run {command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise ImageError(
            f"{Path(command[0]).name} failed with status {done.returncode}: {done.stderr.strip()[-2000:]}"
        )
    return done.stdout
