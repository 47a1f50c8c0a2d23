"""What tools answer: the result models, and how the fleet's records become them.

Times are RFC 3339 in UTC; what is absent is left out; `JobOutput` alone always has all of its keys. It must
not ask anybody anything: records in, dictionaries out. Its neighbours: `handlers`, `paging`.
"""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from microvm.catalogue.paging import text_page
from microvm.catalogue.schema import Shown
from microvm.model import FileChunk, JobRecord, OutputPage, Principal, VmView

Time = Annotated[str, Field(description="RFC 3339, UTC.")]


class Streams(Shown):
    """One number per stream."""

    stdout: int
    stderr: int


class StreamFlags(Shown):
    """One flag per stream."""

    stdout: bool
    stderr: bool


class Vmm(Shown):
    """What runs the VM."""

    kind: str | None = None
    accel: str | None = None
    version: str | None = None


class Vm(Shown):
    """A VM."""

    vm_id: str
    name: str | None = None
    state: Literal[
        "creating",
        "running",
        "paused",
        "hibernating",
        "hibernated",
        "resuming",
        "booting",
        "stopping",
        "stopped",
        "failed",
        "destroying",
    ]
    since: Time
    reason: str | None = None
    ephemeral: bool
    network: Literal["off", "on"]
    memory_mib: int
    vcpus: int
    disk_gib: int
    disk_used_mib: float
    idle_seconds: float
    idle_mode: Literal["hibernate", "pause"]
    last_activity_at: Time
    hibernates_at: Time | None = None
    image_digest: str
    vmm: Vmm
    description: str | None = None
    created_at: Time
    workspace: Annotated[str | None, Field(description="Operators only.")] = None
    pid: int | None = None
    boot_ms: float | None = None
    resume_ms: float | None = None
    transitions_total: int


class Job(Shown):
    """A job."""

    job_id: str
    state: Literal["starting", "running", "frozen", "completed", "lost"]
    command: Annotated[str, Field(description="Its first 200 characters.")]
    exit_code: Annotated[int | None, Field(description="128+n for a death by signal n.")] = None
    signal: int | None = None
    timed_out: bool
    cancelled: bool
    truncated: bool
    totals: Annotated[Streams, Field(description="Bytes written, kept or not.")]
    started_at: Time
    ended_at: Time | None = None
    run_seconds: float
    background_processes: int
    message: str | None = None


class VmWithJobs(Vm):
    """A VM and its remembered jobs."""

    jobs: list[Job]


class VmPage(Shown):
    """VMs."""

    vms: list[Vm]


class JobOutput(Shown):
    """A page of a job's output; exit_code is null while the job runs."""

    job_id: str
    encoding: Literal["utf-8", "base64"]
    stdout: str | None = None
    stderr: str | None = None
    stdout_base64: str | None = None
    stderr_base64: str | None = None
    next_cursor: Streams
    decoding_errors: Annotated[StreamFlags | None, Field(description="With utf-8 only.")] = None
    state: Literal["starting", "running", "frozen", "completed", "lost"]
    exit_code: Annotated[int | None, Field(json_schema_extra={"type": ["integer", "null"]})]
    truncated: bool
    timed_out: bool
    totals: Streams


class JobStarted(Job):
    """A job, and its first page of output when it has ended already."""

    output: JobOutput | None = None


class FileContent(Shown):
    """A part of a file."""

    content_base64: str | None = None
    content: str | None = None
    decoding_error: Annotated[bool | None, Field(description="With utf-8 only.")] = None
    offset: int
    next_offset: Annotated[int, Field(description="Where the next call goes on.")]
    size: int
    eof: bool
    mode: str
    modified_at: Time


class FileWritten(Shown):
    """What was written."""

    size: Annotated[int, Field(description="Bytes in the file now.")]
    sha256: Annotated[str, Field(description="Of the bytes of this call.")]


class Destroyed(Shown):
    """The VM is gone."""

    destroyed: Literal[True]


def time_text(seconds: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _present(members: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}


def show_vm(view: VmView, principal: Principal) -> dict[str, Any]:
    """A VM as `principal` may see it."""
    record = view.record
    return _present(
        {
            "vm_id": record.vm_id,
            "name": record.name,
            "state": record.state.value,
            "since": time_text(record.since),
            "reason": record.reason,
            "ephemeral": record.ephemeral,
            "network": "on" if record.spec.network else "off",
            "memory_mib": record.spec.memory_mib,
            "vcpus": record.spec.vcpus,
            "disk_gib": record.spec.disk_gib,
            "disk_used_mib": round(view.disk_used_mib, 3),
            "idle_seconds": record.idle_seconds,
            "idle_mode": record.idle_mode.value,
            "last_activity_at": time_text(record.last_activity_at),
            "hibernates_at": None if view.hibernates_at is None else time_text(view.hibernates_at),
            "image_digest": record.spec.image_digest,
            "vmm": _present({name: record.vmm.get(name) for name in ("kind", "accel", "version")}),
            "description": record.description,
            "created_at": time_text(record.created_at),
            "workspace": record.workspace_id if principal.operator else None,
            "pid": view.pid,
            "boot_ms": record.boot_ms,
            "resume_ms": record.resume_ms,
            "transitions_total": record.transitions_total,
        }
    )


def show_job(job: JobRecord) -> dict[str, Any]:
    """A job."""
    return _present(
        {
            "job_id": job.job_id,
            "state": job.state.value,
            "command": job.command[:200],
            "exit_code": job.exit_code,
            "signal": job.signal,
            "timed_out": job.timed_out,
            "cancelled": job.cancelled,
            "truncated": job.truncated,
            "totals": _streams(job.totals),
            "started_at": time_text(job.started_at),
            "ended_at": None if job.ended_at is None else time_text(job.ended_at),
            "run_seconds": round(job.run_seconds, 3),
            "background_processes": job.background_processes,
            "message": job.message,
        }
    )


def _streams(pair: tuple[Any, Any]) -> dict[str, Any]:
    return {"stdout": pair[0], "stderr": pair[1]}


def show_output(page: OutputPage, *, encoding: str, max_bytes: int) -> dict[str, Any]:
    """A page of output, at most `max_bytes` per stream (a single longer character is whole)."""
    job = page.job
    shown: dict[str, Any] = {"job_id": job.job_id, "encoding": encoding}
    if encoding == "base64":
        data = [part[:max_bytes] for part in page.data]
        shown |= {"stdout_base64": _encode(data[0]), "stderr_base64": _encode(data[1])}
        consumed = (len(data[0]), len(data[1]))
    else:
        pages = [
            text_page(data, max_bytes=max_bytes, more_may_come=not complete)
            for data, complete in zip(page.data, page.complete, strict=True)
        ]
        shown |= {"stdout": pages[0].text, "stderr": pages[1].text}
        shown["decoding_errors"] = _streams((pages[0].decoding_error, pages[1].decoding_error))
        consumed = (pages[0].consumed, pages[1].consumed)
    return shown | {
        "next_cursor": _streams((page.offset[0] + consumed[0], page.offset[1] + consumed[1])),
        "state": job.state.value,
        "exit_code": job.exit_code,
        "truncated": job.truncated,
        "timed_out": job.timed_out,
        "totals": _streams(job.totals),
    }


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def show_file(chunk: FileChunk, *, encoding: str, length: int) -> dict[str, Any]:
    """A part of a file, at most `length` bytes of it (a single longer character is whole)."""
    shown: dict[str, Any]
    if encoding == "base64":
        data = chunk.content[:length]
        shown, consumed = {"content_base64": _encode(data)}, len(data)
    else:
        page = text_page(chunk.content, max_bytes=length, more_may_come=not chunk.eof)
        shown, consumed = {"content": page.text, "decoding_error": page.decoding_error}, page.consumed
    return shown | {
        "offset": chunk.offset,
        "next_offset": chunk.offset + consumed,
        "size": chunk.size,
        "eof": chunk.eof and consumed == len(chunk.content),
        "mode": chunk.mode,
        "modified_at": time_text(chunk.modified_at),
    }
