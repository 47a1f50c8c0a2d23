"""The HTTP and MCP doors; the only package that knows Quart and Hypercorn.

It must not decide anything about VMs. Its neighbours: `catalogue` below, `daemon` above.
"""

from microvm.web.serve import serve_web
from microvm.web.server import Bound
from microvm.web.settings import WebSettings
from microvm.web.streams import StreamApi

__all__ = ["Bound", "StreamApi", "WebSettings", "serve_web"]
