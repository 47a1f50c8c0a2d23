from pathlib import Path

import pytest

from image.debian import Target, Tree, install_tree, plan_sources
from image.errors import ImageError

ARCHIVE = Target("http://archive.test/debian/", "bookworm", "main", "Debian")
UPDATES = Target("http://archive.test/debian/", "bookworm-updates", "main", "Debian")
SECURITY = Target("http://archive.test/debian-security/", "bookworm-security", "main", "Debian")
VENDOR = Target("http://vendor.test/apt/", "bookworm", "main", "Vendor")


def test_the_suite_comes_from_the_machines_own_mirror_with_security_updates():
    assert plan_sources([VENDOR, UPDATES, ARCHIVE, SECURITY], "trixie", "") == [
        "deb http://archive.test/debian/ trixie main",
        "deb http://archive.test/debian/ trixie-updates main",
        "deb http://archive.test/debian-security/ trixie-security main",
    ]


def test_a_machine_without_a_security_source_gets_none():
    assert len(plan_sources([ARCHIVE], "trixie", "")) == 2


def test_a_recipes_mirror_is_used_alone():
    assert plan_sources([ARCHIVE], "trixie", "http://mine.test/debian") == [
        "deb http://mine.test/debian trixie main"
    ]


def test_before_the_first_update_debians_layout_tells_its_archive():
    unknown = [Target(target.uri, target.release, "main", "") for target in (VENDOR, ARCHIVE)]
    assert plan_sources(unknown, "trixie", "")[0] == "deb http://archive.test/debian/ trixie main"


@pytest.mark.parametrize("targets", [[], [VENDOR], [SECURITY]])
def test_a_machine_without_debian_is_told_to_name_a_mirror(targets: list[Target]):
    with pytest.raises(ImageError, match="mirror"):
        plan_sources(targets, "trixie", "")


def fake_mmdebstrap(folder: Path, script: str) -> str:
    program = folder / "mmdebstrap"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def install(folder: Path, said: list[str]) -> None:
    install_tree(
        Tree("minbase", ("git", "jq"), ("path-exclude=/x",)),
        "trixie",
        ["deb http://archive.test/debian trixie main"],
        77,
        folder / "tree.tar",
        progress=said.append,
        hook=folder / "hook",
        environment={"WORD": "yes"},
    )


def test_a_tree_is_asked_for_with_its_packages_clock_and_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    record = (
        'printf "%s\\n" "$@" "$SOURCE_DATE_EPOCH" "$WORD" >"$(dirname "$0")/asked"; echo "I: extracting..."'
    )
    monkeypatch.setenv("PATH", fake_mmdebstrap(tmp_path, record))
    said: list[str] = []
    install(tmp_path, said)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert {"--variant=minbase", "--include=git,jq", "--dpkgopt=path-exclude=/x"} <= set(asked)
    assert f"--customize-hook={tmp_path}/hook" in asked
    assert asked[-5:] == [
        "trixie",
        f"{tmp_path}/tree.tar",
        "deb http://archive.test/debian trixie main",
        "77",
        "yes",
    ]
    assert said == ["  extracting..."]


def test_a_failing_mmdebstrap_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", fake_mmdebstrap(tmp_path, 'echo "E: no such package" >&2; exit 3'))
    with pytest.raises(ImageError, match="status 3:\nE: no such package"):
        install(tmp_path, [])


def test_a_missing_mmdebstrap_names_the_packages_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImageError, match="apt-get install debian-archive-keyring mmdebstrap"):
        install(tmp_path, [])
