from pathlib import Path

import pytest

from image.stages import Stages, key_of_tree


def test_a_stage_is_made_once_for_a_key(tmp_path: Path):
    stages = Stages(tmp_path / "cache")
    made: list[str] = []

    def make(folder: Path) -> None:
        made.append("made")
        (folder / "file").write_text("x")

    first = stages.stage("base", "k" * 64, make)
    assert stages.stage("base", "k" * 64, make) == first
    assert (first / "file").read_text() == "x"
    assert stages.stage("base", "j" * 64, make) != first
    assert len(made) == 2


def test_a_stage_that_fails_leaves_nothing_and_is_tried_again(tmp_path: Path):
    stages = Stages(tmp_path)

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        stages.stage("base", "k", fail)
    assert list(tmp_path.iterdir()) == []
    assert list(stages.stage("base", "k", lambda folder: None).iterdir()) == []


def test_what_an_interrupted_build_left_is_cleared_away(tmp_path: Path):
    (tmp_path / ".new-base").mkdir()
    (tmp_path / ".new-base" / "rubbish").touch()
    assert list(Stages(tmp_path).stage("base", "k", lambda folder: None).iterdir()) == []


def test_stages_that_a_build_did_not_use_are_forgotten(tmp_path: Path):
    Stages(tmp_path).stage("base", "old", lambda folder: None)
    stages = Stages(tmp_path)
    used = stages.stage("base", "new", lambda folder: None)
    stages.forget_unused()
    assert list(tmp_path.iterdir()) == [used]


def test_the_lock_is_released_when_a_build_fails(tmp_path: Path):
    stages = Stages(tmp_path)
    with pytest.raises(RuntimeError), stages.locked():
        raise RuntimeError("no")
    with stages.locked():
        pass


def test_an_unpacked_trees_key_follows_its_tars(tmp_path: Path):
    assert key_of_tree("a") == key_of_tree("a") != key_of_tree("b")
