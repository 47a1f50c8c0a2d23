"""What each core tool does: validated parameters in, the fleet asked, the result shown.

Handlers own nothing and decide nothing: ownership, admission and receipts are the fleet's. They must not
know which door the call came through. Their neighbours: `params`, `results`, `api`.
"""

from __future__ import annotations

import base64
from typing import Any

from microvm.catalogue import params as p
from microvm.catalogue.api import Call
from microvm.catalogue.paging import fetch_bytes
from microvm.catalogue.results import show_file, show_job, show_output, show_vm
from microvm.errors import RequestError
from microvm.model import FILE_CALL_BYTES, PAGE_BYTES, ExecSpec, SuspendMode, VmSpec

Result = dict[str, Any]


async def vm_create(call: Call, params: p.VmCreate) -> Result:
    """Make a VM."""
    view = await call.fleet.create(
        call.principal,
        params.request_id,
        VmSpec(memory_mib=params.memory_mib, vcpus=params.vcpus),
        idle_seconds=params.idle_seconds,
        idle_mode=SuspendMode(params.idle_mode),
        env=params.env or {},
        description=params.description,
        arguments=p.canonical(params),
        progress=call.progress,
    )
    return show_vm(view, call.principal)


async def vm_list(call: Call, params: p.VmList) -> Result:
    """List VMs."""
    if params.all and not call.principal.operator:
        raise RequestError(
            "forbidden", "all=true is for operators; without it your workspace's VMs are listed"
        )
    views = call.fleet.list_vms(call.principal, all_workspaces=params.all)
    return {"vms": [show_vm(view, call.principal) for view in views]}


async def vm_status(call: Call, params: p.VmOnly) -> Result:
    """Show a VM and its jobs."""
    view, jobs = call.fleet.status(call.principal, params.vm_id)
    return show_vm(view, call.principal) | {"jobs": [show_job(job) for job in jobs]}


async def vm_exec(call: Call, params: p.VmExec) -> Result:
    """Start a command."""
    stdin: bytes | None = None
    if params.stdin is not None:
        stdin = params.stdin.encode("utf-8")
    elif params.stdin_base64 is not None:
        stdin = base64.b64decode(params.stdin_base64)
    spec = ExecSpec(
        command=params.command,
        cwd=params.cwd,
        env=params.env or {},
        stdin=stdin,
        timeout_seconds=params.timeout_seconds,
        output_limit_kib=params.output_limit_kib,
    )
    job, page = await call.fleet.exec(
        call.principal,
        params.vm_id,
        params.request_id,
        spec,
        wait_seconds=params.wait_seconds,
        arguments=p.canonical(params, "wait_seconds"),
        progress=call.progress,
    )
    shown = show_job(job)
    if page is not None:
        shown["output"] = show_output(page, encoding="utf-8", max_bytes=PAGE_BYTES)
    return shown


async def vm_job_status(call: Call, params: p.VmJobStatus) -> Result:
    """Show a job."""
    job = await call.fleet.job_status(
        call.principal, params.vm_id, params.job_id, wait_seconds=params.wait_seconds
    )
    return show_job(job)


async def vm_job_output(call: Call, params: p.VmJobOutput) -> Result:
    """Read a page of a job's output."""
    cursor = params.cursor or p.Cursor()
    text = params.encoding == "utf-8"
    page = await call.fleet.job_output(
        call.principal,
        params.vm_id,
        params.job_id,
        cursor=(cursor.stdout, cursor.stderr),
        max_bytes=fetch_bytes(params.max_bytes) if text else params.max_bytes,
        wait_seconds=params.wait_seconds,
    )
    return show_output(page, encoding=params.encoding, max_bytes=params.max_bytes)


async def vm_job_cancel(call: Call, params: p.VmJobCancel) -> Result:
    """Kill a job."""
    return show_job(await call.fleet.job_cancel(call.principal, params.vm_id, params.job_id))


async def vm_read_file(call: Call, params: p.VmReadFile) -> Result:
    """Read a part of a file."""
    if params.length > FILE_CALL_BYTES:
        raise RequestError(
            "payload_too_large",
            f"length: at most {FILE_CALL_BYTES} bytes in one call; go on from next_offset",
        )
    text = params.encoding == "utf-8" and params.length > 0
    chunk = await call.fleet.read_file(
        call.principal,
        params.vm_id,
        params.path,
        offset=params.offset,
        length=fetch_bytes(params.length) if text else params.length,
    )
    return show_file(chunk, encoding=params.encoding, length=params.length)


async def vm_write_file(call: Call, params: p.VmWriteFile) -> Result:
    """Write a file."""
    if params.content_base64 is not None:
        content = base64.b64decode(params.content_base64)
    else:
        content = (params.content or "").encode("utf-8")
    if len(content) > FILE_CALL_BYTES:
        raise RequestError(
            "payload_too_large", f"at most {FILE_CALL_BYTES} bytes in one call; append the rest by offset"
        )
    size, sha256 = await call.fleet.write_file(
        call.principal,
        params.vm_id,
        params.path,
        content,
        offset=params.offset,
        truncate=params.offset is None if params.truncate is None else params.truncate,
        mode=params.mode,
        make_parents=params.make_parents,
    )
    return {"size": size, "sha256": sha256}


async def vm_suspend(call: Call, params: p.VmSuspend) -> Result:
    """Put a VM to rest."""
    view = await call.fleet.suspend(
        call.principal,
        params.vm_id,
        mode=SuspendMode(params.mode),
        force=params.force,
        progress=call.progress,
    )
    return show_vm(view, call.principal)


async def vm_resume(call: Call, params: p.VmResume) -> Result:
    """Wake a VM."""
    view = await call.fleet.resume(
        call.principal,
        params.vm_id,
        cold_boot=params.cold_boot,
        discard_memory=params.discard_memory,
        progress=call.progress,
    )
    return show_vm(view, call.principal)


async def vm_destroy(call: Call, params: p.VmOnly) -> Result:
    """Remove a VM."""
    await call.fleet.destroy(call.principal, params.vm_id)
    return {"destroyed": True}
