"""What views share: their failures answered, the caller, and the parts of the connection that they may use.

It must not know routes. Neighbours: `app` and `stream_routes`.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias, cast

from quart import Response, g
from werkzeug.exceptions import HTTPException

from microvm.model import Principal
from microvm.web.answers import error_answer
from microvm.web.failures import collapse, public

NURSERY: Final = "microvm.nursery"
"""In a request's scope: the nursery that ends with it."""
UPLOAD: Final = "microvm.upload"
"""In a request's scope: both ends of the channel that an upload's body goes through."""

View: TypeAlias = Callable[..., Awaitable[Response]]


def principal() -> Principal:
    """Who calls."""
    return cast("Principal", g.principal)


def guarded(view: View) -> View:
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
