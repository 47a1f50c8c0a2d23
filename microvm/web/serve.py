"""The doors, opened and closed: sockets, application, drain.

It must not own anything of the fleet's. Its neighbours: `daemon` starts it last and stops it first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import trio

from microvm.catalogue import CATALOGUE, Catalogue, FleetApi
from microvm.web.access import Access, Authenticate
from microvm.web.app import make_app
from microvm.web.calls import Calls
from microvm.web.server import Bound, Listener, Server, open_listeners
from microvm.web.settings import WebSettings
from microvm.web.streams import StreamApi

WAIT_SHARE = 0.8  # of the grace, calls may end by themselves; the rest is for sending `draining`


async def serve_web(
    settings: WebSettings,
    fleet: FleetApi,
    authenticate: Authenticate,
    streams: StreamApi,
    *,
    stop: trio.Event,
    ready: Callable[[], bool] = lambda: True,
    catalogue: Catalogue = CATALOGUE,
    task_status: trio.TaskStatus[Bound] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve both doors until `stop`, then let requests end.

    Args:
        settings: Where to listen, and whom to believe.
        fleet: What tools act on.
        authenticate: Token to principal, asked for every request.
        streams: What transfers, events and live output are made of.
        stop: Ends it: no new connections, calls end within the grace or are answered `draining`.
        ready: Whether the service takes work; `stop` makes it not ready by itself.
        catalogue: The tools.
        task_status: Started with the addresses once connections are accepted.

    Raises:
        HostError: A socket cannot be bound.

    Cancellation: Closes everything at once; nothing of the fleet's is lost with it.
    """
    calls = Calls(catalogue, fleet)
    access = Access(settings, authenticate, trio.current_time)
    app = make_app(settings, calls, access, streams, lambda: ready() and not stop.is_set(), stop)
    server = Server(app, keep_alive_s=settings.keep_alive_s)

    async def drain() -> None:
        calls.refuse()
        await trio.sleep(settings.grace_s * WAIT_SHARE)
        calls.end()

    with ExitStack() as stack:
        listeners, bound = await open_listeners(settings, stack)
        async with trio.open_nursery() as nursery:
            await nursery.start(_serve, server, listeners, stop, settings.grace_s, drain)
            task_status.started(bound)


async def _serve(
    server: Server,
    listeners: list[Listener],
    stop: trio.Event,
    grace_s: float,
    drain: Callable[[], Awaitable[None]],
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    await server.serve(listeners, stop=stop, grace_s=grace_s, on_stop=drain, task_status=task_status)
