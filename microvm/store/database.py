"""Connections to the metadata file: how they are opened, how a transaction runs, what their errors become.

Everything here is synchronous; `store` decides which thread runs it. It knows no table but `meta`. SQLite's
exceptions do not leave the package: `translated` makes them `HostError`.

Source: sqlite.org/wal.html, sqlite.org/pragma.html (synchronous, busy_timeout, trusted_schema).
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

from microvm.errors import HostError
from microvm.model import WorkspaceId
from microvm.store.ids import new_id
from microvm.store.schema import MIGRATIONS, SCHEMA_VERSION

FILE_NAME: Final = "metadata.sqlite3"

OPERATOR_WORKSPACE: Final = WorkspaceId("operator")
"""The built-in workspace that a peer of the admin socket acts in."""

_WRITER_BUSY_MS: Final = 5000
"""How long a writer waits for another process's commit; the command line's transactions take milliseconds."""

_READER_BUSY_MS: Final = 250
"""A reader of a WAL file waits for nobody, save during a recovery; it runs in the event loop's thread."""

_ERRNO_OF_RESULT: Final = {
    "SQLITE_FULL": errno.ENOSPC,
    "SQLITE_IOERR": errno.EIO,
    "SQLITE_READONLY": errno.EROFS,
    "SQLITE_CANTOPEN": errno.EACCES,
    "SQLITE_BUSY": errno.EBUSY,
    "SQLITE_CORRUPT": errno.EUCLEAN,
    "SQLITE_NOTADB": errno.EUCLEAN,
}


@contextmanager
def translated(operation: str, path: str = FILE_NAME) -> Generator[None, None, None]:
    """Turns SQLite's and the system's errors in the block into `HostError`."""
    try:
        yield
    except sqlite3.Error as error:
        name: str = getattr(error, "sqlite_errorname", "")
        primary = "_".join(name.split("_")[:2])
        raise HostError(operation, path, _ERRNO_OF_RESULT.get(primary, 0), f"{error} ({name})") from error
    except OSError as error:
        raise HostError(operation, path, error.errno or 0, error.strerror or str(error)) from error


@contextmanager
def transaction(db: sqlite3.Connection) -> Generator[sqlite3.Connection, None, None]:
    """Runs the block as one write transaction: committed and on disk when the block is left, or not at all.

    Raises:
        HostError: The file could not be read or written; nothing was changed.
    """
    with translated("commit to"):
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


def open_writer(state_dir: Path, now: float) -> sqlite3.Connection:
    """Opens the file for writing, making or migrating it first.

    Args:
        state_dir: Made with mode 0700 where it does not exist; the file in it is 0600.
        now: Seconds since the epoch, recorded where rows are made.

    Returns:
        A connection without implicit transactions that may be used from one thread at a time.

    Raises:
        HostError: The directory or file cannot be used, or the file is newer than this program.
    """
    path = state_dir / FILE_NAME
    with translated("open", str(path)):
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(0o600)  # restored from a backup with a wide umask: it holds secret environment values
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        with translated("open", str(path)):
            db.execute(f"PRAGMA busy_timeout = {_WRITER_BUSY_MS}")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA foreign_keys = ON")
            db.execute("PRAGMA trusted_schema = OFF")
        _migrate(db, now)
        with translated("sync", str(state_dir)):
            _sync_directory(state_dir)
    except BaseException:
        db.close()
        raise
    return db


def open_reader(state_dir: Path) -> sqlite3.Connection:
    """A read-only connection for the calling thread; each SELECT sees the newest commit of any process."""
    path = state_dir / FILE_NAME
    with translated("open", str(path)):
        db = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, isolation_level=None)
        db.execute(f"PRAGMA busy_timeout = {_READER_BUSY_MS}")
        db.execute("PRAGMA query_only = ON")
        db.execute("PRAGMA trusted_schema = OFF")
    return db


def instance_id(db: sqlite3.Connection) -> str:
    """The installation's id, made once: the owner mark on everything that the service makes on the host."""
    with translated("read"):
        value: str = db.execute("SELECT value FROM meta WHERE key = 'instance_id'").fetchone()[0]
    return value


def _version(db: sqlite3.Connection) -> int:
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    return version


def _migrate(db: sqlite3.Connection, now: float) -> None:
    with translated("read"):
        version = _version(db)
    if version == SCHEMA_VERSION:
        return
    with transaction(db):
        version = _version(db)  # another process may have been quicker
        if version > SCHEMA_VERSION:
            raise HostError(
                "open",
                FILE_NAME,
                message=f"its schema is {version}, this program knows {SCHEMA_VERSION}: run the newer one",
            )
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                db.execute(statement)
        if version == 0:
            db.execute("INSERT INTO meta VALUES ('instance_id', ?)", (new_id("", 16),))
            db.execute("INSERT INTO meta VALUES ('created_at', ?)", (repr(now),))
            db.execute(
                "INSERT INTO workspaces (workspace_id, created_at, allow_network) VALUES (?, ?, 1)",
                (OPERATOR_WORKSPACE, now),
            )
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
