"""`vm push` and `vm pull`: files and whole directories between here and a guest.

Promises that the other side's name holds all of it or what it held before; a download that was cut goes on
where it ended. An archive that comes from a guest is foreign: nothing of it is written outside its directory,
and nothing in it becomes a device, another user's, or set-user-id. Neighbours: `vm`, `client`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import httpx2

from microvm.cli.client import Client, CutError, UsageError, raw_path
from microvm.errors import RequestError

CHUNK_BYTES: Final = 65536
TRIES_WITHOUT_PROGRESS: Final = 3
PARTIAL: Final = 206  # RFC 9110 §15.3.7


def push(client: Client, vm_id: str, source: Path, path: str, *, recursive: bool) -> dict[str, Any]:
    """Copies a file to a guest's, or with `recursive` what a directory holds into a guest's directory."""
    if recursive:
        if not source.is_dir():
            raise UsageError(f"-r wants a directory, and {source} is none")
        return client.upload(raw_path(vm_id, "archive", path), _packed(source), {})
    try:
        with source.open("rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise UsageError(f"{source} is no regular file; -r copies directories")
            params = {"mode": f"{stat.S_IMODE(facts.st_mode) & 0o777:04o}"}
            return client.upload(raw_path(vm_id, "files", path), _pieces(file), params)
    except IsADirectoryError as error:
        raise UsageError(f"{source} is a directory; -r copies directories") from error
    except OSError as error:
        raise RequestError("invalid_argument", f"{source} cannot be read: {error.strerror}") from error


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while data := file.read(CHUNK_BYTES):
        yield data


def _packed(source: Path) -> Iterator[bytes]:
    """A directory as a tar archive; what could not be read cuts it."""
    command = ["tar", "--create", "--format=posix", "--sparse", "--file=-", f"--directory={source}", "."]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as tar:
        assert tar.stdout is not None
        yield from iter(lambda: tar.stdout.read(CHUNK_BYTES), b"")  # type: ignore[union-attr]
        if tar.wait() != 0:
            raise RequestError("invalid_argument", f"{source} could not be read whole; nothing was changed")


def pull(client: Client, vm_id: str, path: str, target: Path, *, recursive: bool) -> dict[str, Any]:
    """Copies a guest's file to a file, or with `recursive` a guest's directory to a new one."""
    if target.is_dir() and not recursive:
        target /= Path(path).name
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        if recursive:
            if target.exists():
                raise UsageError(f"{target} exists already; a directory is pulled to a new name")
            part.mkdir()
            _pull_tree(client, raw_path(vm_id, "archive", path), part)
            size = sum(file.lstat().st_size for file in part.rglob("*") if not file.is_dir())
            part.rename(target)
        else:
            size = _pull_file(client, raw_path(vm_id, "files", path), part)
            part.replace(target)
    except OSError as error:
        raise RequestError("invalid_argument", f"{target} cannot be written: {error.strerror}") from error
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)
    return {"path": str(target), "size": size}


def _pull_file(client: Client, url: str, part: Path) -> int:
    """Downloads a file, going on after cuts while each try brings something."""
    etag, mode, tries = "", 0o644, 0
    with part.open("xb") as out:
        while True:
            begin = out.tell()
            wanted = {"Range": f"bytes={begin}-", "If-Range": etag} if begin else {}
            try:
                with client.download(url, wanted) as response:
                    if begin and response.status_code != PARTIAL:
                        out.seek(0)  # the file is another one now
                        out.truncate()
                    etag = response.headers.get("ETag", "")
                    mode = int(response.headers.get("Microvm-Mode", "0644"), 8)
                    for data in response.iter_raw():
                        out.write(data)
                break
            except CutError:
                tries = 0 if out.tell() > begin else tries + 1
                if tries >= TRIES_WITHOUT_PROGRESS or not etag:
                    raise
        size = out.tell()
        os.fchmod(out.fileno(), mode & 0o777)
    return size


class _Body:
    """A response's body as a file that tarfile reads."""

    def __init__(self, response: httpx2.Response) -> None:
        self._pieces = response.iter_raw()
        self._held = b""

    def read(self, size: int) -> bytes:
        while len(self._held) < size:
            data = next(self._pieces, None)
            if data is None:
                break
            self._held += data
        given, self._held = self._held[:size], self._held[size:]
        return given


def _pull_tree(client: Client, url: str, directory: Path) -> None:
    if not hasattr(tarfile, "data_filter"):
        raise RequestError("invalid_argument", "unpacking foreign archives needs Python 3.11.4 or later")
    with client.download(url, {}) as response:
        body = _Body(response)
        try:
            with tarfile.open(fileobj=body, mode="r|") as archive:  # pyright: ignore
                archive.extractall(directory, filter="data")  # pyright: ignore[reportUnknownMemberType]
        except tarfile.TarError as error:
            raise RequestError(
                "invalid_argument", f"the guest's archive cannot be unpacked: {error}"
            ) from error
        while body.read(CHUNK_BYTES):
            pass  # to its end, where the service says that it is whole
