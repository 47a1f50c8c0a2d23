"""The shipped systemd unit agrees with the service."""

from __future__ import annotations

import configparser
from pathlib import Path

from microvm.daemon.settings import DEFAULT_CONFIG_PATH, Settings

UNIT = Path(__file__).resolve().parents[3] / "examples" / "microvm.service"


def service_section() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment] - systemd's names have capitals
    parser.read(UNIT)
    return parser["Service"]


def test_a_stop_leaves_time_for_checkpoints() -> None:
    assert float(service_section()["TimeoutStopSec"]) > Settings().drain_seconds


def test_only_the_service_is_asked_to_stop_and_it_may_make_cgroups() -> None:
    service = service_section()
    assert service["KillMode"] == "mixed"
    assert service["Delegate"] == "yes"


def test_it_reads_the_default_configuration() -> None:
    assert service_section()["ExecStart"].endswith(f"microvm serve --config {DEFAULT_CONFIG_PATH}")
