"""The nouns: ids, states, and the records that layers hand to each other.

Values only. It must not import I/O, clocks or randomness (ids are made in `store`). Its neighbours: `policy`
decides over these values, `store` keeps them, `catalogue` shows them.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field, replace
from typing import Any, Final, NewType

WorkspaceId = NewType("WorkspaceId", str)
VmId = NewType("VmId", str)  # "vm_" + 20 characters of lower-case base32
JobId = NewType("JobId", str)  # "job_" + 20 characters of lower-case base32
Generation = NewType(
    "Generation", int
)  # checkpoint generation: RAM, state, disk and manifest belong together
AgentGeneration = NewType("AgentGeneration", int)  # one per boot, resume or clone, in the hello

NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
VM_ID_PATTERN: Final = re.compile(r"vm_[a-z2-7]{20}")
JOB_ID_PATTERN: Final = re.compile(r"job_[a-z2-7]{20}")

MAX_ACTIVE_JOBS: Final = 4
MAX_JOBS: Final = 256
PAGE_BYTES: Final = 16384
FILE_CALL_BYTES: Final = 131072


class VmState(enum.StrEnum):
    """Where a VM is in its life; the transitions are `policy.lifecycle`'s table."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSED = "paused"
    HIBERNATING = "hibernating"
    HIBERNATED = "hibernated"
    RESUMING = "resuming"
    BOOTING = "booting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    DESTROYING = "destroying"


LIVE_STATES: Final = frozenset(
    {
        VmState.CREATING,
        VmState.RUNNING,
        VmState.PAUSED,
        VmState.HIBERNATING,
        VmState.RESUMING,
        VmState.BOOTING,
        VmState.STOPPING,
    }
)
"""States that hold a VMM process, and so a slot and RAM."""


class SuspendMode(enum.StrEnum):
    """How a VM is put to rest."""

    HIBERNATE = "hibernate"
    PAUSE = "pause"


class JobState(enum.StrEnum):
    """Where a job is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    FROZEN = "frozen"
    COMPLETED = "completed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Quota:
    """What a workspace or the host may hold; None means no bound of its own."""

    max_vms: int | None = None
    max_memory_mib: int | None = None
    max_storage_gib: int | None = None


@dataclass(frozen=True, slots=True)
class Workspace:
    """A tenant."""

    workspace_id: WorkspaceId
    allow_network: bool = False
    operator: bool = False
    quota: Quota = field(default_factory=Quota)
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is calling: the outcome of authentication.

    Attributes:
        workspace_id: The tenant that every id in the call is looked up in.
        operator: Whether operator tools may be called.
        profile: A tool profile fixed in the token; None where the caller chooses.
        allow_network: Whether the workspace may have VMs with a network.
        token_id: The token's row, for the audit log; None for a peer of the admin socket.
    """

    workspace_id: WorkspaceId
    operator: bool = False
    profile: str | None = None
    allow_network: bool = False
    token_id: str | None = None


@dataclass(frozen=True, slots=True)
class VmSpec:
    """What a VM is made as; it never changes over the VM's life."""

    memory_mib: int = 1024
    vcpus: int = 1
    network: bool = False
    disk_gib: int = 3
    image_digest: str = ""


@dataclass(frozen=True, slots=True)
class VmRecord:
    """A VM as the store keeps it; one driver task is the only writer.

    Times are seconds since the epoch, UTC.

    Attributes:
        checkpoint_generation: The newest checkpoint that was committed; 0 before the first.
        spent_generation: The newest generation that the guest has run on from. A checkpoint may be loaded
            only while `checkpoint_generation > spent_generation`.
        agent_generation: The newest generation handed to the guest in a hello.
        reason: Why the VM is in its state, where that is not obvious ("no_space", a failure's cause).
    """

    vm_id: VmId
    workspace_id: WorkspaceId
    state: VmState
    since: float
    created_at: float
    spec: VmSpec
    name: str | None = None
    description: str | None = None
    ephemeral: bool = True
    idle_seconds: float = 300.0
    idle_mode: SuspendMode = SuspendMode.HIBERNATE
    reason: str | None = None
    last_activity_at: float = 0.0
    checkpoint_generation: Generation = Generation(0)
    spent_generation: Generation = Generation(0)
    agent_generation: AgentGeneration = AgentGeneration(0)
    slot: int | None = None
    vmm: dict[str, str] = field(default_factory=dict[str, str])  # kind, accel, version, closure
    env: dict[str, str] = field(default_factory=dict[str, str])  # reaches every command; values are secret
    boot_ms: float | None = None
    resume_ms: float | None = None
    transitions_total: int = 0

    def with_(self, **changes: Any) -> VmRecord:
        """A copy with `changes`; the record itself is a value."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as the store keeps it.

    Attributes:
        command: The first 200 characters of the command.
        totals: Bytes the command wrote to (stdout, stderr), kept or not.
        kept: Bytes retained of (stdout, stderr).
        output_cached: Whether the host holds all retained output, so that reading wakes nothing.
    """

    job_id: JobId
    vm_id: VmId
    state: JobState
    command: str
    started_at: float
    ended_at: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    cancelled: bool = False
    truncated: bool = False
    totals: tuple[int, int] = (0, 0)
    kept: tuple[int, int] = (0, 0)
    run_seconds: float = 0.0
    background_processes: int = 0
    message: str | None = None
    output_cached: bool = False

    def with_(self, **changes: Any) -> JobRecord:
        """A copy with `changes`; the record itself is a value."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class VmView:
    """A VM as callers see it: the record, and what only the host knows at the moment of asking."""

    record: VmRecord
    disk_used_mib: float
    hibernates_at: float | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class ExecSpec:
    """A command to run in a guest.

    Attributes:
        command: Text for `bash -c`, at most 1 MiB of UTF-8 without NUL.
        cwd: Below /workspace; None for /workspace itself.
        env: Added to the VM's own environment; names are shell identifiers, values are secret.
        stdin: Bytes for standard input; None for an empty one.
        timeout_seconds: Run time after which the job is killed; None for no limit.
        output_limit_kib: Bytes kept across both streams, in KiB (1-16384).
    """

    command: str
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict[str, str])
    stdin: bytes | None = None
    timeout_seconds: float | None = None
    output_limit_kib: int = 256


@dataclass(frozen=True, slots=True)
class OutputPage:
    """One page of a job's output, exact bytes; `catalogue` encodes it.

    Attributes:
        job: The job as it is now.
        offset: Where the page begins, per stream (stdout, stderr).
        data: The retained bytes at `offset`, at most `max_bytes` each.
        complete: Per stream: True when `data` reaches the end of what was kept and no more will come.
    """

    job: JobRecord
    offset: tuple[int, int]
    data: tuple[bytes, bytes]
    complete: tuple[bool, bool]


@dataclass(frozen=True, slots=True)
class FileChunk:
    """A part of a file in the guest."""

    content: bytes
    offset: int
    size: int
    eof: bool
    mode: str
    modified_at: float


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file in the guest, before it is read.

    Attributes:
        mode: Octal digits.
        modified_at: Seconds since the epoch by the guest's clock.
        tag: Names this very content: a change of the file, or another in its place, has another tag.
    """

    size: int
    mode: str
    modified_at: float
    tag: str


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """Bytes of a job's output as they came.

    Attributes:
        stream: 1 for stdout, 2 for stderr.
        offset: Where `data` begins in that stream.
    """

    stream: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Change:
    """A VM or a job as it was after a change.

    Attributes:
        change_id: Increases from each change to the next.
    """

    change_id: int
    workspace_id: WorkspaceId
    content: VmView | JobRecord


class ReceiptState(enum.StrEnum):
    """How far the work behind a request id is known to have come."""

    PENDING = "pending"
    DONE = "done"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Receipt:
    """What is remembered of a request id, so that a retry has no second effect.

    Attributes:
        args_hash: Digest of the tool's canonical arguments without those that are not part of a receipt
            (`wait_seconds`).
        completed_at: When the answer, or the loss of it, was recorded; None while pending.
        answer: The recorded answer, JSON-safe and opaque here; None unless `state` is done.
        vm_id: What the work made or ran in, as far as it was known; for reconciliation, and kept after the
            VM.
    """

    workspace_id: WorkspaceId
    request_id: str
    tool: str
    args_hash: str
    state: ReceiptState
    created_at: float
    completed_at: float | None = None
    answer: dict[str, Any] | None = None
    vm_id: VmId | None = None
    job_id: JobId | None = None

    def with_(self, **changes: Any) -> Receipt:
        """A copy with `changes`; the record itself is a value."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Intent:
    """A mutation that was journaled before it acted; open while `done_at` is None.

    Attributes:
        op: The effect's name ("create", "hibernate", ...).
        args: JSON-safe facts that recovery needs, such as the checkpoint generation being written.
        steps: (name, time) of what was reached on the way, for the reader of a failure.
    """

    intent_id: int
    vm_id: VmId
    op: str
    args: dict[str, Any]
    intent_at: float
    steps: tuple[tuple[str, float], ...] = ()
    done_at: float | None = None
    outcome: str | None = None
