"""The ledger of templates: one build per key, others wait for it, and none is destroyed under a copy.

A key names everything that must be equal for a VM to be made from a template (image, VMM, memory, vcpus,
network and the host's digests); it is opaque here. `fleet` builds, copies and destroys; builds are killed
first in a drain.

    (none) ─Want─► building ─Built─► ready ⇄ in use ─Retire─► retired ─last Done─► (gone)
                      └─BuildFailed─► (none)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

KEPT: Final = 16
"""Templates that stay for later creations; beyond them the least recently used goes.

Any workspace may ask for one more size, and the smallest holds 115 MiB of the volume (measured at 128 MiB).
"""

Key = str
Waiter = int
"""A request that waits, numbered by the caller; answered exactly once."""


@dataclass(frozen=True, slots=True)
class Building:
    """Being built for these, first come first; `unwanted` when nobody else may have it once it is built."""

    waiters: tuple[Waiter, ...] = ()
    unwanted: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """Can be copied; `users` copies are under way. Once `retired`, no new one begins."""

    users: int = 0
    retired: bool = False
    last_used_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Templates:
    """The ledger.

    Attributes:
        successors: Requests for a key whose retired template is still in use: built again when that is gone.
        draining: Whether the service ends; nothing is built any more.
    """

    entries: Mapping[Key, Building | Ready] = field(default_factory=dict[Key, Building | Ready])
    successors: Mapping[Key, tuple[Waiter, ...]] = field(default_factory=dict[Key, tuple[Waiter, ...]])
    draining: bool = False


# ---- events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Want:
    """A request wants to copy the template of `key`."""

    key: Key
    waiter: Waiter


@dataclass(frozen=True, slots=True)
class Leave:
    """A waiter gave up; its build goes on, for the next one."""

    key: Key
    waiter: Waiter


@dataclass(frozen=True, slots=True)
class Built:
    """The build of `key` is done."""

    key: Key


@dataclass(frozen=True, slots=True)
class BuildFailed:
    """The build of `key` failed, and has removed what it made; `code` is what its waiters get."""

    key: Key
    reason: str
    code: str = "internal"


@dataclass(frozen=True, slots=True)
class Done:
    """A granted copy has been made, or has failed; the template is not needed for it any more."""

    key: Key


@dataclass(frozen=True, slots=True)
class Retire:
    """The template of `key` shall go: its image or closure is replaced, or room is short."""

    key: Key


@dataclass(frozen=True, slots=True)
class Drain:
    """The service ends."""


Event = Want | Leave | Built | BuildFailed | Done | Retire | Drain


# ---- effects ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Build:
    """Build the template of `key`."""

    key: Key


@dataclass(frozen=True, slots=True)
class CancelBuild:
    """Kill the build of `key`; `BuildFailed` follows."""

    key: Key


@dataclass(frozen=True, slots=True)
class Grant:
    """The waiter copies the template of `key` now, then says `Done`."""

    key: Key
    waiter: Waiter


@dataclass(frozen=True, slots=True)
class Deny:
    """The waiter gets this error."""

    waiter: Waiter
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Destroy:
    """Remove the template's files; nobody uses them."""

    key: Key


Effect = Build | CancelBuild | Grant | Deny | Destroy
Decision = tuple[Templates, tuple[Effect, ...]]


def restart(keys: Iterable[Key], now: float) -> Templates:
    """The ledger as the service starts, from the templates that were found whole, oldest first."""
    return Templates({key: Ready(last_used_at=now) for key in keys})


def decide(templates: Templates, event: Event, now: float) -> Decision:
    """What `event` does to the ledger.

    Args:
        templates: The ledger.
        event: `Built` and `BuildFailed` only for a build, `Done` only for a grant that has not said it.
        now: Seconds since the epoch.

    Returns:
        The next ledger and the effects. A ledger without an entry for a key is one whose files are gone or
        going: the caller runs `Destroy` and `Build` of one key in the order given.
    """
    match event:
        case Want():
            return _want(templates, event, now)
        case Leave():
            return _leave(templates, event), ()
        case Built():
            return _built(templates, event.key, now)
        case BuildFailed():
            return _build_failed(templates, event)
        case Done():
            return _done(templates, event.key, now)
        case Retire():
            return _retire(templates, event.key)
        case Drain():
            return _drain(templates)


def is_wanted(templates: Templates, key: Key) -> bool:
    """Whether anybody waits for the build of `key`; one that has not begun need not, when nobody does."""
    entry = templates.entries.get(key)
    return isinstance(entry, Building) and bool(entry.waiters)


def _want(templates: Templates, event: Want, now: float) -> Decision:
    key, waiter = event.key, event.waiter
    if templates.draining:
        return templates, (_draining(waiter),)
    match templates.entries.get(key):
        case None:
            return _put(templates, key, Building((waiter,))), (Build(key),)
        case Building(waiters, unwanted=False):
            return _put(templates, key, Building((*waiters, waiter))), ()
        case Ready(users, retired=False):
            return _put(templates, key, Ready(users + 1, last_used_at=now)), (Grant(key, waiter),)
        case _:
            waiting = (*templates.successors.get(key, ()), waiter)
            return replace(templates, successors={**templates.successors, key: waiting}), ()


def _leave(templates: Templates, event: Leave) -> Templates:
    entry = templates.entries.get(event.key)
    if isinstance(entry, Building) and event.waiter in entry.waiters:
        rest = tuple(each for each in entry.waiters if each != event.waiter)
        return _put(templates, event.key, replace(entry, waiters=rest))
    waiting = templates.successors.get(event.key, ())
    rest = tuple(each for each in waiting if each != event.waiter)
    return _succeed(templates, event.key, rest)


def _built(templates: Templates, key: Key, now: float) -> Decision:
    entry = templates.entries[key]
    assert isinstance(entry, Building), key
    ready = Ready(users=len(entry.waiters), retired=entry.unwanted, last_used_at=now)
    grants = tuple(Grant(key, waiter) for waiter in entry.waiters)
    if entry.unwanted and not entry.waiters:
        return _gone(templates, key, (Destroy(key),))
    templates, destroyed = _trim(_put(templates, key, ready))
    return templates, (*grants, *destroyed)


def _build_failed(templates: Templates, event: BuildFailed) -> Decision:
    entry = templates.entries[event.key]
    assert isinstance(entry, Building), event.key
    message = f"The template for a VM of this kind could not be built: {event.reason}"
    denials = tuple(Deny(waiter, event.code, message) for waiter in entry.waiters)
    return _gone(templates, event.key, denials)


def _done(templates: Templates, key: Key, now: float) -> Decision:
    entry = templates.entries[key]
    assert isinstance(entry, Ready), key
    assert entry.users > 0, key
    if entry.retired and entry.users == 1:
        return _gone(templates, key, (Destroy(key),))
    return _trim(_put(templates, key, replace(entry, users=entry.users - 1, last_used_at=now)))


def _trim(templates: Templates) -> Decision:
    """Lets go of what nobody copies now and is beyond `KEPT`, the least recently used first."""
    ready = {key: entry for key, entry in templates.entries.items() if isinstance(entry, Ready)}
    idle = sorted((key for key in ready if not ready[key].users), key=lambda key: ready[key].last_used_at)
    effects: tuple[Effect, ...] = ()
    for key in idle[: max(0, len(ready) - KEPT)]:
        templates, effects = _gone(templates, key, (*effects, Destroy(key)))
    return templates, effects


def _retire(templates: Templates, key: Key) -> Decision:
    match templates.entries.get(key):
        case None:
            return templates, ()
        case Building() as entry:
            return _put(templates, key, replace(entry, unwanted=True)), ()
        case Ready(users=0):
            return _gone(templates, key, (Destroy(key),))
        case Ready() as entry:
            return _put(templates, key, replace(entry, retired=True)), ()


def _drain(templates: Templates) -> Decision:
    if templates.draining:
        return templates, ()
    effects: list[Effect] = []
    entries = dict(templates.entries)
    for key, entry in templates.entries.items():
        if isinstance(entry, Building):
            effects.append(CancelBuild(key))
            effects.extend(_draining(waiter) for waiter in entry.waiters)
            entries[key] = Building(unwanted=True)
    for waiters in templates.successors.values():
        effects.extend(_draining(waiter) for waiter in waiters)
    return Templates(entries, {}, draining=True), tuple(effects)


def _gone(templates: Templates, key: Key, effects: tuple[Effect, ...]) -> Decision:
    """The entry goes; whoever waits for its successor gets a build."""
    entries = {each: entry for each, entry in templates.entries.items() if each != key}
    templates = replace(templates, entries=entries)
    waiting = templates.successors.get(key, ())
    if not waiting:
        return templates, effects
    templates = _succeed(templates, key, ())
    return _put(templates, key, Building(waiting)), (*effects, Build(key))


def _succeed(templates: Templates, key: Key, waiting: tuple[Waiter, ...]) -> Templates:
    successors = {each: waiters for each, waiters in templates.successors.items() if each != key}
    if waiting:
        successors[key] = waiting
    return replace(templates, successors=successors)


def _put(templates: Templates, key: Key, entry: Building | Ready) -> Templates:
    return replace(templates, entries={**templates.entries, key: entry})


def _draining(waiter: Waiter) -> Deny:
    return Deny(waiter, "draining", "The service is shutting down; try again when it is back.")
