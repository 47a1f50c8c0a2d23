"""The routes of streams: transfers, events, live output; and the command line's, by which a workspace ends.

It reads requests and hands them on. It must not move bytes (`transfers`, `events`, `follow`). Neighbour:
`app`.
"""

from __future__ import annotations

from typing import Any, Final, cast

import trio
from quart import Response, g, request, websocket
from quart.wrappers.base import BaseRequestWebsocket
from quart_trio import QuartTrio

from microvm.catalogue.strict_json import loads
from microvm.errors import MicrovmError, RequestError
from microvm.model import WorkspaceId
from microvm.web.access import OPERATOR, Access, Peer
from microvm.web.answers import error_answer, json_answer
from microvm.web.events import answer_events, parse_last_id
from microvm.web.follow import parse_cursor, serve_follow
from microvm.web.streams import Pass, StreamApi
from microvm.web.transfers import Exchange, Upload
from microvm.web.views import NURSERY, UPLOAD, guarded, principal

DEFAULT_MODE: Final = "0644"
_FLAGS: Final = {"": True, "1": True, "true": True, "0": False, "false": False}


def add_streams(app: QuartTrio, access: Access, streams: StreamApi, closing: trio.Event) -> None:
    """Adds the routes.

    Args:
        app: Where to.
        access: Judges again, while streams go on.
        streams: The fleet.
        closing: Ends what has no end of its own.
    """
    _add_transfers(app, access, streams)
    _add_events(app, access, streams, closing)
    _add_follow(app, access, streams)
    _add_end_workspace(app, streams)


def _permit(access: Access, asked: BaseRequestWebsocket) -> Pass:
    peer = Peer.of(cast("dict[str, Any]", asked.scope))
    authorization = asked.headers.getlist("authorization")
    return Pass(lambda: access.admit(peer, authorization))


def _check_query(asked: BaseRequestWebsocket, *known: str) -> None:
    for name in asked.args:
        if name not in known:
            raise RequestError("invalid_argument", f"there is no query parameter {name!r}")


def _flag(name: str, *, default: bool) -> bool:
    text = request.args.get(name)
    if text is None:
        return default
    if text.lower() not in _FLAGS:
        raise RequestError("invalid_argument", f"{name}: 1 or 0")
    return _FLAGS[text.lower()]


def _add_transfers(app: QuartTrio, access: Access, streams: StreamApi) -> None:
    def exchange(*known: str) -> Exchange:
        _check_query(request, *known)
        scope = cast("dict[str, Any]", request.scope)
        return Exchange(streams, principal(), _permit(access, request), scope[NURSERY], g.trace_id)

    def upload(permit: Pass) -> Upload:
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise RequestError(
                "invalid_argument", f"Content-Encoding: {encoding} is not understood; send it as it is"
            )
        receive = cast("dict[str, Any]", request.scope)[UPLOAD][1]
        return Upload(receive, request.content_length, permit)

    @app.get("/v1/vms/<vm_id>/files/<path:path>")
    @guarded
    async def get_file(vm_id: str, path: str) -> Response:
        return await exchange().get_file(
            vm_id,
            path,
            wanted=request.headers.get("Range"),
            condition=request.headers.get("If-Range"),
            head=request.method == "HEAD",
        )

    @app.put("/v1/vms/<vm_id>/files/<path:path>")
    @guarded
    async def put_file(vm_id: str, path: str) -> Response:
        transfer = exchange("mode", "make_parents")
        return await transfer.put_file(
            vm_id,
            path,
            upload(transfer.permit),
            mode=request.args.get("mode", DEFAULT_MODE),
            make_parents=_flag("make_parents", default=True),
        )

    @app.get("/v1/vms/<vm_id>/archive/", defaults={"path": "."})
    @app.get("/v1/vms/<vm_id>/archive/<path:path>")
    @guarded
    async def get_archive(vm_id: str, path: str) -> Response:
        return await exchange().get_archive(vm_id, path, head=request.method == "HEAD")

    @app.put("/v1/vms/<vm_id>/archive/", defaults={"path": "."})
    @app.put("/v1/vms/<vm_id>/archive/<path:path>")
    @guarded
    async def put_archive(vm_id: str, path: str) -> Response:
        transfer = exchange()
        return await transfer.put_archive(vm_id, path, upload(transfer.permit))

    _ = (get_file, put_file, get_archive, put_archive)


def _add_events(app: QuartTrio, access: Access, streams: StreamApi, closing: trio.Event) -> None:
    @app.get("/v1/events")
    @guarded
    async def events() -> Response:
        _check_query(request, "all")
        listener = streams.listen(
            principal(),
            all_workspaces=_flag("all", default=False),
            after=parse_last_id(request.headers.get("Last-Event-ID")),
        )
        nursery = cast("dict[str, Any]", request.scope)[NURSERY]
        return answer_events(listener, principal(), _permit(access, request), closing, nursery)

    _ = events


def _add_follow(app: QuartTrio, access: Access, streams: StreamApi) -> None:
    @app.websocket("/v1/vms/<vm_id>/jobs/<job_id>/stream")
    async def follow(vm_id: str, job_id: str) -> Response | None:
        try:
            _check_query(websocket, "stdout", "stderr")
            cursor = parse_cursor(websocket.args.get("stdout"), websocket.args.get("stderr"))
            follower = streams.follow(principal(), vm_id, job_id, cursor)
        except MicrovmError as error:
            return error_answer(error)  # the handshake's answer
        await serve_follow(websocket, follower, _permit(access, websocket), g.trace_id)
        return None

    _ = follow


def _add_end_workspace(app: QuartTrio, streams: StreamApi) -> None:
    @app.post("/v1/admin/end-workspace")
    @guarded
    async def end_workspace() -> Response:
        # Revoking is local administration, as issuing is: through other doors there is no such path.
        if Peer.of(cast("dict[str, Any]", request.scope)).door != "admin" or principal() is not OPERATOR:
            raise RequestError("not_found", "there is no such path")
        asked = loads(await request.get_data(cache=False, as_text=False, parse_form_data=False))
        if not isinstance(asked, dict):
            raise RequestError("invalid_argument", "a JSON object is wanted")
        fields = cast("dict[str, Any]", asked)
        workspace, destroy = fields.get("workspace"), fields.get("destroy")
        if not isinstance(workspace, str) or not isinstance(destroy, bool):
            raise RequestError("invalid_argument", "workspace: a name; destroy: true or false")
        ended = await streams.end_workspace(WorkspaceId(workspace), destroy=destroy)
        return json_answer({"destroyed" if destroy else "stopped": ended})

    _ = end_workspace
