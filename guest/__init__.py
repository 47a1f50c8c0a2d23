"""What runs inside a guest: the supervisor that runs jobs, serves files and keeps time for the host.

Standard library only, on the image's Python (3.11 to 3.13), and testable as an ordinary process on a host.
It must not import anything of the service; the two meet in the bytes of `framing` alone.
"""

from typing import Final

VERSION: Final = "0.1.0"
PROTOCOL: Final = 1
"""The channel protocol that this supervisor speaks; the host refuses one that it does not know."""
