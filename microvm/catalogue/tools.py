"""The catalogue: one declaration per tool, from which every door, document and command line is made.

A `Tool` binds a name to its models, its handler and what may be said about it. It must not know HTTP or MCP.
Its neighbours: `handlers` below, `web` and `cli` above.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias

from microvm.catalogue import handlers, results
from microvm.catalogue import params as p
from microvm.catalogue.api import Call
from microvm.catalogue.schema import Params, Shown, json_schema, nearest, parse
from microvm.errors import RequestError
from microvm.model import Principal

Scope: TypeAlias = Literal["workspace", "operator"]
PROFILES: Final = ("core", "full")
DEFAULT_PROFILE: Final = "full"
_CORE: Final = frozenset(PROFILES)


@dataclass(frozen=True, slots=True)
class Annotations:
    """Hints to clients, in MCP's words; they promise nothing."""

    read_only: bool = False
    destructive: bool = False
    idempotent: bool = False
    open_world: bool = False


@dataclass(frozen=True)
class Tool:
    """A tool.

    Attributes:
        name: snake_case, at most 30 characters.
        title: A few words for people.
        description: What a model needs to act, most important first; at most 2 KiB.
        params: The model of its arguments.
        result: The model of its answer.
        handler: `async (call, params) -> result`, given an instance of `params`.
        annotations: Hints.
        scope: Who may call it.
        profiles: The tool profiles that list it.
        progress: Whether the call may take long and reports how far it is.
    """

    name: str
    title: str
    description: str
    params: type[Params]
    result: type[Shown]
    handler: Callable[[Call, Any], Awaitable[dict[str, Any]]]
    annotations: Annotations = Annotations()
    scope: Scope = "workspace"
    profiles: frozenset[str] = _CORE
    progress: bool = False

    @cached_property
    def input_schema(self) -> dict[str, Any]:
        """JSON Schema of the arguments."""
        return json_schema(self.params)

    @cached_property
    def output_schema(self) -> dict[str, Any]:
        """JSON Schema of the answer."""
        return json_schema(self.result)

    @property
    def takes_request_id(self) -> bool:
        """Whether a receipt makes its calls safe to repeat."""
        return "request_id" in self.params.model_fields

    def allowed(self, principal: Principal) -> bool:
        """Whether `principal` may call it at all."""
        return self.scope == "workspace" or principal.operator

    async def run(self, call: Call, arguments: object) -> dict[str, Any]:
        """Validate, and do it.

        Raises:
            MicrovmError: As the service's contract lists.

        Cancellation: Ends the waiting; a mutation that the fleet took on goes on.
        """
        if not self.allowed(call.principal):
            raise RequestError("forbidden", f"{self.name} is for operators")
        return await self.handler(call, parse(self.params, arguments))


_TOOLS: Final = (
    Tool(
        "vm_create",
        "Create a VM",
        "Create a Linux VM of your own (Debian 13 with Python, Node.js, Git, GCC) and return it running. "
        "It lives until vm_destroy and hibernates by itself when idle; any tool that needs it wakes it. "
        "Work in it with vm_exec, vm_read_file and vm_write_file; files are below /workspace. It has no "
        "network.",
        p.VmCreate,
        results.Vm,
        handlers.vm_create,
        Annotations(idempotent=True),
        progress=True,
    ),
    Tool(
        "vm_list",
        "List VMs",
        "List your workspace's VMs with their states. Wakes nothing.",
        p.VmList,
        results.VmPage,
        handlers.vm_list,
        Annotations(read_only=True, idempotent=True),
    ),
    Tool(
        "vm_status",
        "Show a VM",
        "Show one VM and its remembered jobs. Wakes nothing and does not count as activity.",
        p.VmOnly,
        results.VmWithJobs,
        handlers.vm_status,
        Annotations(read_only=True, idempotent=True),
    ),
    Tool(
        "vm_exec",
        "Run a command",
        "Run a command by `bash -c` in the VM, as an unprivileged user in /workspace; a suspended VM "
        "wakes first. Returns a job at once, or with wait_seconds up to 30 s later; when it ended by "
        "then, `output` holds the first page of stdout and stderr. Otherwise follow with vm_job_output, "
        "or vm_job_status. At most 4 commands run at once. A non-zero exit_code is a result, not an "
        "error.",
        p.VmExec,
        results.JobStarted,
        handlers.vm_exec,
        Annotations(destructive=True, idempotent=True, open_world=True),
        progress=True,
    ),
    Tool(
        "vm_job_status",
        "Show a job",
        "Show a job's state and exit code; with wait_seconds, wait for its end. Wakes nothing.",
        p.VmJobStatus,
        results.Job,
        handlers.vm_job_status,
        Annotations(read_only=True, idempotent=True),
        progress=True,
    ),
    Tool(
        "vm_job_output",
        "Read a job's output",
        "Read stdout and stderr of a job, while it runs or after. Pass the whole next_cursor as cursor to "
        "go on. Once state is completed, go on until next_cursor no longer changes; an empty page of a "
        "running job is not the end. Reading takes nothing away. Use encoding=base64 for exact bytes.",
        p.VmJobOutput,
        results.JobOutput,
        handlers.vm_job_output,
        Annotations(read_only=True, idempotent=True),
        progress=True,
    ),
    Tool(
        "vm_job_cancel",
        "Cancel a job",
        "Kill a job with all of its processes, also what a finished job left running. A suspended VM "
        "wakes first.",
        p.VmJobCancel,
        results.Job,
        handlers.vm_job_cancel,
        Annotations(destructive=True, idempotent=True),
        progress=True,
    ),
    Tool(
        "vm_read_file",
        "Read a file",
        "Read up to 131072 bytes of a regular file below /workspace; a suspended VM wakes first. Go on "
        "from next_offset until eof. encoding=utf-8 gives text in `content`, base64 exact bytes in "
        "`content_base64`.",
        p.VmReadFile,
        results.FileContent,
        handlers.vm_read_file,
        Annotations(read_only=True, idempotent=True),
        progress=True,
    ),
    Tool(
        "vm_write_file",
        "Write a file",
        "Write up to 131072 bytes to a file below /workspace; a suspended VM wakes first. Without offset "
        "the file is replaced in one step; with offset it is written in place (offset = its size "
        "appends).",
        p.VmWriteFile,
        results.FileWritten,
        handlers.vm_write_file,
        Annotations(destructive=True, idempotent=True),
        progress=True,
    ),
    Tool(
        "vm_suspend",
        "Suspend a VM",
        "Put a VM to rest with its memory: hibernate (RAM to disk) or pause. Refused while commands run, "
        "unless force=true freezes them. It wakes by itself when a tool needs it, or by vm_resume.",
        p.VmSuspend,
        results.Vm,
        handlers.vm_suspend,
        Annotations(idempotent=True),
        progress=True,
    ),
    Tool(
        "vm_resume",
        "Resume a VM",
        "Wake a suspended VM, processes and all; a stopped one boots from its disk. With cold_boot=true a "
        "failed VM, or one whose checkpoint no longer fits, boots from its disk too, and loses what was "
        "in memory.",
        p.VmResume,
        results.Vm,
        handlers.vm_resume,
        Annotations(destructive=True, idempotent=True),
        progress=True,
    ),
    Tool(
        "vm_destroy",
        "Destroy a VM",
        "Remove a VM with its disk, memory and jobs, for good. Running commands end.",
        p.VmOnly,
        results.Destroyed,
        handlers.vm_destroy,
        Annotations(destructive=True, idempotent=True),
        progress=True,
    ),
)

Catalogue: TypeAlias = Mapping[str, Tool]
CATALOGUE: Final[Catalogue] = {tool.name: tool for tool in _TOOLS}


def find(catalogue: Catalogue, name: str) -> Tool:
    """The tool called `name`.

    Raises:
        RequestError: `not_found`, with the nearest name.
    """
    tool = catalogue.get(name)
    if tool is not None:
        return tool
    close = nearest(name, catalogue)
    advice = f"did you mean {close}?" if close else "GET /v1/tools lists them"
    raise RequestError("not_found", f"there is no such tool; {advice}", {"nearest": close} if close else None)


def listed(catalogue: Catalogue, principal: Principal, profile: str | None = None) -> list[Tool]:
    """The tools that `principal` may call and `profile` lists, in the catalogue's order.

    Args:
        catalogue: Where to look.
        principal: Who asks; a profile fixed in the token beats `profile`.
        profile: What the caller chose; None for the default.

    Raises:
        RequestError: `invalid_argument` for a profile that does not exist.
    """
    chosen = principal.profile or profile or DEFAULT_PROFILE
    if chosen not in PROFILES:
        raise RequestError("invalid_argument", f"profile: one of {', '.join(PROFILES)}", {"path": "profile"})
    return [tool for tool in catalogue.values() if chosen in tool.profiles and tool.allowed(principal)]
