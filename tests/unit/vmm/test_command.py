"""QEMU's and the kernel's command lines say what a checkpoint depends on, and grant nothing more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from microvm.vmm.command import Machine, encode_argv, encode_cmdline

MACHINE = Machine(
    label="vm_abc", accelerator="tcg", memory_mib=2048, vcpus=2, has_kernel=False, has_tap=False
)


def value_of(argv: list[str], option: str) -> list[str]:
    return [argv[index + 1] for index, word in enumerate(argv) if word == option]


def test_a_machine_that_loads_has_no_kernel_and_waits() -> None:
    argv = encode_argv("/usr/bin/qemu", MACHINE)
    assert argv[0] == "/usr/bin/qemu"
    assert value_of(argv, "-incoming") == ["defer"]
    assert "-S" in argv
    assert "-kernel" not in argv


def test_a_machine_that_boots_has_a_kernel_and_waits() -> None:
    argv = encode_argv("/usr/bin/qemu", replace(MACHINE, has_kernel=True, cmdline="console=ttyS0 a,b"))
    assert value_of(argv, "-append") == ["console=ttyS0 a,b"]
    assert value_of(argv, "-kernel") == ["/vm/kernel"]
    assert "-S" in argv
    assert "-incoming" not in argv


def test_booting_and_loading_machines_have_the_same_devices() -> None:
    boots = encode_argv("q", replace(MACHINE, has_kernel=True))
    loads = encode_argv("q", MACHINE)
    for option in ("-M", "-m", "-smp", "-object", "-device", "-global", "-cpu", "-bios"):
        assert value_of(boots, option) == value_of(loads, option)


def test_ram_is_the_shared_file_of_the_machines_size() -> None:
    argv = encode_argv("q", MACHINE)
    assert "memory-backend=ram" in value_of(argv, "-M")[0]
    backend = value_of(argv, "-object")[0].split(",")
    assert {"id=ram", "share=on", "mem-path=/vm/ram", "size=2048M"} <= set(backend)


def test_the_disk_bypasses_the_page_cache_and_stops_the_machine_when_full() -> None:
    argv = encode_argv("q", MACHINE)
    assert "cache.direct=on" in value_of(argv, "-blockdev")[0].split(",")
    assert "werror=stop,rerror=report" in value_of(argv, "-device")[1]


def test_qemu_keeps_its_own_sandbox_and_no_defaults() -> None:
    argv = encode_argv("q", MACHINE)
    assert value_of(argv, "-sandbox") == [
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
    ]
    assert {"-nodefaults", "-no-user-config", "-no-reboot"} <= set(argv)


@pytest.mark.parametrize("has_tap", [False, True])
def test_there_is_a_network_device_only_with_a_tap(has_tap: bool) -> None:
    argv = encode_argv("q", replace(MACHINE, has_tap=has_tap))
    assert bool(value_of(argv, "-netdev")) is has_tap
    assert any("virtio-net" in device for device in value_of(argv, "-device")) is has_tap


@pytest.mark.parametrize("label", ["", "a,b", "a b", "x" * 65, "a\n"])
def test_a_label_that_qemu_would_take_apart_is_a_bug(label: str) -> None:
    with pytest.raises(AssertionError):
        encode_argv("q", replace(MACHINE, label=label))


def test_the_kernel_is_told_the_hosts_counter_and_may_load_modules() -> None:
    words = encode_cmdline(2_599_998, extra="microvm.probe").split(" ")
    assert {"tsc_early_khz=2599998", "tsc=reliable", "init=/usr/lib/microvm/init", "panic=-1"} <= set(words)
    assert words[-1] == "microvm.probe"
    assert "nomodule" not in words
