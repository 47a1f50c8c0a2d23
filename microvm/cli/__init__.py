"""The command line: talks to a running service, administers tokens, or starts the daemon.

Promises exit code 0 for done, 1 for failed, 2 for a wrong command line, and for `vm exec` the guest's own.
It must not hold logic that the service has too: every `vm` command is one or more calls of the HTTP API.
Neighbour: `daemon`, which `serve` starts.
"""

from microvm.cli.app import main

__all__ = ["main"]
