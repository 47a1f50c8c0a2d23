"""The one failure of a build. It must not say more than the operator can act on; its neighbours raise it."""

from __future__ import annotations


class ImageError(Exception):
    """The image cannot be built or is not what its manifest says; the message says what to do next."""
