"""The Model Context Protocol without I/O: messages in, decisions out, both eras.

It must not open, wait for or log anything, nor know the catalogue. Its neighbour above: `web`.
"""

from microvm.mcp.inbound import Notification, Request, accepts, read_message
from microvm.mcp.messages import Reply, error_message, parse_error, progress_message
from microvm.mcp.server import ProgressLine, ServerInfo, ToolCall, fail_call, finish_call, respond

__all__ = [
    "Notification",
    "ProgressLine",
    "Reply",
    "Request",
    "ServerInfo",
    "ToolCall",
    "accepts",
    "error_message",
    "fail_call",
    "finish_call",
    "parse_error",
    "progress_message",
    "read_message",
    "respond",
]
