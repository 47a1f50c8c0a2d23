"""The tool catalogue: one declaration per tool, and what is made from it.

It must not know HTTP or MCP. Its neighbours: `fleet` below (through `FleetApi`), `web` and `cli` above.
"""

from microvm.catalogue.api import Call, FleetApi, Progress, no_progress
from microvm.catalogue.documents import hints, openapi, tool_list
from microvm.catalogue.tools import CATALOGUE, PROFILES, Annotations, Catalogue, Tool, find, listed

__all__ = [
    "CATALOGUE",
    "PROFILES",
    "Annotations",
    "Call",
    "Catalogue",
    "FleetApi",
    "Progress",
    "Tool",
    "find",
    "hints",
    "listed",
    "no_progress",
    "openapi",
    "tool_list",
]
