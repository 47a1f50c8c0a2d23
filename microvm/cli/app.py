"""The commands and what their failures become: the whole mapping from errors to exit codes.

Promises that no traceback reaches a person for anything but a bug. It must not call the service itself.
Neighbours: `vm` and `admin`, which hold the commands.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from microvm import __version__
from microvm.cli import admin, vm
from microvm.cli.client import UsageError
from microvm.cli.console import print_error, print_line
from microvm.errors import MicrovmError

FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report it

app = typer.Typer(
    name="microvm",
    help="Private Linux microVMs over MCP and HTTP.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(vm.app, name="vm")
app.add_typer(admin.image_app, name="image")
admin.register(app)


def _print_version(value: bool) -> None:  # noqa: FBT001 - a typer callback is called with the option's value
    if value:
        print_line(f"microvm {__version__}")
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction]
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Private Linux microVMs over MCP and HTTP."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits the process with its code."""
    sys.exit(run(sys.argv[1:] if argv is None else list(argv)))


def run(argv: list[str]) -> int:
    """Runs the command line and returns its exit code."""
    as_json = "--json" in (argv[: argv.index("--")] if "--" in argv else argv)
    try:
        app(args=argv, prog_name="microvm")
    except SystemExit as done:  # typer ends this way, well or badly; it has printed what was wrong
        return done.code if isinstance(done.code, int) else 0
    except UsageError as error:
        print_line(f"microvm: {error}", to=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except MicrovmError as error:
        print_error(error, as_json=as_json)
        return FAILED
    return 0
