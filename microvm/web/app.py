"""The routes: tools over HTTP, MCP, streams, the catalogue's documents, and health.

Every request passes `_enter` first: names, then authentication, before its body is read and before anybody
learns whether the path exists. It must not run tools (`calls`) or judge requests (`access`). Its neighbour:
`serve`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Final, cast

import trio
from quart import Request, Response, g, request, websocket
from quart.wrappers.base import BaseRequestWebsocket
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from microvm.catalogue import Tool, find, listed, openapi, tool_list
from microvm.catalogue.strict_json import loads
from microvm.errors import MicrovmError, RequestError
from microvm.web.access import Access, Peer
from microvm.web.answers import error_answer, json_answer
from microvm.web.calls import Calls, new_trace_id
from microvm.web.failures import collapse, public
from microvm.web.mcp_http import McpDoor
from microvm.web.settings import MAX_BODY_BYTES, WebSettings
from microvm.web.stream_routes import add_streams
from microvm.web.streams import StreamApi
from microvm.web.views import NURSERY, UPLOAD, guarded, principal

BODY_TIMEOUT_S: Final = 60  # 4 MiB at 70 KiB/s; a slower sender is stalling
RESPONSE_TIMEOUT_S: Final = 60  # for sending a finished answer; streams are bounded by their readers instead
_OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
_WELL_KNOWN: Final = "/.well-known/"
_UPLOADS: Final = re.compile(r"/v1/vms/[^/]+/(files|archive)(/.*)?", re.DOTALL)


class RequestConnection(TrioASGIHTTPConnection):
    """Quart-Trio's connection, with the request's nursery where a view can find it, and bodies of any size.

    Quart collects a body in memory as fast as it comes. That of an upload goes through a channel instead,
    which lets the client send as fast as the view reads.
    """

    async def __call__(self, receive: Any, send: Any) -> None:
        """Serve one request."""
        cast("dict[str, Any]", self.scope)[UPLOAD] = trio.open_memory_channel[bytes](0)
        await super().__call__(receive, send)

    async def handle_messages(self, nursery: trio.Nursery, request: Request, receive: Any) -> None:  # pyright: ignore
        """Hands the body over; the end of the connection ends the request."""
        if request.method == "PUT" and _UPLOADS.fullmatch(request.path):
            await _bring(receive, cast("dict[str, Any]", self.scope)[UPLOAD][0])
            nursery.cancel_scope.cancel(reason="the client has gone")
        else:
            await super().handle_messages(nursery, request, receive)

    async def handle_request(self, nursery: trio.Nursery, request: Any, send: Any) -> None:  # pyright: ignore
        """Serve one request; what a view starts in the nursery ends with it."""
        cast("dict[str, Any]", self.scope)[NURSERY] = nursery
        await super().handle_request(nursery, request, send)


async def _bring(receive: Any, body: trio.MemorySendChannel[bytes]) -> None:
    """Passes a body's pieces on, one at a time, and returns when the client has gone."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        if message.get("body"):
            try:
                await body.send(message["body"])
            except trio.BrokenResourceError:
                continue  # nobody wants it any more; what comes behind it still has to be taken
        if not message.get("more_body", False):
            body.close()


def make_app(
    settings: WebSettings,
    calls: Calls,
    access: Access,
    streams: StreamApi,
    ready: Callable[[], bool],
    closing: trio.Event,
) -> QuartTrio:
    """The application.

    Args:
        settings: Limits and version.
        calls: Runs tools.
        access: Judges requests.
        streams: What transfers, events and live output are made of.
        ready: Whether the service takes work.
        closing: Ends the streams that have no end of their own.
    """
    app = QuartTrio("microvm", static_folder=None)
    app.asgi_http_class = RequestConnection
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    app.config["BODY_TIMEOUT"] = BODY_TIMEOUT_S
    app.config["RESPONSE_TIMEOUT"] = RESPONSE_TIMEOUT_S
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    app.url_map.strict_slashes = False
    app.url_map.merge_slashes = False  # it would answer with a redirect
    app.before_request(functools.partial(_enter, access, request))
    app.before_websocket(functools.partial(_enter, access, websocket))
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _failure)
    _add_tools(app, settings, calls)
    _add_mcp(app, McpDoor(calls, settings.version), calls)
    add_streams(app, access, streams, closing)
    _add_health(app, ready)
    return app


async def _enter(access: Access, request: BaseRequestWebsocket) -> Response | None:
    """Turn a request or a WebSocket handshake away, or note whose it is."""
    g.trace_id = new_trace_id(request.headers.get("traceparent"))
    peer = Peer.of(cast("dict[str, Any]", request.scope))
    path = request.path
    try:
        access.check_names(peer, request.headers.getlist("host"), request.headers.getlist("origin"))
        if path in _OPEN_PATHS:
            access.count_anonymous(peer)
        elif path.startswith(_WELL_KNOWN):
            # Clients look for OAuth here before they log in; anything but a JSON 404 leads them astray.
            access.count_anonymous(peer)
            raise RequestError("not_found", "there is no such document; use a bearer token")
        else:
            g.principal = access.admit(peer, request.headers.getlist("authorization"))
    except MicrovmError as error:
        return error_answer(error)
    return None


async def _http_error(error: HTTPException) -> Response:
    """What Quart and Werkzeug refuse, in this service's words."""
    if isinstance(error, RequestEntityTooLarge):
        return error_answer(RequestError("payload_too_large", f"a body holds at most {MAX_BODY_BYTES} bytes"))
    status = error.code or 500
    if status == 404:
        return error_answer(RequestError("not_found", "there is no such path"))
    allowed = next((value for name, value in error.get_headers() if name.lower() == "allow"), None)
    if allowed is None:
        return error_answer(RequestError("invalid_argument", error.name), status=status)
    answer = error_answer(RequestError("invalid_argument", f"this path takes {allowed}"), status=status)
    answer.headers["allow"] = allowed
    return answer


async def _failure(error: Exception) -> Response:
    return error_answer(public(collapse(error), g.get("trace_id", "-")))


async def _body() -> bytes:
    return await request.get_data(cache=False, as_text=False, parse_form_data=False)


def _add_tools(app: QuartTrio, settings: WebSettings, calls: Calls) -> None:
    @app.post("/v1/tools/<name>")
    @guarded
    async def call_tool(name: str) -> Response:
        tool = find(calls.catalogue, name)
        body = await _body()
        result = await calls.run(
            tool,
            loads(body) if body else {},
            principal(),
            trace_id=g.trace_id,
            limit_s=settings.call_limit_s,
        )
        return json_answer(result)

    @app.get("/v1/tools")
    @guarded
    async def list_tools() -> Response:
        return json_answer(tool_list(_listed(calls)))

    @app.get("/openapi.json")
    @guarded
    async def document() -> Response:
        return json_answer(openapi(_listed(calls), version=settings.version))

    _ = (call_tool, list_tools, document)


def _listed(calls: Calls) -> list[Tool]:
    return listed(calls.catalogue, principal(), request.args.get("profile"))


def _add_mcp(app: QuartTrio, door: McpDoor, calls: Calls) -> None:
    @guarded
    async def mcp() -> Response:
        tools = _listed(calls)
        body = await _body()
        nursery = cast("trio.Nursery", cast("dict[str, Any]", request.scope)[NURSERY])
        return await door.answer(body, list(request.headers.items()), tools, principal(), nursery)

    app.add_url_rule("/mcp", "mcp", mcp, methods=["POST"])  # and "/mcp/", since slashes are not strict
    app.add_url_rule("/mcp/", "mcp_slash", mcp, methods=["POST"])


def _add_health(app: QuartTrio, ready: Callable[[], bool]) -> None:
    @app.get("/healthz")
    @guarded
    async def healthz() -> Response:
        return json_answer({"ok": True})

    @app.get("/readyz")
    @guarded
    async def readyz() -> Response:
        ok = ready()
        return json_answer({"ok": ok}, 200 if ok else 503)

    _ = (healthz, readyz)
