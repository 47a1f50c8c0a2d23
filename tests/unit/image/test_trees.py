"""Closure, layer and the merge of tars: what is made of trees that were unpacked."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from image.closure import closure_digest, parse_libraries
from image.errors import ImageError
from image.layer import guest_sources, pack
from image.rootfs import merge

LISTING = """\tlinux-vdso.so.1 (0x00007f0000000000)
\tlibz.so.1 => /tree/usr/lib/libz.so.1 (0x00007f0000000001)
\t/lib64/ld-linux-x86-64.so.2 => /tree/ld.so (0x00007f0000000002)
\tlibc.so.6 => /tree/usr/lib/libc.so.6 (0x00007f0000000003)
"""


def test_the_libraries_are_those_that_the_linker_would_load():
    assert parse_libraries(LISTING) == ["/tree/usr/lib/libz.so.1", "/tree/usr/lib/libc.so.6"]


def test_a_library_that_is_not_there_is_named():
    with pytest.raises(ImageError, match=r"libgone\.so\.1"):
        parse_libraries(LISTING + "\tlibgone.so.1 => not found\n")


def test_a_closures_digest_covers_names_modes_links_and_contents(tmp_path: Path):
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr" / "a").write_text("a")
    (tmp_path / "lib").symlink_to("usr")
    seen = [closure_digest(tmp_path)]
    assert closure_digest(tmp_path) == seen[0]
    (tmp_path / "usr" / "a").chmod(0o500)
    seen.append(closure_digest(tmp_path))
    (tmp_path / "usr" / "a").write_text("b")
    seen.append(closure_digest(tmp_path))
    (tmp_path / "usr" / "a").rename(tmp_path / "usr" / "b")
    seen.append(closure_digest(tmp_path))
    (tmp_path / "empty").mkdir()
    seen.append(closure_digest(tmp_path))
    assert len(set(seen)) == len(seen)


def test_the_guests_sources_leave_caches_out(tmp_path: Path):
    (tmp_path / "__pycache__").mkdir()
    for name in ("supervisor.py", "launch.c", "notes.txt", "__pycache__/old.py"):
        (tmp_path / name).write_text(name)
    assert guest_sources(tmp_path) == {"supervisor.py": b"supervisor.py", "launch.c": b"launch.c"}


@pytest.mark.parametrize("missing", ["supervisor.py", "launch.c"])
def test_a_folder_that_is_not_the_guest_is_refused(tmp_path: Path, missing: str):
    for name in {"supervisor.py", "launch.c"} - {missing}:
        (tmp_path / name).touch()
    with pytest.raises(ImageError, match="not the guest's package"):
        guest_sources(tmp_path)


def test_a_layer_is_the_same_bytes_whatever_the_files_dates_modes_and_order(tmp_path: Path):
    written: list[bytes] = []
    for turn, names in enumerate((["b", "a", "launch"], ["launch", "a", "b"])):
        folder = tmp_path / str(turn)
        (folder / "guest").mkdir(parents=True)
        for name in names:
            (folder / "guest" / name).write_text(name)
            os.utime(folder / "guest" / name, (turn, turn))
            (folder / "guest" / name).chmod(0o600 + turn)
        pack(folder, "usr/lib/x", {"usr/lib/x/guest/launch"}, 5, tmp_path / "layer.tar")
        written.append((tmp_path / "layer.tar").read_bytes())
    assert written[0] == written[1]
    with tarfile.open(tmp_path / "layer.tar") as tar:
        assert [(member.name, member.mode, member.uid, member.mtime) for member in tar] == [
            ("./usr/lib/x/guest", 0o755, 0, 5),
            ("./usr/lib/x/guest/a", 0o644, 0, 5),
            ("./usr/lib/x/guest/b", 0o644, 0, 5),
            ("./usr/lib/x/guest/launch", 0o755, 0, 5),
        ]


def write_tar(path: Path, members: dict[str, bytes | None]) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            member.size = len(data or b"")
            tar.addfile(member, io.BytesIO(data or b""))
    return path


def test_of_two_files_of_a_name_the_later_tars_stays_and_device_nodes_go(tmp_path: Path):
    long_name = "./etc/" + "n" * 200  # has a pax header of its own
    first = {"./dev": None, "./dev/null": b"", "./etc": None, "./etc/a": b"old" * 400, long_name: b"kept"}
    base = write_tar(tmp_path / "a.tar", first)
    layer = write_tar(tmp_path / "b.tar", {"./etc": None, "./etc/a": b"new", "./etc/b": b"more"})
    merge([base, layer], tmp_path / "c.tar")
    with tarfile.open(tmp_path / "c.tar") as tar:
        found = [(member.name, tar.extractfile(member)) for member in tar]
        contents = {name: file.read() if file else None for name, file in found}
    assert contents == {
        "./dev": None,
        "./etc": None,
        long_name: b"kept",
        "./etc/a": b"new",
        "./etc/b": b"more",
    }
