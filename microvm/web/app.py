"""The routes: tools over HTTP, MCP, the catalogue's documents, and health.

Every request passes `_enter` first: names, then authentication, before its body is read and before anybody
learns whether the path exists. It must not run tools (`calls`) or judge requests (`access`). Its neighbour:
`serve`.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias, cast

import trio
from quart import Response, g, request, websocket
from quart.wrappers.base import BaseRequestWebsocket
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from microvm.catalogue import Tool, find, listed, openapi, tool_list
from microvm.catalogue.strict_json import loads
from microvm.errors import MicrovmError, RequestError
from microvm.model import Principal
from microvm.web.access import Access, Peer
from microvm.web.answers import error_answer, json_answer
from microvm.web.calls import Calls, new_trace_id
from microvm.web.failures import collapse, public
from microvm.web.mcp_http import McpDoor
from microvm.web.settings import MAX_BODY_BYTES, WebSettings

BODY_TIMEOUT_S: Final = 60  # 4 MiB at 70 KiB/s; a slower sender is stalling
RESPONSE_TIMEOUT_S: Final = 60  # for sending a finished answer; streams are bounded by their readers instead
_OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
_WELL_KNOWN: Final = "/.well-known/"
_NURSERY: Final = "microvm.nursery"

View: TypeAlias = Callable[..., Awaitable[Response]]


class RequestConnection(TrioASGIHTTPConnection):
    """Quart-Trio's connection, with the request's nursery where a view can find it."""

    async def handle_request(self, nursery: trio.Nursery, request: Any, send: Any) -> None:  # pyright: ignore
        """Serve one request; what a view starts in the nursery ends with it."""
        cast("dict[str, Any]", self.scope)[_NURSERY] = nursery
        await super().handle_request(nursery, request, send)


def make_app(settings: WebSettings, calls: Calls, access: Access, ready: Callable[[], bool]) -> QuartTrio:
    """The application.

    Args:
        settings: Limits and version.
        calls: Runs tools.
        access: Judges requests.
        ready: Whether the service takes work.
    """
    app = QuartTrio("microvm", static_folder=None)
    app.asgi_http_class = RequestConnection
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    app.config["BODY_TIMEOUT"] = BODY_TIMEOUT_S
    app.config["RESPONSE_TIMEOUT"] = RESPONSE_TIMEOUT_S
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    app.url_map.strict_slashes = False
    app.before_request(functools.partial(_enter, access, request))
    app.before_websocket(functools.partial(_enter, access, websocket))
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _failure)
    _add_tools(app, settings, calls)
    _add_mcp(app, McpDoor(calls, settings.version), calls)
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


def _guarded(view: View) -> View:
    """`view`, with its failures collapsed to one and answered."""

    @functools.wraps(view)
    async def guarded(**arguments: Any) -> Response:
        try:
            return await view(**arguments)
        except HTTPException:
            raise
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001  # the edge: everything is answered
            return error_answer(public(collapse(error), g.trace_id))

    return guarded


async def _http_error(error: HTTPException) -> Response:
    """What Quart and Werkzeug refuse, in this service's words."""
    if isinstance(error, RequestEntityTooLarge):
        return error_answer(RequestError("payload_too_large", f"a body holds at most {MAX_BODY_BYTES} bytes"))
    status = error.code or 500
    if status == 404:
        return error_answer(RequestError("not_found", "there is no such path"))
    answer = error_answer(RequestError("invalid_argument", error.name), status=status)
    for name, value in error.get_headers():
        if name.lower() == "allow":
            answer.headers[name] = value
    return answer


async def _failure(error: Exception) -> Response:
    return error_answer(public(collapse(error), g.get("trace_id", "-")))


def _principal() -> Principal:
    return cast("Principal", g.principal)


async def _body() -> bytes:
    return await request.get_data(cache=False, as_text=False, parse_form_data=False)


def _add_tools(app: QuartTrio, settings: WebSettings, calls: Calls) -> None:
    @app.post("/v1/tools/<name>")
    @_guarded
    async def call_tool(name: str) -> Response:
        tool = find(calls.catalogue, name)
        body = await _body()
        result = await calls.run(
            tool,
            loads(body) if body else {},
            _principal(),
            trace_id=g.trace_id,
            limit_s=settings.call_limit_s,
        )
        return json_answer(result)

    @app.get("/v1/tools")
    @_guarded
    async def list_tools() -> Response:
        return json_answer(tool_list(_listed(calls)))

    @app.get("/openapi.json")
    @_guarded
    async def document() -> Response:
        return json_answer(openapi(_listed(calls), version=settings.version))

    _ = (call_tool, list_tools, document)


def _listed(calls: Calls) -> list[Tool]:
    return listed(calls.catalogue, _principal(), request.args.get("profile"))


def _add_mcp(app: QuartTrio, door: McpDoor, calls: Calls) -> None:
    @_guarded
    async def mcp() -> Response:
        tools = _listed(calls)
        body = await _body()
        nursery = cast("trio.Nursery", cast("dict[str, Any]", request.scope)[_NURSERY])
        return await door.answer(body, list(request.headers.items()), tools, _principal(), nursery)

    app.add_url_rule("/mcp", "mcp", mcp, methods=["POST"])  # and "/mcp/", since slashes are not strict
    app.add_url_rule("/mcp/", "mcp_slash", mcp, methods=["POST"])


def _add_health(app: QuartTrio, ready: Callable[[], bool]) -> None:
    @app.get("/healthz")
    @_guarded
    async def healthz() -> Response:
        return json_answer({"ok": True})

    @app.get("/readyz")
    @_guarded
    async def readyz() -> Response:
        ok = ready()
        return json_answer({"ok": ok}, 200 if ok else 503)

    _ = (healthz, readyz)
