import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import image.digest
from image.digest import DigestCache, canonical_json, digest_file, digest_of


def test_canonical_json_does_not_depend_on_the_order_of_keys():
    assert canonical_json({"b": 1, "a": [1, "ü"]}) == b'{"a":[1,"\\u00fc"],"b":1}'
    assert digest_of({"b": 1, "a": 2}) == digest_of({"a": 2, "b": 1})


@given(st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=5000)), max_size=5), st.integers(0, 3))
def test_a_sparse_files_digest_is_that_of_its_bytes(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[int, bytes]], tail: int
):
    path = tmp_path_factory.mktemp("sparse") / "file"
    with path.open("wb") as file:
        for holes, data in parts:
            file.seek(holes << 16, os.SEEK_CUR)
            file.write(data)
        file.truncate(file.tell() + (tail << 16))
    assert digest_file(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_is_hashed_again_only_when_its_stat_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hashed: list[Path] = []

    def count(path: Path) -> str:
        hashed.append(path)
        return digest_file(path)

    monkeypatch.setattr(image.digest, "digest_file", count)
    path = tmp_path / "file"
    path.write_bytes(b"one")
    cache = DigestCache(tmp_path / "digests.json")
    assert cache.digest(path) == cache.digest(path) == hashlib.sha256(b"one").hexdigest()
    cache.save()
    again = DigestCache(tmp_path / "digests.json")
    assert again.digest(path) == hashlib.sha256(b"one").hexdigest()
    assert hashed == [path]
    path.write_bytes(b"three")
    assert again.digest(path) == hashlib.sha256(b"three").hexdigest()
    assert hashed == [path, path]


@pytest.mark.parametrize("damage", [b"", b"[1]", b'{"x": 3}', b"\xff"])
def test_a_damaged_cache_costs_time_only(tmp_path: Path, damage: bytes):
    path = tmp_path / "x"
    path.write_bytes(b"x")
    (tmp_path / "digests.json").write_bytes(damage.replace(b"x", str(path).encode()))
    assert DigestCache(tmp_path / "digests.json").digest(path) == hashlib.sha256(b"x").hexdigest()


def test_what_the_builder_wrote_need_not_be_read(tmp_path: Path):
    path = tmp_path / "x"
    path.write_bytes(b"x")
    cache = DigestCache(tmp_path / "digests.json")
    cache.remember(path, "the word")
    assert cache.digest(path) == "the word"
    path.unlink()
    cache.save()
    assert (tmp_path / "digests.json").read_bytes() == b"{}"
