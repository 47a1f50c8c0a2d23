"""Which VMM loads a checkpoint: the one that saved it while it is kept, else today's, which then refuses.

New machines always run on today's VMM. An old machine wakes on its own and keeps it until it is booted anew.
This module must not start anything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from microvm.store.checkpoint import Manifest, Platform
from microvm.vmm.base import VmmKind


@dataclass(frozen=True, slots=True)
class Engine:
    """A kind of VMM, and what checkpoints made with it are bound to."""

    kind: VmmKind
    platform: Platform


Older = Callable[[str], Awaitable[Engine | None]]
"""The engine of an older closure, by its digest; None where it is not kept any more."""


async def _none(_closure: str) -> Engine | None:
    return None


@dataclass(slots=True)
class Engines:
    """Today's engine, and older ones as checkpoints ask for them."""

    today: Engine
    older: Older = _none
    _found: dict[str, Engine] = field(default_factory=dict[str, Engine])

    async def of(self, manifest: Manifest | None) -> Engine:
        """The engine to load `manifest`'s checkpoint with.

        Raises:
            HostError, VmmError: The older closure is there and cannot be used.
        """
        if manifest is None or manifest.platform.closure == self.today.platform.closure:
            return self.today
        closure = manifest.platform.closure
        if closure not in self._found:
            engine = await self.older(closure)
            if engine is None:
                return self.today
            self._found[closure] = engine
        return self._found[closure]
