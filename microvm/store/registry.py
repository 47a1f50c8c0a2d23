"""Tenants and their tokens: issued, revoked and listed by local administration, with the service up or down.

Synchronous, on a connection of its own: the command line uses it directly. It must not be reachable from a
tool. What a token means to a request is `tokens`'.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from microvm.errors import RequestError
from microvm.model import NAME_PATTERN, Quota, Workspace, WorkspaceId
from microvm.store.database import OPERATOR_WORKSPACE, open_writer, transaction, translated
from microvm.store.rows import workspace_from
from microvm.store.tokenfile import write_token_file
from microvm.store.tokens import hash_of, new_secret, token_id_of

DEFAULT_TTL_S: Final = 30 * 86400.0
"""`issue-token`'s default (the service's contract)."""

_QUOTA_FIELDS: Final = ("max_vms", "max_memory_mib", "max_storage_gib")


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """A token that was just made; the only time that its secret exists outside the bearer's file."""

    token_id: str
    workspace_id: WorkspaceId
    expires_at: float
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """What is known of a token afterwards."""

    token_id: str
    workspace_id: WorkspaceId
    created_at: float
    expires_at: float
    operator: bool
    profile: str | None
    revoked: bool


class Registry:
    """Workspaces and tokens; every method is one transaction."""

    def __init__(self, db: sqlite3.Connection, clock: Callable[[], float]) -> None:
        self._db = db
        self._clock = clock

    def issue_token(
        self,
        workspace: str,
        *,
        ttl_s: float = DEFAULT_TTL_S,
        allow_network: bool = False,
        operator: bool = False,
        profile: str | None = None,
        quota: Quota | None = None,
    ) -> IssuedToken:
        """Makes a token, and its workspace where there is none.

        Args:
            workspace: 1-64 of `[A-Za-z0-9_-]`, the first alphanumeric.
            ttl_s: Seconds until it expires, more than 0.
            allow_network: For a new workspace: its VMs may have a network. An existing one is left as it is.
            operator: Gives this token the operator scope.
            profile: Fixes the tool profile of this token.
            quota: For a new workspace. For an existing one each bound that is not None must equal the
                workspace's.

        Raises:
            RequestError: The workspace is revoked, or has another policy than asked for; nothing was issued.
        """
        with transaction(self._db):
            return self._issue(
                workspace, ttl_s, profile, quota or Quota(), allow_network=allow_network, operator=operator
            )

    def issue_token_file(
        self,
        path: Path,
        workspace: str,
        *,
        ttl_s: float = DEFAULT_TTL_S,
        allow_network: bool = False,
        operator: bool = False,
        profile: str | None = None,
        quota: Quota | None = None,
    ) -> IssuedToken:
        """`issue_token` into a new file of mode 0600; where the file cannot be written, nothing is issued."""
        written = False
        try:
            with transaction(self._db):
                issued = self._issue(
                    workspace,
                    ttl_s,
                    profile,
                    quota or Quota(),
                    allow_network=allow_network,
                    operator=operator,
                )
                write_token_file(path, issued.secret)
                written = True
        except BaseException:
            if written:  # the commit failed: the file would hold a token that does not exist
                with suppress(OSError):
                    path.unlink()
            raise
        return issued

    def revoke_token(self, token_id: str) -> TokenInfo:
        """Ends a token; revoking one twice is no error.

        Raises:
            RequestError: `not_found`.
        """
        with transaction(self._db) as db:
            found = db.execute("UPDATE tokens SET revoked = 1 WHERE token_id = ?", (token_id,)).rowcount
            if not found:
                raise RequestError("not_found", f"There is no token {token_id!r}.")
            return self._tokens("WHERE token_id = ?", token_id)[0]

    def revoke_workspace(self, workspace: str) -> Workspace:
        """Ends every token of a workspace for good and refuses new ones; its VMs are not touched.

        Raises:
            RequestError: `not_found`, or the built-in workspace.
        """
        if workspace == OPERATOR_WORKSPACE:
            raise RequestError(
                "invalid_argument", "The built-in workspace cannot be revoked; revoke its tokens."
            )
        with transaction(self._db) as db:
            db.execute("UPDATE workspaces SET revoked = 1 WHERE workspace_id = ?", (workspace,))
            return self._existing(workspace)

    def condemn_vms(self, workspace: str) -> list[str]:
        """Has the next start of the service remove every VM of a workspace; returns their ids.

        Must not be called while the service runs, which is the only writer of its VMs.
        """
        with transaction(self._db) as db:
            found = db.execute(
                "UPDATE vms SET state = 'destroying' WHERE workspace_id = ? RETURNING vm_id", (workspace,)
            )
            return sorted(row[0] for row in found.fetchall())

    def set_workspace(self, workspace: str, **changes: int | bool | None) -> Workspace:
        """Changes the policy of a workspace.

        Args:
            workspace: Which.
            changes: Any of allow_network, max_vms, max_memory_mib, max_storage_gib; None takes a bound away.

        Raises:
            RequestError: `not_found`, or a value out of range.
        """
        assert changes.keys() <= {"allow_network", *_QUOTA_FIELDS}, changes.keys()
        _check_quota(Quota(**{name: changes.get(name) for name in _QUOTA_FIELDS}))
        with transaction(self._db) as db:
            for column, value in changes.items():
                db.execute(
                    f"UPDATE workspaces SET {column} = ? WHERE workspace_id = ?",  # noqa: S608 - asserted above
                    (None if value is None else int(value), workspace),
                )
            return self._existing(workspace)

    def workspace(self, workspace: str) -> Workspace | None:
        """One workspace."""
        with translated("read"):
            row = _rows(self._db, "SELECT * FROM workspaces WHERE workspace_id = ?", workspace).fetchone()
        return None if row is None else workspace_from(row)

    def workspaces(self) -> list[Workspace]:
        """All workspaces, revoked ones included, by name."""
        with translated("read"):
            return [
                workspace_from(row)
                for row in _rows(self._db, "SELECT * FROM workspaces ORDER BY workspace_id")
            ]

    def tokens(self, workspace: str) -> list[TokenInfo]:
        """All tokens of a workspace, expired and revoked ones included, oldest first."""
        with translated("read"):
            return self._tokens("WHERE workspace_id = ? ORDER BY created_at", workspace)

    def _tokens(self, where: str, value: str) -> list[TokenInfo]:
        rows = _rows(self._db, f"SELECT * FROM tokens {where}", value)  # noqa: S608 - `where` is written above
        return [
            TokenInfo(
                token_id=row["token_id"],
                workspace_id=WorkspaceId(row["workspace_id"]),
                created_at=row["created_at"],
                expires_at=row["expires_at"],
                operator=bool(row["operator"]),
                profile=row["profile"],
                revoked=bool(row["revoked"]),
            )
            for row in rows
        ]

    def _existing(self, workspace: str) -> Workspace:
        found = self.workspace(workspace)
        if found is None:
            raise RequestError("not_found", f"There is no workspace {workspace!r}.")
        return found

    def _issue(
        self,
        workspace: str,
        ttl_s: float,
        profile: str | None,
        quota: Quota,
        *,
        allow_network: bool,
        operator: bool,
    ) -> IssuedToken:
        if not 0 < ttl_s < float("inf"):
            raise RequestError("invalid_argument", "The time to live must be a number of seconds above 0.")
        if profile is not None and NAME_PATTERN.fullmatch(profile) is None:
            raise RequestError("invalid_argument", f"{profile!r} is not the name of a tool profile.")
        now = self._clock()
        self._settle_workspace(workspace, quota, now, allow_network=allow_network)
        secret = new_secret()
        issued = IssuedToken(token_id_of(secret), WorkspaceId(workspace), now + ttl_s, secret)
        self._db.execute(
            "INSERT INTO tokens (hash, token_id, workspace_id, created_at, expires_at, operator, profile)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (hash_of(secret), issued.token_id, workspace, now, issued.expires_at, int(operator), profile),
        )
        return issued

    def _settle_workspace(self, workspace: str, quota: Quota, now: float, *, allow_network: bool) -> None:
        _check_quota(quota)
        found = self.workspace(workspace)
        if found is None:
            if NAME_PATTERN.fullmatch(workspace) is None:
                raise RequestError(
                    "invalid_argument",
                    f"{workspace!r} is not a workspace name: 1-64 of [A-Za-z0-9_-], the first alphanumeric.",
                )
            self._db.execute(
                "INSERT INTO workspaces"
                " (workspace_id, created_at, allow_network, max_vms, max_memory_mib, max_storage_gib)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (
                    workspace,
                    now,
                    int(allow_network),
                    quota.max_vms,
                    quota.max_memory_mib,
                    quota.max_storage_gib,
                ),
            )
            return
        if found.revoked:
            raise RequestError(
                "forbidden", f"The workspace {workspace!r} is revoked; no token is issued for it."
            )
        differing: dict[str, Any] = {
            name: getattr(found.quota, name)
            for name in _QUOTA_FIELDS
            if getattr(quota, name) not in {None, getattr(found.quota, name)}
        }
        if allow_network and not found.allow_network:
            differing["allow_network"] = False
        if differing:
            raise RequestError(
                "invalid_argument",
                f"The workspace {workspace!r} exists with other values of {', '.join(differing)}; issuing a "
                "token leaves them alone. Leave them out, or change the workspace first.",
                {"workspace": workspace, "existing": differing},
            )


@contextmanager
def open_registry(state_dir: Path, clock: Callable[[], float] = time.time) -> Generator[Registry, None, None]:
    """The registry of a state directory, which is made where it does not exist.

    Raises:
        HostError: The directory or the file in it cannot be used.
    """
    db = open_writer(state_dir, clock())
    try:
        yield Registry(db, clock)
    finally:
        db.close()


def _rows(db: sqlite3.Connection, sql: str, *values: str) -> sqlite3.Cursor:
    cursor = db.cursor()
    cursor.row_factory = sqlite3.Row
    return cursor.execute(sql, values)


def _check_quota(quota: Quota) -> None:
    for name in _QUOTA_FIELDS:
        value: int | None = getattr(quota, name)
        if value is not None and not 0 <= value < 2**31:
            raise RequestError("invalid_argument", f"{name} must be a whole number from 0.")
