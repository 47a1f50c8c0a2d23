"""Options that several commands share, and how their texts become values.

Promises that a wrong value is a usage error that names the option. It must not read the environment: that
is `client`. Neighbours: `vm` and `admin`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

import typer

from microvm.cli.client import UsageError

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text for people.")]
Config = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The configuration [MICROVM_CONFIG].")
]
VmId = Annotated[str, typer.Argument(metavar="VM", help="The VM's id.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]
RequestId = Annotated[
    str | None, typer.Option("--request-id", help="Makes a retry safe: the same id never acts twice.")
]
Env = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="May be repeated.")]

_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION: Final = re.compile(r"([0-9]+)([smhd]?)")


def parse_env(pairs: list[str] | None) -> dict[str, str] | None:
    """`NAME=VALUE` texts as a mapping; None when there are none."""
    if not pairs:
        return None
    env: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            # The text may be a secret value whose name was forgotten: it is not repeated.
            raise UsageError("--env wants NAME=VALUE")
        env[name] = value
    return env


def parse_duration(text: str, *, option: str) -> int:
    """Seconds of a duration such as `90`, `45m`, `12h` or `30d`."""
    match = _DURATION.fullmatch(text)
    if not match or int(match[1]) == 0:
        raise UsageError(f"{option} wants a duration such as 90, 45m, 12h or 30d, not {text!r}")
    return int(match[1]) * _UNITS[match[2]]
