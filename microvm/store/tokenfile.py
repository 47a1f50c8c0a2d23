"""Token files: a secret on disk for one reader. It writes them only; whoever reads one strips nothing.

Source: open(2) O_EXCL, link(2): a link never replaces an existing name, which rename(2) would.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from microvm.errors import HostError, RequestError
from microvm.store.ids import new_id


def write_token_file(path: Path, secret: str) -> None:
    """Writes `secret`, without a newline, to a new file of mode 0600: whole and on disk, or not there at all.

    Raises:
        RequestError: `path` exists already; it is left as it is.
        HostError: The directory cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{new_id('', 8)}")
    try:
        try:
            _write(temporary, secret.encode("ascii"))
            os.link(temporary, path, follow_symlinks=False)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
        _sync_directory(path.parent)
    except FileExistsError:
        raise RequestError(
            "invalid_argument", f"{path} exists already; remove it or choose another name."
        ) from None
    except OSError as error:
        raise HostError("write token file", str(path), error.errno or 0, error.strerror or "") from None


def _write(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(fd, 0o600)  # whatever the umask and default ACLs say
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
