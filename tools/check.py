"""Format, lint, types, imports and unit tests: what every commit must pass, in under a minute.

Promises to run every check whatever the others say, and to end with what failed. It must not need root, an
image or a volume. Neighbour: `suite`, which runs the static ones of these and then all tests.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
BIN: Final = ROOT / ".venv" / "bin"

STATIC: Final[tuple[tuple[str, ...], ...]] = (
    ("ruff", "format", "--check", "--quiet", "."),
    ("ruff", "check", "--quiet", "."),
    ("pyright", "--warnings"),
    ("lint-imports", "--no-cache", "--no-logo"),
    ("flake8-async", "--disable=ASYNC124"),  # a protocol decides what is async, not one implementation
)
UNIT: Final = ("pytest", "-q", "tests/unit")


def run_checks(commands: Sequence[Sequence[str]]) -> list[str]:
    """Runs the programs in turn, their output only when they fail; returns the names of failures."""
    failed: list[str] = []
    for name, *arguments in commands:
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
        print(f"{title:<14} {state:<6} {time.monotonic() - began:5.1f} s", flush=True)
        if done.returncode or name == "pytest":
            print(done.stdout, flush=True)
        if done.returncode:
            failed.append(title)
    return failed


def main() -> None:
    """`check.py [--static]`."""
    commands = STATIC if "--static" in sys.argv[1:] else (*STATIC, UNIT)
    failed = run_checks(commands)
    if failed:
        print("failed: " + ", ".join(failed), file=sys.stderr)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
