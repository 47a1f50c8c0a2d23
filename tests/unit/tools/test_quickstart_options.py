"""What quickstart is asked for is looked at before anything is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from microvm.daemon.settings import DEFAULT_STATE_DIR

TOOLS = Path(__file__).resolve().parents[3] / "tools"


def ask(*argv: str) -> subprocess.CompletedProcess[str]:
    """Asks on a wide terminal, without a program to install anything with: PATH is empty."""
    env = {"PATH": "", "COLUMNS": "200"}
    command = [sys.executable, str(TOOLS / "bootstrap.py"), "quickstart", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def test_help_needs_no_installation() -> None:
    done = ask("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"default: {DEFAULT_STATE_DIR}" in done.stdout


@pytest.mark.parametrize("argv", [["--nope"], ["--port", "0"], ["--port", "x"], ["--volume-gib", "1"]])
def test_a_mistake_is_code_2_and_installs_nothing(argv: list[str]) -> None:
    done = ask(*argv)
    assert done.returncode == 2
    assert argv[0] in done.stderr
    assert "installing" not in done.stderr
