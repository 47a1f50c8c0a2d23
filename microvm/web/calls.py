"""Running tools for both doors: limits, the drain, and one kind of failure out.

A request task waits here and owns nothing; what the fleet took on goes on when the wait is cancelled. It
must not know HTTP or MCP. Its neighbours: `catalogue` does the work, `app` and `mcp_http` answer.
"""

from __future__ import annotations

import math
import secrets
from typing import Any, Final

import trio

from microvm.catalogue import Call, Catalogue, FleetApi, Progress, Tool, no_progress
from microvm.errors import CapacityError, GuestError, MicrovmError
from microvm.model import Principal
from microvm.web.failures import collapse, public

DRAIN_RETRY_S: Final = 10.0


def new_trace_id(traceparent: str | None = None) -> str:
    """The id of `traceparent` (W3C Trace Context §3.2), or a new one."""
    parts = (traceparent or "").split("-")
    if len(parts) >= 4 and len(parts[0]) == 2 and len(parts[1]) == 32:
        trace = parts[1]
        if all(digit in "0123456789abcdef" for digit in trace) and trace.strip("0"):
            return trace
    return secrets.token_hex(16)


class Calls:
    """The calls that are being waited for.

    Args:
        catalogue: The tools.
        fleet: What they act on.
    """

    def __init__(self, catalogue: Catalogue, fleet: FleetApi) -> None:
        self.catalogue = catalogue
        self._fleet = fleet
        self._waiting: set[trio.CancelScope] = set()
        self._draining = False

    @property
    def waiting(self) -> int:
        """How many calls are being waited for."""
        return len(self._waiting)

    async def run(
        self,
        tool: Tool,
        arguments: object,
        principal: Principal,
        *,
        trace_id: str,
        progress: Progress = no_progress,
        limit_s: float = math.inf,
    ) -> dict[str, Any]:
        """Run one tool.

        Args:
            tool: Which.
            arguments: As they came.
            principal: For whom.
            trace_id: For logs.
            progress: Where to report.
            limit_s: Seconds after which the wait ends with `guest_timeout`.

        Raises:
            MicrovmError: The only kind of failure that comes out, save cancellation.

        Cancellation: Ends the wait; a mutation goes on.
        """
        if self._draining:
            raise _draining()
        result: dict[str, Any] = {}
        with trio.CancelScope(deadline=trio.current_time() + limit_s) as scope:
            self._waiting.add(scope)
            try:
                result = await tool.run(Call(principal, self._fleet, trace_id, progress), arguments)
            except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001  # one kind comes out
                failure = public(collapse(error), trace_id)
                raise failure from (None if failure is error else error)
            finally:
                self._waiting.discard(scope)
        if scope.cancelled_caught:
            raise _draining() if self._draining else _still_going(tool)
        return result

    def refuse(self) -> None:
        """Take no new calls."""
        self._draining = True

    def end(self) -> None:
        """Answer every waiting call with `draining`."""
        self._draining = True
        for scope in list(self._waiting):
            scope.cancel(reason="the service is stopping")


def _draining() -> MicrovmError:
    return CapacityError("draining", "the service is stopping; try again soon", retry_after_s=DRAIN_RETRY_S)


def _still_going(tool: Tool) -> MicrovmError:
    how = "repeat it with the same request_id" if tool.takes_request_id else "ask vm_status"
    return GuestError("guest_timeout", f"{tool.name} goes on, but took too long to wait for; {how}")
