"""How often an address may come without a valid token.

A token bucket per address, the least recently seen forgotten first. It must not know requests. Its neighbour:
`access`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

ANONYMOUS_PER_S: Final = 20.0  # health checks come once a second; guessing 256 bits is hopeless at any rate
ANONYMOUS_BURST: Final = 60.0
MAX_ADDRESSES: Final = 4096


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float


class AddressLimiter:
    """Buckets of unauthenticated requests.

    Args:
        per_s: Requests per second that an address may make for ever.
        burst: Requests it may make at once.
    """

    def __init__(self, per_s: float = ANONYMOUS_PER_S, burst: float = ANONYMOUS_BURST) -> None:
        self._per_s = per_s
        self._burst = burst
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, address: str, now: float) -> float | None:
        """Count one request.

        Args:
            address: Whose.
            now: Seconds on a clock that never goes back.

        Returns:
            None if it may go on, else the seconds after which one may.
        """
        bucket = self._buckets.get(address)
        if bucket is None:
            bucket = self._buckets[address] = _Bucket(self._burst, now)
            if len(self._buckets) > MAX_ADDRESSES:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(address)
            bucket.level = min(self._burst, bucket.level + (now - bucket.at) * self._per_s)
            bucket.at = now
        if bucket.level < 1.0:
            return (1.0 - bucket.level) / self._per_s
        bucket.level -= 1.0
        return None
