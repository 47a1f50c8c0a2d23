"""The fleet's logger; `daemon` decides where records go and how they look."""

from __future__ import annotations

import logging
from typing import Final

log: Final = logging.getLogger("microvm.fleet")
