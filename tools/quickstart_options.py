"""The arguments of `tools/quickstart`: told right or wrong before anything is installed.

Promises defaults that do not look at the machine. Neighbours: `bootstrap`, which asks first, and
`quickstart`, which obeys. Standard library only.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

# The configuration's own default, which cannot be imported before there is an environment.
DEFAULT_STATE_DIR: Final = Path("/var/lib/microvm")
VOLUME_GIB: Final = 16  # four VMs of the default size with room for templates and the reserve
SMALLEST_VOLUME_GIB: Final = 6  # one VM, its template and the reserve
PORTS: Final = range(1, 65536)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; what is wrong, or `--help`, ends the process."""
    parser = argparse.ArgumentParser(
        prog="tools/quickstart", description="Set everything up, start the service and prove that it works."
    )
    parser.add_argument("--once", action="store_true", help="stop the service after the self-check")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        default=DEFAULT_STATE_DIR,
        help="of a further, independent service; default: %(default)s",
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="of 127.0.0.1; default: the configuration's, else 8090"
    )
    parser.add_argument(
        "--volume-gib",
        type=int,
        metavar="N",
        help=f"size of a new XFS volume; default: {VOLUME_GIB}, or less where the disk has less",
    )
    options = parser.parse_args(argv)
    if options.port is not None and options.port not in PORTS:
        parser.error(f"--port is {PORTS[0]} to {PORTS[-1]}")
    if options.volume_gib is not None and options.volume_gib < SMALLEST_VOLUME_GIB:
        parser.error(f"--volume-gib is at least {SMALLEST_VOLUME_GIB}")
    options.state_dir = options.state_dir.absolute()
    return options
