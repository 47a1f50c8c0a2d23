"""A closure is what its digest names, or it is not opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from image.closure import closure_digest
from microvm.errors import HostError
from microvm.vmm import closure as module
from microvm.vmm.closure import Closure, open_closure


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "closure"
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/qemu").write_bytes(b"a program")
    (root / "lib").symlink_to("usr/lib")
    return root


def open_it(root: Path, digest: str) -> Closure:
    verified_file = root.parent / "verified.json"
    with open_closure(
        root, digest, version="10.0.13", binary="/usr/bin/qemu", verified_file=verified_file
    ) as it:
        assert os.stat(it.root_fd).st_ino == root.stat().st_ino
        return it


def test_a_closure_opens_under_its_digest_and_closes_after(root: Path) -> None:
    it = open_it(root, closure_digest(root))
    assert (it.version, it.binary) == ("10.0.13", "/usr/bin/qemu")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(it.root_fd)


def test_another_digest_is_refused(root: Path) -> None:
    with pytest.raises(HostError, match="build the image again"):
        open_it(root, "0" * 64)


def test_contents_are_read_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = closure_digest(root)
    open_it(root, digest)

    def fail(_: Path) -> str:
        pytest.fail("it was read again")

    monkeypatch.setattr(module, "closure_digest", fail)
    open_it(root, digest)


@pytest.mark.parametrize("change", ["write", "replace", "add", "remove", "mode"])
def test_any_change_is_seen_after_it_was_verified(root: Path, change: str) -> None:
    digest = closure_digest(root)
    open_it(root, digest)
    program = root / "usr/bin/qemu"
    match change:
        case "write":
            program.write_bytes(b"b program")
        case "replace":
            program.unlink()
            program.write_bytes(b"c program")
        case "add":
            (root / "usr/bin/more").touch()
        case "remove":
            program.unlink()
        case _:
            program.chmod(0o755)
    with pytest.raises(HostError, match="have changed"):
        open_it(root, digest)


def test_a_damaged_memory_only_costs_another_reading(root: Path) -> None:
    digest = closure_digest(root)
    for damage in (b"", b"[]", b"{", b'{"x": 1}'):
        (root.parent / "verified.json").write_bytes(damage)
        open_it(root, digest)


def test_a_closure_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="nowhere"):
        open_it(tmp_path / "nowhere", "0" * 64)
