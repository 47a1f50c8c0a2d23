"""Who may come in: Host and Origin, then the token or the peer, all before the body is read.

The order is fixed: a browser lured to a foreign name is turned away first, then authentication, then
routing, so that nobody learns without a token which paths exist. It must not read bodies. Its neighbours:
`app`, `limits`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from microvm.errors import MicrovmError, RequestError
from microvm.model import Principal, WorkspaceId
from microvm.web.limits import AddressLimiter
from microvm.web.settings import WebSettings

Authenticate: TypeAlias = Callable[[str], Principal | None]
OPERATOR: Final = Principal(workspace_id=WorkspaceId("operator"), operator=True)
MAX_TOKEN: Final = 512
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection.

    Attributes:
        door: "tcp", "service" or "admin".
        address: What the limiter counts by.
        uid: The peer's uid on a Unix socket, from SO_PEERCRED.
    """

    door: str
    address: str
    uid: int | None = None

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> Peer:
        """Read what `server` put into the connection's state."""
        state: Mapping[str, Any] = scope.get("state") or {}
        client = scope.get("client")
        door = str(state.get("door", "tcp"))
        return cls(door, str(client[0]) if client else f"unix:{door}:{state.get('uid')}", state.get("uid"))


class Access:
    """Decides on requests by their head.

    Args:
        settings: Hosts and origins.
        authenticate: Token to principal; None for a token that is not valid now.
        now: A clock that never goes back, in seconds.
    """

    def __init__(self, settings: WebSettings, authenticate: Authenticate, now: Callable[[], float]) -> None:
        self._hosts = frozenset(host.lower() for host in settings.allowed_hosts)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in settings.allowed_origins)
        self._loopback = settings.loopback
        self._authenticate = authenticate
        self._now = now
        self._limiter = AddressLimiter()
        self._uid = os.geteuid()

    def check_names(self, peer: Peer, hosts: list[str], origins: list[str]) -> None:
        """Refuse a foreign `Host` or `Origin` (DNS rebinding; MCP basic/transports, "Security").

        Raises:
            RequestError: `forbidden`.
        """
        if any(not self._origin_allowed(origin) for origin in origins):
            raise RequestError("forbidden", "this Origin is not allowed; see allowed_origins")
        if peer.door == "tcp" and (len(hosts) > 1 or not self._host_allowed("".join(hosts))):
            raise RequestError("forbidden", "this Host is not allowed; see allowed_hosts")

    def _host_allowed(self, host: str) -> bool:
        name = host.lower()
        bare = _without_port(name)
        if "*" in self._hosts or name in self._hosts or bare in self._hosts:
            return True
        if self._loopback:
            return bare in _LOOPBACK_NAMES
        return not self._hosts

    def _origin_allowed(self, origin: str) -> bool:
        value = origin.lower().rstrip("/")
        if value in self._origins or "*" in self._origins:
            return True
        if not self._loopback:
            return False
        try:
            parts = urlsplit(value)
        except ValueError:
            return False
        return parts.scheme in {"http", "https"} and _without_port(parts.netloc) in _LOOPBACK_NAMES

    def admit(self, peer: Peer, authorization: list[str]) -> Principal:
        """Who this is; a presented token beats the peer's uid.

        Args:
            peer: The connection.
            authorization: Every `Authorization` header.

        Raises:
            MicrovmError: `unauthenticated`, or `rate_limited` for an address that tries too often.
        """
        if not authorization and peer.door == "admin" and peer.uid == self._uid:
            return OPERATOR
        token = _bearer(authorization)
        principal = self._authenticate(token) if token is not None else None
        if principal is not None:
            return principal
        self.count_anonymous(peer)
        raise RequestError(
            "unauthenticated",
            "send a valid token as `Authorization: Bearer …`; `microvm issue-token` makes one",
        )

    def count_anonymous(self, peer: Peer) -> None:
        """Count a request without a valid token.

        Raises:
            MicrovmError: `rate_limited`.
        """
        wait_s = self._limiter.take(peer.address, self._now())
        if wait_s is not None:
            raise MicrovmError(
                "rate_limited", "too many requests without a valid token", retry_after_s=wait_s
            )


def _without_port(host: str) -> str:
    name, separator, port = host.rpartition(":")
    return name if separator and port.isdecimal() and not host.endswith("]") else host


def _bearer(values: Iterable[str]) -> str | None:
    """The token of the one `Authorization: Bearer` header; None without it, or with several."""
    given = list(values)
    if len(given) != 1:
        return None
    scheme, _, token = given[0].partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and 0 < len(token) <= MAX_TOKEN and token.isascii() else None
