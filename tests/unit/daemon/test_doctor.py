"""The doctor: each check says what it saw and how to mend it."""

from __future__ import annotations

from pathlib import Path

import pytest

from microvm.daemon import doctor
from microvm.daemon.doctor import Check, Status
from microvm.daemon.settings import Settings


def test_every_check_that_is_not_ok_says_how_to_mend_it(tmp_path: Path) -> None:
    checks = doctor.examine(Settings(state_dir=tmp_path / "absent"))
    assert len(checks) == len(doctor.CHECKS)
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        assert check.seen
        assert check.status is Status.OK or check.mend, check.name


def test_examining_an_absent_state_directory_makes_nothing(tmp_path: Path) -> None:
    doctor.examine(Settings(state_dir=tmp_path / "absent"))
    assert list(tmp_path.iterdir()) == []


def test_a_readable_state_directory_fails(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    check = doctor.check_state_dir(Settings(state_dir=tmp_path))
    assert (check.status, check.mend) == (Status.FAIL, f"chmod 0700 {tmp_path}")


def test_a_private_state_directory_is_ok(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert doctor.check_state_dir(Settings(state_dir=tmp_path)).status is Status.OK


def test_uids_of_users_are_refused() -> None:
    check = doctor.check_uids(Settings(uid_base=65534))  # nobody
    assert check.status is Status.FAIL
    assert "65534" in check.seen


def test_a_missing_image_names_the_command_that_makes_one(tmp_path: Path) -> None:
    check = doctor.check_image(Settings(state_dir=tmp_path))
    assert (check.status, check.mend) == (Status.FAIL, "microvm image build")


def test_a_chosen_tcg_needs_no_hardware() -> None:
    assert doctor.check_accelerator(Settings(accel="tcg")).status is Status.OK


def test_limits_switched_off_are_a_warning() -> None:
    assert doctor.check_cgroups(Settings(limits="none")).status is Status.WARN


def test_a_budget_beyond_the_machine_is_a_warning() -> None:
    assert doctor.check_memory(Settings(max_memory_mib=2**40)).status is Status.WARN


def test_json_has_mend_only_where_there_is_something_to_mend() -> None:
    assert Check("a", Status.OK, "b").to_json() == {"name": "a", "status": "ok", "seen": "b"}
    assert Check("a", Status.FAIL, "b", "c").to_json()["mend"] == "c"


def test_what_serve_found_about_hardware_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "KVM_DEVICE", Path("/dev/null"))
    settings = Settings(state_dir=tmp_path)
    assert doctor.check_accelerator(settings).status is Status.OK
    (tmp_path / "accelerator.json").write_text('{"name": "tcg", "reason": "no MSR"}', "utf-8")
    check = doctor.check_accelerator(settings)
    assert (check.status, check.seen) == (Status.WARN, "tcg: no MSR")
