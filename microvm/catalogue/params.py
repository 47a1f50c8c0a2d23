"""The parameters of the core tools, as models: types, bounds, defaults, and what each means.

A parameter whose feature does not exist is not here. It must not do anything but validate. Its neighbours:
`schema` turns these into JSON Schema, `handlers` reads them.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from microvm.catalogue.schema import Params
from microvm.catalogue.strict_json import shown_name
from microvm.model import PAGE_BYTES

COMMAND_BYTES: Final = 1 << 20  # the service's contract: 1 MiB of UTF-8 at most
ENV_VALUE_BYTES: Final = (
    32768  # an environment string has 128 KiB (Linux MAX_ARG_STRLEN); a quarter is plenty
)
ENV_BYTES: Final = 262144  # names and values together; the kernel grants 2 MiB with an 8 MiB stack
ENV_ENTRIES: Final = 256
PATH_BYTES: Final = 4095  # Linux PATH_MAX without its NUL
OFFSET_MAX: Final = (1 << 53) - 1  # what every JSON reader holds exactly
TIMEOUT_MAX_S: Final = 604800.0  # a week
WAIT_MAX_S: Final = 30.0  # the service's contract

REFUSED_ENV: Final = frozenset(
    {
        "BASH_ENV",
        "BASHOPTS",
        "BASH_LOADABLES_PATH",
        "ENV",
        "GCONV_PATH",
        "GLIBC_TUNABLES",
        "IFS",
        "PS4",
        "SHELLOPTS",
    }
)
"""Names that make a shell or the loader run or read something else than the command (ld.so(8), bash(1))."""

_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain NUL")
    return text


def _bounded(limit: int) -> AfterValidator:
    def check(text: str) -> str:
        if len(text) > limit or len(text.encode("utf-8")) > limit:
            raise ValueError(f"must be at most {limit} bytes of UTF-8")
        return _no_nul(text)

    return AfterValidator(check)


def _environment(env: dict[str, str]) -> dict[str, str]:
    """Refuse what is no name, what is dangerous, and what would not fit; values are never shown."""
    if len(env) > ENV_ENTRIES:
        raise ValueError(f"at most {ENV_ENTRIES} variables")
    total = 0
    for name, value in env.items():
        if _ENV_NAME.fullmatch(name) is None:
            raise ValueError(f"{shown_name(name)} is not the name of a variable ([A-Za-z_][A-Za-z0-9_]*)")
        if name in REFUSED_ENV or name.startswith("LD_"):
            raise ValueError(f"{name} may not be set: it changes what the shell or the loader runs")
        size = len(value.encode("utf-8"))
        if "\0" in value or size > ENV_VALUE_BYTES:
            raise ValueError(f"the value of {name} holds NUL or more than {ENV_VALUE_BYTES} bytes")
        total += len(name) + size + 2
    if total > ENV_BYTES:
        raise ValueError(f"names and values together hold more than {ENV_BYTES} bytes")
    return env


def _base64(text: str) -> str:
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("not base64 (RFC 4648 §4, with padding)") from None
    return text


_ID: Final = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"

VmIdText = Annotated[str, Field(pattern=_ID, description="The VM, as vm_create returned it.")]
JobIdText = Annotated[str, Field(pattern=_ID, description="The job, as vm_exec returned it.")]
RequestIdText = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9._:-]{1,128}$",
        description="Your own id for this request, new for each new effect. Repeat it, with the same "
        "arguments, to retry safely: the answer is the same and nothing happens twice.",
    ),
]
Env = Annotated[
    dict[str, str],
    AfterValidator(_environment),
    Field(
        description="Environment variables. Values are treated as secret: they are never logged or shown. "
        "Refused: LD_*, BASH_ENV, ENV, IFS, SHELLOPTS, BASHOPTS, PS4, BASH_LOADABLES_PATH, GCONV_PATH, "
        "GLIBC_TUNABLES."
    ),
]
Wait = Annotated[
    float,
    Field(ge=0, le=WAIT_MAX_S, description="Seconds to wait before answering; waiting is not activity."),
]
FilePath = Annotated[
    str,
    Field(min_length=1, description="Path of a regular file, relative to /workspace."),
    _bounded(PATH_BYTES),
]
Base64Text = Annotated[str, AfterValidator(_base64)]
Text = Annotated[str, AfterValidator(_no_nul)]


class VmCreate(Params):
    """Parameters of vm_create."""

    request_id: RequestIdText
    memory_mib: int = Field(1024, ge=128, le=16384, description="RAM in MiB.")
    vcpus: int = Field(1, ge=1, le=8, description="Virtual CPUs.")
    idle_seconds: Annotated[
        float,
        Field(
            ge=0, le=TIMEOUT_MAX_S, description="Idle seconds before the VM is suspended: 0 never, else ≥ 5."
        ),
    ] = 300.0
    idle_mode: Literal["hibernate", "pause"] = Field(
        "hibernate", description="How an idle VM is suspended; pause keeps its RAM in use."
    )
    env: Env | None = None
    description: (
        Annotated[
            str,
            Field(max_length=1000, description="A note for yourself, shown with the VM."),
            AfterValidator(_no_nul),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _idle(self) -> VmCreate:
        if 0 < self.idle_seconds < 5:
            raise ValueError("idle_seconds: 0 or at least 5")
        return self


class VmList(Params):
    """Parameters of vm_list."""

    all: bool = Field(default=False, description="Operators only: the VMs of every workspace.")


class VmOnly(Params):
    """Parameters of tools that take a VM and nothing else."""

    vm_id: VmIdText


class VmExec(Params):
    """Parameters of vm_exec."""

    vm_id: VmIdText
    request_id: RequestIdText
    command: Annotated[
        str, Field(min_length=1, description="Text for `bash -c`, at most 1 MiB."), _bounded(COMMAND_BYTES)
    ]
    cwd: (
        Annotated[
            str,
            Field(min_length=1, description="Working directory, relative to /workspace."),
            _bounded(PATH_BYTES),
        ]
        | None
    ) = None
    env: Env | None = None
    stdin: Annotated[str, Field(description="Standard input as text; otherwise it is empty.")] | None = None
    stdin_base64: (
        Annotated[Base64Text, Field(description="Standard input as exact bytes, instead of stdin.")] | None
    ) = None
    timeout_seconds: (
        Annotated[
            float,
            Field(
                gt=0,
                le=TIMEOUT_MAX_S,
                description="Run time after which the job is killed; no limit if absent.",
            ),
        ]
        | None
    ) = None
    output_limit_kib: int = Field(
        256,
        ge=1,
        le=16384,
        description="KiB of output kept across both streams; more is counted and dropped.",
    )
    wait_seconds: Wait = 0.0

    @model_validator(mode="after")
    def _one_stdin(self) -> VmExec:
        if self.stdin is not None and self.stdin_base64 is not None:
            raise ValueError("stdin: give it or stdin_base64, not both")
        return self


class VmJobStatus(Params):
    """Parameters of vm_job_status."""

    vm_id: VmIdText
    job_id: JobIdText
    wait_seconds: Wait = 0.0


Offset = Annotated[int, Field(ge=0, le=OFFSET_MAX)]


class Cursor(Params):
    """Byte offsets into the two streams of a job."""

    stdout: Offset = 0
    stderr: Offset = 0


class VmJobOutput(Params):
    """Parameters of vm_job_output."""

    vm_id: VmIdText
    job_id: JobIdText
    cursor: (
        Annotated[
            Cursor, Field(description="The whole next_cursor of the page before; absent for the first page.")
        ]
        | None
    ) = None
    encoding: Literal["utf-8", "base64"] = Field("utf-8", description="base64 gives the exact bytes.")
    max_bytes: int = Field(PAGE_BYTES, ge=1, le=PAGE_BYTES, description="Bytes per stream in this page.")
    wait_seconds: Annotated[
        float, Field(ge=0, le=WAIT_MAX_S, description="Seconds to wait for new output or the job's end.")
    ] = 0.0


class VmJobCancel(Params):
    """Parameters of vm_job_cancel."""

    vm_id: VmIdText
    job_id: JobIdText


class VmReadFile(Params):
    """Parameters of vm_read_file."""

    vm_id: VmIdText
    path: FilePath
    offset: Annotated[Offset, Field(description="Byte to begin at.")] = 0
    length: Annotated[
        int, Field(ge=0, json_schema_extra={"maximum": 131072}, description="Bytes to read, at most 131072.")
    ] = 131072
    encoding: Literal["base64", "utf-8"] = Field("base64", description="utf-8 gives content as text.")


class VmWriteFile(Params):
    """Parameters of vm_write_file."""

    vm_id: VmIdText
    path: FilePath
    content: (
        Annotated[str, Field(description="The bytes to write, as text (UTF-8); at most 131072 bytes.")] | None
    ) = None
    content_base64: (
        Annotated[Base64Text, Field(description="The exact bytes to write, instead of content.")] | None
    ) = None
    offset: (
        Annotated[
            Offset,
            Field(description="Write in place from this byte; the file's size appends. Absent: replace it."),
        ]
        | None
    ) = None
    truncate: (
        Annotated[
            bool, Field(description="Cut the file behind what is written; default: true without offset.")
        ]
        | None
    ) = None
    mode: str = Field("0644", pattern=r"^0?[0-7]{3}$", description="Permissions in octal, for a new file.")
    make_parents: bool = Field(default=True, description="Create missing directories.")

    @model_validator(mode="after")
    def _one_content(self) -> VmWriteFile:
        if (self.content is None) == (self.content_base64 is None):
            raise ValueError("content: give either it or content_base64")
        if self.offset is None and self.truncate is False:
            raise ValueError("truncate: false needs an offset; without one the file is replaced")
        return self


class VmSuspend(Params):
    """Parameters of vm_suspend."""

    vm_id: VmIdText
    mode: Literal["hibernate", "pause"] = Field(
        "hibernate", description="hibernate frees the RAM; pause keeps it and wakes sooner."
    )
    force: bool = Field(
        default=False, description="Freeze active jobs instead of refusing; they go on later."
    )


class VmResume(Params):
    """Parameters of vm_resume."""

    vm_id: VmIdText
    cold_boot: bool = Field(default=False, description="Boot from the disk; what was in memory is gone.")
    discard_memory: bool = Field(
        default=False, description="Needed besides cold_boot to give up a checkpoint that could be resumed."
    )


def canonical(params: Params, *without: str) -> dict[str, Any]:
    """The validated arguments with their defaults, less `without`: what a receipt compares."""
    return params.model_dump(mode="json", exclude={"request_id", *without}, exclude_none=True)
