"""Linux microVMs for workspace credentials, over MCP and HTTP, from one Trio daemon.

The package's layers and what each may import are in `ARCHITECTURE.md`; import-linter holds them.
"""

from typing import Final

__version__: Final = "0.1.0"
