"""What the doors are told at start.

Values only. Its neighbours: `daemon` makes it from the configuration, the rest of `web` reads it.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final

MAX_BODY_BYTES: Final = 4 << 20  # the service's contract: a body over 4 MiB is 413


@dataclass(frozen=True, slots=True)
class WebSettings:
    """Where to listen, and whom to believe.

    Attributes:
        listen: "host:port", "[v6]:port" or "" for no TCP; port 0 takes a free one.
        service_socket: Path of the Unix socket that needs a token; "" for none.
        admin_socket: Path of the Unix socket (0600) on which the daemon's own uid is operator; "" for none.
        allowed_hosts: `Host` values besides loopback names, "name" (any port) or "name:port"; "*" for all.
            Empty: loopback names only where `listen` is loopback, otherwise any.
        allowed_origins: `Origin` values that browsers may come from, besides loopback ones where `listen` is
            loopback.
        version: The service's version.
        grace_s: Seconds that requests have to end after the stop.
        keep_alive_s: Seconds that an idle connection stays open.
        call_limit_s: Seconds after which a call over HTTP is answered anyway (contract: under 60).
    """

    listen: str = "127.0.0.1:8090"
    service_socket: str = ""
    admin_socket: str = ""
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    version: str = "0"
    grace_s: float = 5.0
    keep_alive_s: float = 75.0  # above the 60 s after which clients drop idle sockets (hypercorn#68)
    call_limit_s: float = 58.0

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`.

        Raises:
            ValueError: It is not "host:port".
        """
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"listen: {self.listen!r} is not host:port")
        return host.removeprefix("[").removesuffix("]"), int(port)

    @property
    def loopback(self) -> bool:
        """Whether `listen` is reachable from this machine only."""
        if not self.listen:
            return True
        host = self.address[0]
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"
