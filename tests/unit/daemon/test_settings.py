"""The configuration: defaults, refusals, and the sample file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from microvm.daemon.settings import (
    Settings,
    WorkspaceSettings,
    dump_settings,
    load_settings,
    parse_settings,
)
from microvm.errors import RequestError

SAMPLE = Path(__file__).resolve().parents[3] / "examples" / "microvm.toml"


def refusal(text: str) -> str:
    with pytest.raises(RequestError) as caught:
        parse_settings(text, source="x.toml")
    assert caught.value.code == "invalid_argument"
    return caught.value.message


def test_the_sample_parses_and_names_every_key() -> None:
    values: dict[str, Any] = tomllib.loads(SAMPLE.read_text("utf-8"))
    assert values.keys() == Settings.model_fields.keys()
    assert values["workspace"].keys() == WorkspaceSettings.model_fields.keys()
    parse_settings(SAMPLE.read_text("utf-8"))


def test_the_sample_shows_the_defaults_where_they_are_fixed() -> None:
    sample = parse_settings(SAMPLE.read_text("utf-8"))
    defaults = Settings()
    chosen = {"socket", "max_memory_mib", "max_storage_gib", "workspace"}
    for name in Settings.model_fields.keys() - chosen:
        assert getattr(sample, name) == getattr(defaults, name), name


def test_paths_follow_the_state_directory() -> None:
    settings = parse_settings('state_dir = "/srv/vms"')
    assert settings.vm_dir == Path("/srv/vms/vm")
    assert settings.image == Path("/srv/vms/image")
    assert settings.socket == Path("/srv/vms/run/service.sock")
    assert settings.admin_socket == Path("/srv/vms/run/admin.sock")


def test_an_unknown_key_is_refused_with_the_nearest_one() -> None:
    assert (
        refusal('listne = "127.0.0.1:1"') == "x.toml: unknown key 'listne'; the nearest known one is listen"
    )


def test_an_unknown_key_of_a_table_is_refused_with_the_nearest_one() -> None:
    assert "unknown key 'workspace.max_vm'; the nearest known one is workspace.max_vms" in refusal(
        "[workspace]\nmax_vm = 3"
    )


@pytest.mark.parametrize(
    "text",
    [
        'max_vms = "8"',
        "max_vms = true",
        "max_vms = 0",
        "max_vms = 1.5",
        "listen = 8090",
        "state_dir = 5",
        'vmm = "firecracker"',
        'accel = "hax"',
        "drain_seconds = true",
        "drain_seconds = nan",
        "allow_remote = 1",
        'allowed_hosts = "a"',
        "allowed_hosts = [1]",
        'log_level = "loud"',
        "uid_base = 0",
        "uid_base = 4294967295",
    ],
)
def test_a_value_of_another_type_or_range_is_refused_by_its_key(text: str) -> None:
    assert text.split(" ", 1)[0] in refusal(text)


@pytest.mark.parametrize("address", ["", "8090", ":8090", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000"])
def test_a_malformed_address_is_refused(address: str) -> None:
    assert "is not host:port" in refusal(f'listen = "{address}"')


def test_a_relative_path_is_refused() -> None:
    assert "vm_dir: must be an absolute path" in refusal('vm_dir = "vms"')


def test_a_socket_longer_than_the_kernel_takes_is_refused() -> None:
    assert "socket: " in refusal(f'socket = "/{"d" * 107}"')


def test_a_reachable_address_must_be_meant() -> None:
    assert "allow_remote" in refusal('listen = "0.0.0.0:8090"')
    settings = parse_settings('listen = "0.0.0.0:8090"\nallow_remote = true')
    assert len(settings.warnings) == 1
    named = parse_settings('listen = "0.0.0.0:8090"\nallow_remote = true\nallowed_hosts = ["a.example"]')
    assert named.warnings == ()


def test_an_ipv6_loopback_address_is_split_without_its_brackets() -> None:
    settings = parse_settings('listen = "[::1]:8090"')
    assert (settings.host, settings.port) == ("::1", 8090)


def test_text_that_is_not_toml_is_refused_with_its_place() -> None:
    assert refusal("max_vms = = 3").startswith("x.toml is not TOML: ")


def test_the_environment_names_the_file_and_the_level(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("max_vms = 7", "utf-8")
    settings = load_settings(env={"MICROVM_CONFIG": str(file), "MICROVM_LOG": "DEBUG"})
    assert (settings.max_vms, settings.log_level) == (7, "debug")


def test_a_named_file_wins_over_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("max_vms = 7", "utf-8")
    assert load_settings(file, env={"MICROVM_CONFIG": "/nonexistent"}).max_vms == 7


def test_a_missing_file_is_an_error_that_names_it() -> None:
    with pytest.raises(RequestError, match="/nonexistent"):
        load_settings(Path("/nonexistent"), env={})


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().max_vms = 3


def test_a_generated_configuration_reads_back() -> None:
    text = dump_settings({"state_dir": Path("/srv/vms"), "listen": "127.0.0.1:9"})
    assert parse_settings(text) == Settings(state_dir=Path("/srv/vms"), listen="127.0.0.1:9")
