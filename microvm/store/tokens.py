"""Tokens: how a secret looks, how it is found again, and what a valid one says about its bearer.

The database holds SHA-256 only, so a lookup by hash is the comparison, in time that says nothing about the
secret. Nothing here is cached, logs, or formats a secret.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import sqlite3
from typing import Final

from microvm.model import Principal, WorkspaceId

_SECRET_BYTES: Final = 35
"""280 bits, at least the 256 that are promised, and a whole number of base32 characters (56, no padding)."""

_SECRET_PATTERN: Final = re.compile(r"mvm_[a-z2-7]{56}")

_AUTHENTICATE: Final = """
SELECT t.token_id, t.workspace_id, t.operator, t.profile, w.allow_network
FROM tokens AS t JOIN workspaces AS w USING (workspace_id)
WHERE t.hash = ? AND t.expires_at > ? AND NOT t.revoked AND NOT w.revoked
"""


def new_secret() -> str:
    """A fresh token."""
    return "mvm_" + base64.b32encode(secrets.token_bytes(_SECRET_BYTES)).decode("ascii").lower()


def hash_of(secret: str) -> bytes:
    """What the database knows of a token."""
    return hashlib.sha256(secret.encode("utf-8")).digest()


def token_id_of(secret: str) -> str:
    """A token's public id, 60 bits of its hash: who holds a token file can name it without showing it."""
    return "tok_" + base64.b32encode(hash_of(secret)).decode("ascii").lower()[:12]


def find_principal(db: sqlite3.Connection, secret: str, now: float) -> Principal | None:
    """Who presents `secret`, or None for unknown, malformed, expired and revoked ones alike."""
    if _SECRET_PATTERN.fullmatch(secret) is None:
        return None
    row = db.execute(_AUTHENTICATE, (hash_of(secret), now)).fetchone()
    if row is None:
        return None
    token_id, workspace_id, operator, profile, allow_network = row
    return Principal(
        workspace_id=WorkspaceId(workspace_id),
        operator=bool(operator),
        profile=profile,
        allow_network=bool(allow_network),
        token_id=token_id,
    )
