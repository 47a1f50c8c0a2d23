from pathlib import Path

import pytest

from image.build import HERE, RECIPE, key_of_base, key_of_tools
from image.errors import ImageError
from image.recipe import load_recipe, parse_recipe

GOOD = {"suite": "trixie", "epoch": 1790000000, "disk_gib": 3, "packages": ["git", "bash"]}


def test_the_recipe_that_ships_is_valid_and_names_the_promised_tools():
    recipe = load_recipe(RECIPE)
    promised = {"python3", "nodejs", "git", "bash", "gcc", "build-essential", "curl", "ca-certificates"}
    assert promised | {"jq", "less", "procps", "iproute2"} <= set(recipe.packages)
    assert recipe.suite == "trixie"
    assert recipe.disk_gib == 3
    assert HERE / "recipe.toml" == RECIPE


def test_extra_packages_join_the_packages_sorted_and_once():
    recipe = parse_recipe({**GOOD, "extra_packages": ["ripgrep", "git"]}, Path())
    assert recipe.packages == ("bash", "git", "ripgrep")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"suite": None}, "'suite'"),
        ({"suite": "trixie; rm"}, "'suite'"),
        ({"epoch": "now"}, "'epoch'"),
        ({"epoch": True}, "'epoch'"),
        ({"disk_gib": 0}, "'disk_gib'"),
        ({"disk_gib": 4096}, "'disk_gib'"),
        ({"packages": "git"}, "'packages'"),
        ({"packages": ["--force"]}, "'packages'"),
        ({"packages": ["a,b"]}, "'packages'"),
        ({"packages": [7]}, "'packages'"),
        ({"drop": ["relative"]}, "'drop'"),
        ({"mirror": "ftp://nowhere"}, "'mirror'"),
        ({"script": 1}, "'script'"),
        ({"script": "absent.sh"}, "absent.sh"),
        ({"colour": "red"}, "'colour'"),
    ],
)
def test_a_wrong_recipe_is_refused_by_the_name_of_its_key(
    tmp_path: Path, change: dict[str, object], said: str
):
    fields = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    with pytest.raises(ImageError, match=said):
        parse_recipe(fields, tmp_path)


def test_a_missing_or_broken_recipe_file_is_an_image_error(tmp_path: Path):
    with pytest.raises(ImageError, match="cannot read"):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("suite = ")
    with pytest.raises(ImageError, match="not TOML"):
        load_recipe(tmp_path / "bad.toml")


def test_the_scripts_contents_and_not_its_name_are_part_of_the_recipe(tmp_path: Path):
    (tmp_path / "a.sh").write_text("true\n")
    (tmp_path / "b.sh").write_text("true\n")
    first = parse_recipe({**GOOD, "script": "a.sh"}, tmp_path)
    assert first.script == b"true\n"
    assert first == parse_recipe({**GOOD, "script": "b.sh"}, tmp_path)


@pytest.mark.parametrize(
    "change", [{"packages": ["git"]}, {"epoch": 1}, {"drop": ["/x"]}, {"suite": "forky"}]
)
def test_what_changes_the_package_tree_changes_its_key(change: dict[str, object]):
    assert key_of_base(parse_recipe({**GOOD, **change}, Path())) != key_of_base(parse_recipe(GOOD, Path()))


def test_the_disks_size_and_the_mirror_change_no_package_trees_key():
    other = parse_recipe({**GOOD, "disk_gib": 9, "mirror": "https://mirror.test/debian"}, Path())
    assert key_of_base(other) == key_of_base(parse_recipe(GOOD, Path()))
    assert key_of_tools(other) == key_of_tools(parse_recipe(GOOD, Path()))
