"""Debian packages: where this machine gets them from, and a tree of them as a tar, by mmdebstrap.

The mirror, proxy and checks are those of the machine's APT, so that a build reaches what the machine reaches.
It must not know what a tree is for; `build` asks for two, the guest's and the tools'.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from image.errors import ImageError

HOST_PACKAGES: Final = ("debian-archive-keyring", "mmdebstrap", "uidmap")
"""Debian packages that a build needs on the machine; uidmap only where the builder is not root."""

KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

_TAIL_LINES: Final = 15
"""Of mmdebstrap's output in an error: APT's own message and mmdebstrap's last words fit."""

_PASSED_ON: Final = ("Acquire::http", "Acquire::https", "Acquire::Check-", "Acquire::Retries")
"""APT settings that a machine needs to reach its mirror, and nothing else of the machine's."""


@dataclass(frozen=True, slots=True)
class Target:
    """One entry of APT's sources, as `apt-get indextargets` names it."""

    uri: str
    release: str
    component: str
    origin: str


@dataclass(frozen=True, slots=True)
class Tree:
    """What to install: `variant` and packages as mmdebstrap takes them; hooks run as `hook ROOT`."""

    variant: str
    packages: tuple[str, ...]
    dpkg_options: tuple[str, ...] = ()


def plan_sources(targets: Sequence[Target], suite: str, mirror: str) -> list[str]:
    """A sources.list's lines for a suite: its archive, updates, and security updates where they are known.

    Args:
        targets: What the machine's APT knows.
        suite: Debian's name of the release wanted; it need not be the machine's own.
        mirror: An archive to use alone, or empty for the machine's.

    Raises:
        ImageError: The machine has no Debian source and no mirror was given.
    """
    if mirror:
        return [f"deb {mirror} {suite} main"]
    ours = [target for target in targets if target.component == "main" and _is_debian(target)]
    archives = [target.uri for target in ours if "-" not in target.release.split("/")[0]]
    security = [target.uri for target in ours if target.release.endswith("-security")]
    if not archives:
        raise ImageError("this machine's APT has no Debian source: set `mirror` in the recipe")
    lines = [f"deb {archives[0]} {suite} main", f"deb {archives[0]} {suite}-updates main"]
    return [*lines, f"deb {security[0]} {suite}-security main"] if security else lines


def _is_debian(target: Target) -> bool:
    if target.origin:
        return target.origin == "Debian"
    # Before the first `apt-get update` APT does not know a source's origin; Debian's layout is its own.
    return urlsplit(target.uri).path.strip("/").split("/")[-1] in {"debian", "debian-security"}


def read_targets() -> list[Target]:
    """The machine's APT sources; none where there is no APT."""
    if shutil.which("apt-get") is None:
        return []
    form = "$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(ORIGIN)"
    lines = _output(["apt-get", "indextargets", "--format", form, "Created-By: Packages"])
    fields = [line.split("|") for line in lines if line.count("|") == 3]
    return [Target(uri, release, component, _known(origin)) for uri, release, component, origin in fields]


def _known(field: str) -> str:
    return "" if field.startswith("$(") else field


def read_apt_options() -> list[str]:
    """The machine's own way to its mirror (proxies, relaxed date checks), as APT configuration lines."""
    if shutil.which("apt-config") is None:
        return []
    lines = [line.strip() for line in _output(["apt-config", "dump"])]
    return [line for line in lines if line.startswith(_PASSED_ON) and not line.endswith('"";')]


def install_tree(
    tree: Tree,
    suite: str,
    sources: Sequence[str],
    epoch: int,
    output: Path,
    *,
    progress: Callable[[str], None],
    hook: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Install packages into a new tree and write it as a tar, the same bytes for the same package versions.

    Args:
        tree: Variant and packages.
        suite: Debian's name of the release.
        sources: Lines of a sources.list.
        epoch: The latest time that any file may carry.
        output: The tar to write.
        progress: Told mmdebstrap's steps.
        hook: An executable run with the tree's path before it is packed.
        environment: More for the hook.

    Raises:
        ImageError: mmdebstrap is missing or failed; its last lines are in the message.
    """
    if shutil.which("mmdebstrap") is None:
        raise ImageError(f"mmdebstrap is not installed: apt-get install {' '.join(HOST_PACKAGES)}")
    mode = "root" if os.geteuid() == 0 else "unshare"
    command = [
        "mmdebstrap",
        f"--mode={mode}",
        f"--variant={tree.variant}",
        "--architectures=amd64",
        "--format=tar",
    ]
    command += [f"--include={','.join(tree.packages)}"]
    command += [f"--dpkgopt={option}" for option in tree.dpkg_options]
    command += [f"--aptopt={option}" for option in read_apt_options()]
    command += [f"--keyring={KEYRING}"] if KEYRING.exists() else []
    when = "extract" if tree.variant == "extract" else "customize"
    command += [f"--{when}-hook={hook}"] if hook else []
    command += [suite, str(output), *sources]
    variables = {"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"), "LC_ALL": "C.UTF-8"}
    variables |= {"SOURCE_DATE_EPOCH": str(epoch), "TMPDIR": scratch_folder(), **(environment or {})}
    _follow(command, variables, progress)


def scratch_folder() -> str:
    """Where the tree is put together: TMPDIR, else a directory that is on disk where /tmp is memory."""
    return os.environ.get("TMPDIR", "/var/tmp")  # noqa: S108 (temporary names are made unguessable in it)


def _follow(command: Sequence[str], environment: Mapping[str, str], progress: Callable[[str], None]) -> None:
    tail: list[str] = []
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        umask=0o022,  # the builder's own would end up in the tree
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail = [*tail[1 - _TAIL_LINES :], line.rstrip()]
            if line.startswith("I: ") and line.rstrip().endswith("..."):
                progress("  " + line[3:].rstrip())
    if process.returncode != 0:
        raise ImageError(f"mmdebstrap failed with status {process.returncode}:\n" + "\n".join(tail))


def _output(command: Sequence[str]) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ImageError(f"{command[0]} cannot tell this machine's Debian sources: {error}") from error
    return done.stdout.splitlines()
