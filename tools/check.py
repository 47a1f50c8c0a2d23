"""Format, lint, types, imports and unit tests: what every commit must pass, in under a minute.

Promises to run every check whatever the others say, and to end with what failed. It must not need root, an
image or a volume. Neighbour: `suite`, which runs the static ones of these, the slow `async_check`, and then
all tests.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
BIN: Final = ROOT / ".venv" / "bin"

STATIC: Final[tuple[tuple[str, ...], ...]] = (
    ("pyright", "--warnings"),
    ("ruff", "format", "--check", "--quiet", "."),
    ("ruff", "check", "--quiet", "."),
    ("lint-imports", "--no-cache", "--no-logo"),
)
UNIT: Final = ("pytest", "-q", "tests/unit")

# What ruff's ASYNC rules do not know. Left out: rules for libraries that promise a checkpoint in every
# function (9xx), for exceptions that a cancellation may replace (120, 123: here the cancellation wins, by
# design), and what misreads functions that pass task_status on or implement a protocol (100, 114, 124, 128).
# Takes half a minute.
ASYNC: Final = ("flake8-async", "--disable=ASYNC100,ASYNC114,ASYNC120,ASYNC123,ASYNC124,ASYNC128,ASYNC9")


def async_check() -> tuple[str, ...]:
    """The deep check of everything that runs under Trio."""
    return (*ASYNC, *sorted(str(file.relative_to(ROOT)) for file in (ROOT / "microvm").rglob("*.py")))


def run_checks(commands: Sequence[Sequence[str]]) -> list[str]:
    """Runs the programs, two at a time, their output only when they fail; returns the names of failures."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        return [name for name in pool.map(_run_check, commands) if name]


def _run_check(command: Sequence[str]) -> str | None:
    """Runs one program; returns its name if it failed."""
    name, *arguments = command
    began = time.monotonic()
    done = subprocess.run(
        [str(BIN / name), *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    title = " ".join([name, *arguments[:1]]) if name == "ruff" else name
    state = "failed" if done.returncode else "ok"
    lines = f"{title:<14} {state:<6} {time.monotonic() - began:5.1f} s"
    if done.returncode:
        lines += "\n" + done.stdout
    elif name == "pytest":
        lines += "  " + done.stdout.splitlines()[-1]
    print(lines, flush=True)
    return title if done.returncode else None


def main() -> None:
    """`check.py [--static]`."""
    commands = STATIC if "--static" in sys.argv[1:] else (*STATIC, UNIT)
    failed = run_checks(commands)
    if failed:
        print("failed: " + ", ".join(failed), file=sys.stderr)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
