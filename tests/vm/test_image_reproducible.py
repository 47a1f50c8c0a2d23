"""The image again from the same packages: the same bytes; from a build that fails: the one that was there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import image.build
from image import ImageError, build_image, load_manifest

pytestmark = pytest.mark.vm


@pytest.fixture
def cache(image_dir: Path) -> Path:
    """The steps of the tests' image: its package trees are used again, all that follows is made anew."""
    return image_dir.with_name(image_dir.name + ".cache")


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "image"
    yield directory
    for folder in [path for path in directory.rglob("*") if path.is_dir() and not path.is_symlink()]:
        folder.chmod(0o700)


def test_a_second_image_of_the_same_inputs_is_the_same_to_the_byte(
    image_dir: Path, cache: Path, output: Path
):
    said: list[str] = []
    built = build_image(output, progress=said.append, cache=cache)
    assert built == load_manifest(image_dir)
    assert any(line.startswith("rootfs") for line in said)
    said.clear()
    assert build_image(output, progress=said.append, cache=cache) == built
    assert said == ["image: nothing changed"]


def test_a_build_that_fails_leaves_the_image_that_was_there(
    image_dir: Path, cache: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    del image_dir
    before = build_image(output, progress=lambda _: None, cache=cache)
    held = sorted(path.name for path in output.iterdir())

    def refuse(*_: object) -> None:
        raise ImageError("no room")

    monkeypatch.setattr(image.build, "make_ext4", refuse)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(image.build.RECIPE.read_text().replace("disk_gib = 3", "disk_gib = 4"))
    with pytest.raises(ImageError, match="no room"):
        build_image(output, recipe, progress=lambda _: None, cache=cache)
    assert load_manifest(output) == before
    assert held == sorted(
        path.name for path in output.iterdir() if path.name not in _parts_of_the_failed(output)
    )
    monkeypatch.undo()
    assert build_image(output, progress=lambda _: None, cache=cache) == before


def _parts_of_the_failed(output: Path) -> set[str]:
    """Parts are published before the manifest that names them; until the next build they may lie there."""
    named = {part.file for part in load_manifest(output).parts.values()}
    return {path.name for path in output.glob("*-*") if path.name not in named}
