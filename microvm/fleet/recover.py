"""Start-up: what the last run left is put in order, as `policy.recovery` decides, before anything listens.

Leftover cgroups are killed and removed by their mark first, so that nothing runs while files are looked at.
Files of VMs that the store does not know are scratch of an unfinished creation or destruction and are
removed. Nothing that
the service did not make is ever touched: only names below its own two directories are looked at.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from pathlib import Path

from microvm.errors import MicrovmError
from microvm.fleet import layout
from microvm.fleet.layout import Layout
from microvm.fleet.log import log
from microvm.host.files import host_errors
from microvm.model import Generation, Intent, JobRecord, JobState, VmId, VmRecord, VmState
from microvm.policy import recovery
from microvm.policy.recovery import Fail, Found, Keep, Outcome, Remove, RollBack, RollForward
from microvm.store import Loaded, Store, checkpoint, writes
from microvm.store.writes import Write


async def recover(store: Store, loaded: Loaded, places: Layout) -> list[tuple[VmRecord, list[JobRecord]]]:
    """Puts every VM of the store in order.

    Returns:
        The VMs that are kept, with their jobs.

    Raises:
        HostError: The store or the directories cannot be written.
    """
    intents: dict[VmId, list[Intent]] = defaultdict(list)
    for intent in loaded.open_intents:
        intents[intent.vm_id].append(intent)
    jobs: dict[VmId, list[JobRecord]] = defaultdict(list)
    for job in loaded.jobs:
        jobs[job.vm_id].append(job)
    kept: list[tuple[VmRecord, list[JobRecord]]] = []
    for record in loaded.vms:
        outcome = recovery.decide(_find(record, places))
        if not isinstance(outcome, Keep):
            log.warning(
                "recovered", extra={"vm_id": record.vm_id, "was": record.state, "outcome": repr(outcome)}
            )
        settled = await _settle(store, record, jobs[record.vm_id], intents[record.vm_id], outcome, places)
        if settled is not None:
            kept.append(settled)
    await _close_orphans(store, intents, {record.vm_id for record in loaded.vms})
    sweep_files(places, {record.vm_id for record, _ in kept})
    return kept


def _find(record: VmRecord, places: Layout) -> Found:
    directory = places.vm(record.vm_id)
    manifest = checkpoint.read(directory)
    mine = manifest is not None and manifest.owner == record.vm_id
    return Found(
        record,
        disk=(directory / layout.DISK).is_file(),
        manifest=Generation(manifest.generation) if manifest is not None and mine else None,
    )


async def _settle(
    store: Store,
    record: VmRecord,
    jobs: list[JobRecord],
    intents: list[Intent],
    outcome: Outcome,
    places: Layout,
) -> tuple[VmRecord, list[JobRecord]] | None:
    """Commits what a VM is from now on; None where it is gone."""
    now = time.time()
    closing: list[Write[None]] = [
        writes.done(intent.intent_id, f"recovered: {outcome}", now) for intent in intents
    ]
    if isinstance(outcome, Remove):
        layout.remove_tree(places.vm(record.vm_id))
        layout.remove_tree(places.logs(record.vm_id))
        await store.commit(writes.remove_vm(record.vm_id), *closing)
        return None
    changes: dict[str, object] = {"slot": None}
    match outcome:
        case RollForward(_, generation):
            changes |= {
                "state": VmState.HIBERNATED,
                "since": now,
                "checkpoint_generation": generation,
                "reason": None,
            }
        case RollBack():
            changes |= {"state": VmState.HIBERNATED, "since": now, "reason": None}
        case Fail(_, reason):
            changes |= {"state": VmState.FAILED, "since": now, "reason": reason}
        case Keep():
            pass
    settled = record.with_(**changes)
    kept_jobs: list[JobRecord] = []
    for job in jobs:
        state = recovery.job_state_after(settled.state, job.state)
        if state is JobState.LOST and job.state is not JobState.LOST:
            job = job.with_(ended_at=now, message="the service ended while it ran")
        if settled.state is not VmState.HIBERNATED:
            job = job.with_(background_processes=0)
        kept_jobs.append(job.with_(state=state))
    _reclaim(places.vm(record.vm_id), settled.state)
    await store.commit(
        writes.change_vm(record.vm_id, **changes),
        *closing,
        *(writes.put_job(job) for job, before in zip(kept_jobs, jobs, strict=True) if job != before),
    )
    return settled, kept_jobs


def _reclaim(directory: Path, state: VmState) -> None:
    """A VM at rest has root's files only, and nothing half-made of what was cut off.

    A hibernated VM whose manifest is damaged keeps what is there: a wake will say what is wrong.
    """
    for name in (layout.RAM, layout.DISK):
        with host_errors("chown", directory / name), contextlib.suppress(FileNotFoundError):
            os.chown(directory / name, 0, 0, follow_symlinks=False)
    manifest = checkpoint.read(directory)
    if manifest is None and state is VmState.HIBERNATED:
        return
    known = {layout.RAM, layout.DISK, checkpoint.MANIFEST, manifest.state_file if manifest else ""}
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.name not in known:
                path.unlink()


async def _close_orphans(store: Store, intents: dict[VmId, list[Intent]], known: set[VmId]) -> None:
    now = time.time()
    orphans = [intent for vm_id, found in intents.items() if vm_id not in known for intent in found]
    if orphans:
        await store.commit(*(writes.done(intent.intent_id, "recovered: gone", now) for intent in orphans))


def sweep_files(places: Layout, known: set[VmId]) -> list[Path]:
    """Removes directories of VMs that are not known, and half-made templates and images.

    Returns:
        What was removed.
    """
    removed: list[Path] = []
    for parent in (places.vm_dir / "vms", places.state_dir / "vms"):
        removed += [path for path in parent.iterdir() if path.name not in known]
    removed += (places.vm_dir / "templates").glob("*.building")
    removed += (places.vm_dir / "images").glob("*.copying")
    for path in removed:
        with contextlib.suppress(MicrovmError):
            if path.is_dir():
                layout.remove_tree(path)
            else:
                path.unlink(missing_ok=True)
        log.warning("swept", extra={"path": str(path)})
    return removed
