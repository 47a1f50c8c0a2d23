"""VMs and what is done with them: one driver task each, templates, receipts, room, recovery, drain.

The only layer that asks `policy`. It gathers facts, has policy decide, runs the effects, and feeds every
completion and failure back. It must not know HTTP, MCP or tools; `catalogue` calls it, and it calls `vmm`,
`agentlink`, `store` and `host`.
"""

from microvm.fleet.fleet import Fleet
from microvm.fleet.image import Image, open_image, place_base, verify_image
from microvm.fleet.layout import Layout
from microvm.fleet.service import FleetSettings, open_fleet

__all__ = [
    "Fleet",
    "FleetSettings",
    "Image",
    "Layout",
    "open_fleet",
    "open_image",
    "place_base",
    "verify_image",
]
