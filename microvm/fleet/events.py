"""What changed, for whoever listens: the last changes are kept, listeners that are too slow are cut.

`publish` is called where records and jobs are committed; it never waits and never fails. Ids increase over
all workspaces and over restarts of the service, so that a listener that was cut goes on behind the last one
that it saw. Neighbours: `fleet` publishes, `streams` lets listeners in. How a change looks outside is
`web`'s.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

import trio

from microvm.model import Change, JobRecord, VmView, WorkspaceId

KEPT = 1000
"""Changes that can be asked for again (the contract's number), of a workspace and of all of them."""

QUEUE = 256
"""Changes that wait for one listener; a drain of the largest fleet makes fewer at once in a workspace."""


class Listener:
    """Changes as they come; made by `Events.listen`.

    Attributes:
        missed: Changes behind the wanted id that are not kept any more, where that is known.
    """

    def __init__(self, changes: trio.MemoryReceiveChannel[Change], *, missed: bool) -> None:
        self.missed = missed
        self._changes = changes

    async def receive(self) -> Change:
        """The next change.

        Raises:
            trio.EndOfChannel: The listener was too slow; what it has missed is kept for a while.
        """
        return await self._changes.receive()

    def close(self) -> None:
        """Ends the listening."""
        self._changes.close()


class Events:
    """The changes of a service since its start."""

    def __init__(self) -> None:
        # Microseconds since the epoch: above every id of an earlier run, and exact in JSON until 2255.
        self._last_id = time.time_ns() // 1000
        self._kept: dict[WorkspaceId | None, deque[Change]] = {None: deque(maxlen=KEPT)}
        self._dropped: dict[WorkspaceId | None, int] = {}
        self._first_id = self._last_id
        self._listeners: dict[trio.MemorySendChannel[Change], WorkspaceId | None] = {}

    def publish(self, workspace_id: WorkspaceId, content: VmView | JobRecord) -> None:
        """Keeps a change and tells who listens."""
        self._last_id += 1
        change = Change(self._last_id, workspace_id, content)
        for scope in (workspace_id, None):
            kept = self._kept.setdefault(scope, deque(maxlen=KEPT))
            if len(kept) == KEPT:
                self._dropped[scope] = kept[0].change_id
            kept.append(change)
        for channel, scope in list(self._listeners.items()):
            if scope in {workspace_id, None}:
                self._tell(channel, change)

    def _tell(self, channel: trio.MemorySendChannel[Change], change: Change) -> None:
        try:
            channel.send_nowait(change)
        except trio.WouldBlock:
            self._forget(channel)  # it gets what waits for it, and then the end
        except trio.BrokenResourceError:
            self._forget(channel)

    def _forget(self, channel: trio.MemorySendChannel[Change]) -> None:
        del self._listeners[channel]
        channel.close()

    def listen(self, workspace_id: WorkspaceId | None, after: int | None) -> Listener:
        """Changes from now on, or from behind `after` on as far as they are kept.

        Args:
            workspace_id: Whose; None for everybody's.
            after: The id of the last change that was seen; None to begin now.
        """
        replayed = (
            [] if after is None else [c for c in self._kept.get(workspace_id, ()) if c.change_id > after]
        )
        channel, changes = trio.open_memory_channel[Change](QUEUE + len(replayed))
        _fill(channel, replayed)
        self._listeners[channel] = workspace_id
        begun = self._dropped.get(workspace_id, self._first_id)
        return Listener(changes, missed=after is not None and after < begun)


def _fill(channel: trio.MemorySendChannel[Change], changes: Iterable[Change]) -> None:
    for change in changes:
        channel.send_nowait(change)
