"""Brings a bare Debian machine to the project's own environment, then runs one of the tools in it.

Promises to need nothing but Python and apt, to install only what is missing, by package name, and to say
which step failed and what to do. It must not touch the system's Python: `uv` lives in a virtual environment
of its own. Neighbours: `check`, `suite` and `quickstart`, which run in the environment that this makes.
Standard library only.

    apt packages ─► venv with uv ─► uv sync --locked ─► .venv/bin/python tools/<tool>.py
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

ROOT: Final = Path(__file__).resolve().parent.parent
UV_VERSION: Final = "0.13.9"
OLDEST_PYTHON: Final = (3, 11)
NEWEST_PYTHON: Final = (3, 13)

# A C compiler for the cffi shim.
BUILD_PACKAGES: Final[tuple[str, ...]] = ("gcc", "libc6-dev")
# The loop volume, and what mounts it.
VOLUME_PACKAGES: Final[tuple[str, ...]] = ("mount", "util-linux", "xfsprogs")

TOOLS: Final[Mapping[str, str]] = {"check": "check.py", "test": "suite.py", "quickstart": "quickstart.py"}

INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report it

_STARTED: Final = time.monotonic()


class FailedError(Exception):
    """A step failed; the message says which, why, and what to do."""


def say(text: str) -> None:
    """A line of progress, with the seconds since the start."""
    print(f"[{time.monotonic() - _STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


def stop(tool: str, error: FailedError) -> NoReturn:
    """Ends a tool with what failed."""
    print(f"\ntools/{tool} failed: {error}", file=sys.stderr, flush=True)
    raise SystemExit(1)


def cache_dir() -> Path:
    """Where things are kept that any clone of the project can use again."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "microvm"


def run(argv: Sequence[str], *, what: str, env: Mapping[str, str] | None = None) -> None:
    """Runs a program with its output on our standard error.

    Raises:
        FailedError: It is missing or exits with another code than 0; names `what`.
    """
    try:
        code = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=env, check=False
        ).returncode
    except OSError as error:
        raise FailedError(f"{what}: {argv[0]}: {error.strerror}") from error
    if code:
        raise FailedError(f"{what}: `{' '.join(argv)}` ended with {code}; its last lines above say why")


def install_packages(names: Sequence[str]) -> None:
    """Installs the Debian packages among `names` that are missing."""
    missing = [name for name in names if not _is_installed(name)]
    if not missing:
        return
    command = "apt-get install " + " ".join(missing)
    if os.geteuid() != 0:
        raise FailedError(f"these Debian packages are missing; run: sudo {command}")
    say("installing Debian packages: " + " ".join(missing))
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "-q", "update"], what="refreshing the package lists", env=env)
    options = ["-q", "-y", "--no-install-recommends"]
    run(["apt-get", "install", *options, *missing], what="installing Debian packages", env=env)


def _is_installed(name: str) -> bool:
    query = ["dpkg-query", "-W", "-f", "${db:Status-Abbrev}", name]
    try:
        done = subprocess.run(query, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise FailedError(f"this is not a Debian system; install what provides {name} by hand") from None
    return done.returncode == 0 and done.stdout.startswith("ii")


def packages_for(tool: str) -> list[str]:
    """The Debian packages that a tool needs on this machine."""
    names: list[str] = [*BUILD_PACKAGES]
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        names.append(f"python{sys.version_info[0]}.{sys.version_info[1]}-dev")
    if importlib.util.find_spec("ensurepip") is None:
        names.append(f"python{sys.version_info[0]}.{sys.version_info[1]}-venv")
    if tool != "check":
        sys.path.insert(0, str(ROOT))
        from image import HOST_PACKAGES

        names += [*VOLUME_PACKAGES, *HOST_PACKAGES]
    return names


def make_uv() -> Path:
    """A `uv` of the project's own; made where there is none."""
    home = cache_dir() / f"uv-{UV_VERSION}-py{sys.version_info[0]}.{sys.version_info[1]}"
    uv = home / "bin" / "uv"
    if uv.is_file():
        return uv
    say(f"making a virtual environment for uv in {home}")
    run([sys.executable, "-m", "venv", "--clear", str(home)], what="making a virtual environment")
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, f"uv=={UV_VERSION}"], what="installing uv")
    return uv


def sync(uv: Path, *, dev: bool) -> Path:
    """Installs exactly what `uv.lock` says into `.venv`; returns its Python."""
    say("installing the locked Python packages")
    groups = [] if dev else ["--no-dev", "--inexact"]  # inexact: a developer's tools stay
    env = {**os.environ, "UV_PYTHON": sys.executable, "UV_PYTHON_DOWNLOADS": "never"}
    env.pop("VIRTUAL_ENV", None)
    run(
        [str(uv), "sync", "--quiet", "--locked", "--project", str(ROOT), *groups],
        what="uv sync --locked",
        env=env,
    )
    return ROOT / ".venv" / "bin" / "python"


def main() -> None:
    """`bootstrap.py TOOL ARGUMENTS…`."""
    tool, *arguments = sys.argv[1:]
    if tool == "quickstart":
        from quickstart_options import parse_arguments

        parse_arguments(arguments)  # help and mistakes cost no installation
    os.chdir(ROOT)
    try:
        if not OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
            _use_other_python()
        if tool == "quickstart" and os.geteuid() != 0:
            raise FailedError("it mounts a volume and starts a service; run: sudo tools/quickstart")
        install_packages(packages_for(tool))
        python = sync(make_uv(), dev=tool != "quickstart")
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except FailedError as error:
        stop(tool, error)
    os.execv(python, [str(python), str(ROOT / "tools" / TOOLS[tool]), *arguments])


def _use_other_python() -> NoReturn:
    import shutil

    for minor in range(NEWEST_PYTHON[1], OLDEST_PYTHON[1] - 1, -1):
        if found := shutil.which(f"python3.{minor}"):
            os.execv(found, [found, *sys.argv])
    raise FailedError(f"Python {sys.version.split()[0]} is not supported; install Python 3.11, 3.12 or 3.13")


if __name__ == "__main__":
    main()
