"""An image with another VMM strands no machine that an earlier one saved, as long as its VMM is kept."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from image.closure import closure_digest
from image.digest import digest_of
from tests.fault.hooked_service import HookedService
from tests.vm.live_service import Machine, ToolError
from tests.vm.resident import Resident

pytestmark = [pytest.mark.vm, pytest.mark.root]


@pytest.fixture(scope="module")
def upgraded_image(image_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image with one harmless file more in its VMM's closure: the same program under another digest."""
    target = tmp_path_factory.mktemp("upgraded") / "image"
    manifest: dict[str, Any] = json.loads((image_dir / "manifest.json").read_bytes())
    qemu = manifest["vmm"]["qemu"]
    closures = target / "closures"
    shutil.copytree(image_dir / qemu["closure"], closures / "new", symlinks=True)
    firmware = closures / "new" / "usr" / "share" / "qemu"
    firmware.chmod(0o755)
    (firmware / "notes.txt").write_text("harmless")
    (firmware / "notes.txt").chmod(0o444)
    firmware.chmod(0o555)
    qemu["digest"] = closure_digest(closures / "new")
    qemu["closure"] = f"closures/{qemu['digest']}"
    (closures / "new").rename(target / qemu["closure"])
    manifest["digest"] = digest_of({"parts": manifest["parts"], "vmm": manifest["vmm"]})
    for part in manifest["parts"].values():
        part["file"] = str(image_dir / part["file"])  # where it is: nothing of it is copied
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


def kept(service: HookedService) -> set[str]:
    """The digests of the closures that the service keeps."""
    return {path.name for path in (service.state_dir / "closures").iterdir() if path.is_dir()}


def closure_of(image: Path) -> str:
    return json.loads((image / "manifest.json").read_bytes())["vmm"]["qemu"]["digest"]


def upgrade(service: HookedService, image: Path) -> None:
    """Restarts the service on another image."""
    if service.process is not None:
        service.stop()
    service.settings["image"] = str(image)
    service.start()


def test_a_machine_wakes_on_the_vmm_that_saved_it_as_long_as_that_is_kept(
    make_service: Callable[..., HookedService], image_dir: Path, upgraded_image: Path
) -> None:
    old, new = closure_of(image_dir), closure_of(upgraded_image)
    service = make_service()
    service.start()
    vm, other = (service.owner.create(idle_seconds=0) for _ in range(2))
    resident = Resident(vm)
    vm.suspend(force=True)
    other.text("echo on-disk > note; sync; echo in-memory > /dev/shm/note")
    other.suspend()
    assert kept(service) == {old}
    upgrade(service, upgraded_image)
    assert kept(service) == {old, new}
    vm = service.again(vm)
    resident.go_on(vm)
    vm.suspend(force=True)
    resident.go_on(vm)  # saved and loaded by the old one again
    vm.suspend(force=True)

    service.stop()
    with lost(service, old):
        service.start()
        other = service.again(other)
        check_stranded(other, old, new)
        assert other.call("vm_resume", cold_boot=True)["state"] == "running"
        assert other.text("cat note") == "on-disk\n"
        other.suspend()
        service.stop()
    service.start()
    assert kept(service) == {old, new}
    vm = service.again(vm)
    resident.go_on(vm)
    vm.destroy()
    service.restart()
    assert kept(service) == {new}  # nobody needs the old one any more
    assert service.again(other).text("cat note") == "on-disk\n"


@contextlib.contextmanager
def lost(service: HookedService, digest: str) -> Generator[None]:
    """A closure is not kept inside the block."""
    closures, aside = service.state_dir / "closures", service.state_dir / "aside"
    aside.mkdir()
    for name in (digest, f"{digest}.json"):
        (closures / name).rename(aside / name)
    try:
        yield
    finally:
        for name in (digest, f"{digest}.json"):
            (aside / name).rename(closures / name)
        aside.rmdir()


def check_stranded(vm: Machine, old: str, new: str) -> None:
    """Refused with what differs, and as it was."""
    for call in (lambda: vm.call("vm_resume"), lambda: vm.text("true")):
        with pytest.raises(ToolError, match="cold_boot") as refused:
            call()
        assert (refused.value.code, refused.value.status) == ("checkpoint_mismatch", 409)
        assert refused.value.detail["closure"] == {"saved": old, "here": new}
        assert vm.state == "hibernated"
