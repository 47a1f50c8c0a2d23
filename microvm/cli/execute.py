"""`vm exec` and `vm output`: a job's bytes, copied as they come.

Promises each byte that was kept exactly once and in order per stream, and the guest's exit code. Between
stdout and stderr there is no order. It must not decide when a job has ended: the service's pages say so.
Neighbour: `console`, which makes bytes harmless on a terminal.
"""

from __future__ import annotations

import base64
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from microvm.cli.client import Client, UsageError
from microvm.cli.console import GuestOutput, print_json, print_line
from microvm.model import JobState

# The longest that one call may wait (rulings 19); the service answers earlier as soon as there are bytes.
WAIT_S: Final = 30
ENDED: Final = frozenset({JobState.COMPLETED.value, JobState.LOST.value})
INTERRUPTED: Final = 130  # 128 + SIGINT
LOST: Final = 1
START: Final[Mapping[str, int]] = {"stdout": 0, "stderr": 0}


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of `vm_exec`; None is left to the service."""

    vm_id: str
    request_id: str
    command: str
    cwd: str | None = None
    env: dict[str, str] | None = None
    stdin: bytes | None = None
    timeout_seconds: float | None = None
    output_limit_kib: int | None = None

    def arguments(self) -> dict[str, Any]:
        """The same as the tool takes it."""
        members = {name: value for name, value in asdict(self).items() if name != "stdin"}
        if self.stdin is not None:
            members["stdin_base64"] = base64.b64encode(self.stdin).decode()
        return members


def shell_command(words: list[str]) -> str:
    """One word is a script as it stands; several are a program and its arguments, quoted."""
    if words[:1] == ["--"]:  # `vm exec VM -- COMMAND`: the VM ended the options already
        words = words[1:]
    elif words[0].startswith("-"):
        raise UsageError(f"{words[0].split()[0]}: options come before the VM, and -- before such a command")
    return words[0] if len(words) == 1 else shlex.join(words)


def read_stdin() -> bytes:
    """Our standard input to its end."""
    if sys.stdin.isatty():
        raise UsageError("--stdin wants a file or a pipe as standard input, not a terminal")
    return sys.stdin.buffer.read()


def start(client: Client, request: Request) -> dict[str, Any]:
    """Starts the command and returns its job."""
    return client.call("vm_exec", request.arguments())


def run_streaming(client: Client, request: Request) -> int:
    """Runs the command with its output on ours; returns its exit code. Ctrl-C cancels it."""
    job_id: str | None = None
    try:
        job_id = _start(client, request)
        last = follow_output(client, request.vm_id, job_id, cursor=dict(START))
    except KeyboardInterrupt:
        _cancel(client, request, job_id)
        return INTERRUPTED
    _explain_end(last)
    return _exit_code(last)


def run_captured(client: Client, request: Request) -> int:
    """Runs the command, prints one JSON object with the job and all kept output; returns its exit code."""
    kept = {"stdout": bytearray(), "stderr": bytearray()}
    job_id: str | None = None
    try:
        job_id = _start(client, request)
        last: dict[str, Any] = {}
        for last in _pages(client, request.vm_id, job_id, dict(START), follow=True):
            for name, data in kept.items():
                data += base64.b64decode(last[f"{name}_base64"])
    except KeyboardInterrupt:
        _cancel(client, request, job_id)
        return INTERRUPTED
    job = client.call("vm_job_status", {"vm_id": request.vm_id, "job_id": job_id})
    print_json({**job, **{name: data.decode("utf-8", "replace") for name, data in kept.items()}})
    return _exit_code(last)


def follow_output(client: Client, vm_id: str, job_id: str, *, cursor: dict[str, int]) -> dict[str, Any]:
    """Copies a job's output to ours until it has ended, over a WebSocket as far as that goes, then by pages.

    Returns:
        The last page, or the job in its stead.
    """
    from microvm.cli.follow import follow_job  # half of the start-up time, where it is needed

    sinks = {"stdout": GuestOutput(sys.stdout), "stderr": GuestOutput(sys.stderr)}
    job = follow_job(client.endpoint, vm_id, job_id, cursor, lambda name, data: sinks[name].write(data))
    if job is None:
        return copy_output(client, vm_id, job_id, cursor=cursor, follow=True, sinks=sinks)
    for sink in sinks.values():
        sink.write(b"", final=True)
    return {**job, "exit_code": job.get("exit_code"), "next_cursor": cursor}


def copy_output(
    client: Client,
    vm_id: str,
    job_id: str,
    *,
    cursor: dict[str, int],
    follow: bool,
    sinks: Mapping[str, GuestOutput] | None = None,
) -> dict[str, Any]:
    """Copies a job's output to ours, page by page.

    Args:
        client: The service.
        vm_id: The VM.
        job_id: The job.
        cursor: Byte offsets to begin at, for stdout and stderr.
        follow: Go on until the job has ended, instead of until there is nothing more now.
        sinks: Where it goes, when something went there already.

    Returns:
        The last page.
    """
    sinks = sinks or {"stdout": GuestOutput(sys.stdout), "stderr": GuestOutput(sys.stderr)}
    page: dict[str, Any] = {}
    for page in _pages(client, vm_id, job_id, cursor, follow=follow):
        for name, sink in sinks.items():
            sink.write(base64.b64decode(page[f"{name}_base64"]))
    for sink in sinks.values():
        sink.write(b"", final=True)
    return page


def _pages(
    client: Client, vm_id: str, job_id: str, cursor: dict[str, int], *, follow: bool
) -> Iterator[dict[str, Any]]:
    """Pages of a job's output from `cursor` on; at least one, the last one with all that was kept."""
    while True:
        arguments = {
            "vm_id": vm_id,
            "job_id": job_id,
            "cursor": cursor,
            "encoding": "base64",
            "wait_seconds": WAIT_S if follow else None,
        }
        page = client.call("vm_job_output", arguments)
        yield page
        advanced = page["next_cursor"] != cursor
        cursor = page["next_cursor"]
        if page["state"] in ENDED:
            # What was dropped is in the totals too, so an equal total spares the last, empty page.
            if not advanced or cursor == page["totals"]:
                return
        elif not follow and not advanced:
            return


def _start(client: Client, request: Request) -> str:
    return start(client, request)["job_id"]


def _cancel(client: Client, request: Request, job_id: str | None) -> None:
    if job_id is None:  # interrupted before the answer was read: the receipt gives the same job again
        job_id = _start(client, request)
    client.call("vm_job_cancel", {"vm_id": request.vm_id, "job_id": job_id})
    print_line("microvm: cancelled", to=sys.stderr)


def _exit_code(page: dict[str, Any]) -> int:
    code = page["exit_code"]
    return code if isinstance(code, int) else LOST


def _explain_end(page: dict[str, Any]) -> None:
    if page["state"] == JobState.LOST.value:
        print_line("microvm: the job was lost: its VM was destroyed or failed while it ran", to=sys.stderr)
    if page["timed_out"]:
        print_line("microvm: the job was killed at its timeout", to=sys.stderr)
    if page["truncated"]:
        kept, written = sum(page["next_cursor"].values()), sum(page["totals"].values())
        print_line(f"microvm: kept {kept} of {written} bytes; --output-limit-kib keeps more", to=sys.stderr)
