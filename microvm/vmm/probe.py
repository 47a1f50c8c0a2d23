"""Which accelerator executes guests here: decided by booting one, remembered with the reason.

Promises never to believe /dev/kvm. On some machines the device opens and makes VMs, and an ordinary guest
kernel still dies after a minute of instruction-by-instruction emulation. Must not be asked on every start:
the answer is kept for this boot of the host, this VMM and this image. Neighbour: `qemu` runs the probe like
any VM.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import trio

from microvm.errors import HostError, VmmError
from microvm.host.process import spawn_jailed
from microvm.vmm.base import Accelerator, BootSource, VmmPlan
from microvm.vmm.closure import Closure
from microvm.vmm.qemu import Launcher, QemuKind

Wish = Literal["auto", "kvm", "tcg"]

PROBE_SECONDS: Final = 10.0
"""A guest under working KVM gets to its initrd within 1 s, under TCG within 2 to 5."""

PROBE_MEMORY_MIB: Final = 128  # the smallest VM there is
PROBE_DISK_BYTES: Final = 1 << 20  # never looked at
PROBE_ARGUMENT: Final = "microvm.probe"  # the initrd says the word below, and powers off
PROBE_WORD: Final = b"MICROVM-PROBE-OK"

KVM_DEVICE: Final = "/dev/kvm"


@dataclass(frozen=True, slots=True)
class ProbeGuest:
    """What a probe boots, and as whom. The descriptors stay the caller's.

    Attributes:
        kernel_fd: The image's kernel.
        initrd_fd: The image's initrd.
        image_digest: Names both.
        directory: Where the probe makes and removes a folder `probe`; on a file system with O_DIRECT, such
            as `vm_dir`.
        uid: A slot's UID that no VM has.
        cgroup_fd: The cgroup that the probe's VMM is born in.
        tsc_khz: The host's TSC rate.
    """

    kernel_fd: int
    initrd_fd: int
    image_digest: str
    directory: Path
    uid: int
    cgroup_fd: int
    tsc_khz: int


async def choose_accelerator(
    wish: Wish,
    closure: Closure,
    guest: ProbeGuest,
    remembered_file: Path,
    *,
    launcher: Launcher = spawn_jailed,
    deadline_s: float = PROBE_SECONDS,
) -> Accelerator:
    """Decides between KVM and TCG. Must be called on the main thread.

    Args:
        wish: "auto" takes KVM where a guest boots under it, else TCG; "kvm" insists; "tcg" is TCG.
        closure: The VMM.
        guest: What to boot.
        remembered_file: Where the answer is kept; made, replaced, and of no loss.
        launcher: Starts the process; another one only in tests.
        deadline_s: How long a guest may take to boot under KVM.

    Raises:
        VmmError: KVM was insisted on and does not run guests; the message says why.
    """
    if wish == "tcg":
        return Accelerator("tcg", "the settings ask for it")
    key = _key(closure.digest, guest.image_digest)
    found = _recall(remembered_file, key)
    if found is None:
        found = await _probe_kvm(closure, guest, launcher, deadline_s)
        _remember(remembered_file, key, found)
    if wish == "kvm" and found.name != "kvm":
        raise VmmError(f"accel is set to kvm, but {found.reason}; set it to auto or tcg")
    return found


async def identify_cpu(kind: QemuKind, guest: ProbeGuest, remembered_file: Path) -> str:
    """SHA-256 over the processor that `kind`'s guests see. Must be called on the main thread.

    Args:
        kind: With the accelerator that was chosen.
        guest: As for `choose_accelerator`; nothing is booted.
        remembered_file: Where the answer is kept; made, replaced, and of no loss.

    Raises:
        VmmError: QEMU does not say.
    """
    key = _key(kind.closure_digest, kind.accelerator.name)
    kept = _read(remembered_file)
    if kept.get("key") == key and isinstance(kept.get("cpu"), str):
        return str(kept["cpu"])
    with ExitStack() as stack:
        async with kind.open_vmm(_plan(kind, guest, stack)) as vmm:
            cpu = await vmm.cpu_digest()
    _write(remembered_file, {"key": key, "cpu": cpu})
    return cpu


async def _probe_kvm(
    closure: Closure, guest: ProbeGuest, launcher: Launcher, deadline_s: float
) -> Accelerator:
    try:
        os.close(os.open(KVM_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return Accelerator("tcg", f"{KVM_DEVICE} cannot be opened: {error.strerror}")
    kind = QemuKind(closure, Accelerator("kvm", "being probed"), guest.tsc_khz, launcher)
    problem = f"a guest under it did not boot in {deadline_s:g} s"
    with ExitStack() as stack:
        plan = _plan(kind, guest, stack)
        started = trio.current_time()
        try:
            async with kind.open_vmm(plan) as vmm:
                with trio.move_on_after(deadline_s):
                    await vmm.boot()
                    await vmm.exited.wait()
                    problem = f"a guest under it ended QEMU with status {vmm.exit_status}"
        except VmmError as error:  # also where a guest was so fast that `boot` found QEMU gone
            problem = f"QEMU fails with it: {_short(error)}"
        console = os.pread(plan.console_fd, 1 << 20, 0)
    if PROBE_WORD in console:
        return Accelerator("kvm", f"a guest booted under KVM in {trio.current_time() - started:.1f} s")
    return Accelerator("tcg", f"{KVM_DEVICE} opens, but {problem}")


def _short(error: VmmError) -> str:
    """What QEMU said at its end, else what the driver saw, on one line."""
    lines = [line.strip() for line in error.console_tail.splitlines() if line.strip()]
    said = "; ".join(lines[-2:]) or error.message
    return "".join(c for c in said if c.isprintable())[:300]


def _plan(kind: QemuKind, guest: ProbeGuest, stack: ExitStack) -> VmmPlan:
    try:
        folder = stack.enter_context(_folder(guest.directory))
        memfile_fd = _make(folder / "ram", PROBE_MEMORY_MIB << 20, stack)
        disk_fd = _make(folder / "disk", PROBE_DISK_BYTES, stack)
        console_fd = _make(folder / "console", 0, stack)
        for fd in (memfile_fd, disk_fd):
            os.fchown(fd, guest.uid, guest.uid)
    except OSError as error:
        raise HostError("make the probe's files", str(guest.directory), error.errno or 0) from error
    return VmmPlan(
        label="probe",
        memory_mib=PROBE_MEMORY_MIB,
        vcpus=1,
        memfile_fd=memfile_fd,
        disk_fd=disk_fd,
        uid=guest.uid,
        cgroup_fd=guest.cgroup_fd,
        console_fd=console_fd,
        boot=BootSource(guest.kernel_fd, guest.initrd_fd, kind.cmdline(extra=PROBE_ARGUMENT)),
    )


@contextmanager
def _folder(directory: Path) -> Generator[Path]:
    """A folder that goes away; always of one name, so that a crash leaves one at most, for the next probe.

    The files need names while QEMU starts: what is unlinked cannot be bound into a jail.
    """
    folder = directory / "probe"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make(path: Path, size_bytes: int, stack: ExitStack) -> int:
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, fd)
    os.ftruncate(fd, size_bytes)
    return fd


def _key(closure_digest: str, image_digest: str) -> str:
    """Names everything that the answer may depend on; the host's boot covers its kernel and modules."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    parts = [boot_id, os.uname().release, closure_digest, image_digest]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _recall(remembered_file: Path, key: str) -> Accelerator | None:
    fields = _read(remembered_file)
    if fields.get("key") != key or fields.get("name") not in {"kvm", "tcg"}:
        return None
    return Accelerator(str(fields["name"]), str(fields.get("reason", "remembered")))


def _remember(remembered_file: Path, key: str, found: Accelerator) -> None:
    _write(remembered_file, {"key": key, "name": found.name, "reason": found.reason})


def _read(remembered_file: Path) -> Mapping[str, Any]:
    try:
        kept: Any = json.loads(remembered_file.read_bytes())
    except (OSError, ValueError):
        return {}
    return cast("Mapping[str, Any]", kept) if isinstance(kept, Mapping) else {}


def _write(remembered_file: Path, facts: Mapping[str, str]) -> None:
    """Replaces the file; a failure costs the next start one probe, so it is none."""
    temporary = remembered_file.with_suffix(".new")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(facts), "utf-8")
        temporary.replace(remembered_file)
