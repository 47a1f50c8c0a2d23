"""`microvm vm …`: a command for every core tool.

Promises that each command is the tool of its name with the same parameters, and prints the tool's own
result with `--json`. It must not add behaviour that a client of the HTTP API could not have. Neighbours:
`execute`, `files` and `copies` hold those that take more than one call.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from microvm.cli import copies, execute, files, options
from microvm.cli.client import Client, find_endpoint
from microvm.cli.console import print_facts, print_json, print_table

app = typer.Typer(help="Create and use VMs.", no_args_is_help=True)


@app.callback()
def _connect(
    context: typer.Context,
    *,
    url: Annotated[str | None, typer.Option(help="The service's URL [MICROVM_URL].")] = None,
    socket: Annotated[Path | None, typer.Option(help="The service's Unix socket [MICROVM_SOCKET].")] = None,
    token_file: Annotated[Path | None, typer.Option(help="The token's file [MICROVM_TOKEN_FILE].")] = None,
    config: options.Config = None,
) -> None:
    context.obj = {"url": url, "socket": socket, "token_file": token_file, "config": config}


def connect(context: typer.Context) -> Client:
    """A client of the service that the options, the environment or the configuration name."""
    return Client(find_endpoint(**context.obj))


def new_request_id() -> str:
    """A request id of the command line's own."""
    return "cli-" + secrets.token_hex(12)


def _show(result: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(result)
    else:
        print_facts(result)


def _call(context: typer.Context, tool: str, arguments: Mapping[str, Any], *, as_json: bool) -> None:
    with connect(context) as client:
        _show(client.call(tool, arguments), as_json=as_json)


@app.command("create")
def create(
    context: typer.Context,
    *,
    memory_mib: Annotated[int | None, typer.Option(help="RAM in MiB, 128 to 16384.")] = None,
    vcpus: Annotated[int | None, typer.Option(help="Virtual CPUs, 1 to 8.")] = None,
    idle_seconds: Annotated[
        float | None, typer.Option(help="Suspend after this long idle; 0 for never.")
    ] = None,
    idle_mode: Annotated[str | None, typer.Option(help="hibernate or pause.")] = None,
    env: options.Env = None,
    description: Annotated[str | None, typer.Option(help="What it is for.")] = None,
    request_id: options.RequestId = None,
    json: options.Json = False,
) -> None:
    """Make a VM and start it."""
    arguments = {
        "request_id": request_id or new_request_id(),
        "memory_mib": memory_mib,
        "vcpus": vcpus,
        "idle_seconds": idle_seconds,
        "idle_mode": idle_mode,
        "env": options.parse_env(env),
        "description": description,
    }
    _call(context, "vm_create", arguments, as_json=json)


@app.command("list")
def list_(
    context: typer.Context,
    *,
    all_: Annotated[bool, typer.Option("--all", help="Every workspace's VMs (operators).")] = False,
    json: options.Json = False,
) -> None:
    """List the workspace's VMs."""
    with connect(context) as client:
        result = client.call("vm_list", {"all": all_ or None})
    if json:
        print_json(result)
        return
    columns = ["vm_id", "state", "memory_mib", "vcpus", "disk_used_mib", "last_activity_at", "description"]
    if all_:
        columns.insert(1, "workspace")
    print_table(columns, ([vm.get(column) for column in columns] for vm in result["vms"]))


@app.command("status")
def status(context: typer.Context, vm_id: options.VmId, *, json: options.Json = False) -> None:
    """Show a VM and its jobs; wakes nothing."""
    with connect(context) as client:
        result = client.call("vm_status", {"vm_id": vm_id})
    if json:
        print_json(result)
        return
    print_facts({name: value for name, value in result.items() if name != "jobs"})
    if result["jobs"]:
        _print_jobs(result["jobs"])


def _print_jobs(jobs: list[dict[str, Any]]) -> None:
    columns = ["job_id", "state", "exit_code", "started_at", "run_seconds", "command"]
    print_table(columns, ([job.get(column) for column in columns] for job in jobs))


@app.command("jobs")
def jobs(context: typer.Context, vm_id: options.VmId, *, json: options.Json = False) -> None:
    """List a VM's remembered jobs."""
    with connect(context) as client:
        result = client.call("vm_status", {"vm_id": vm_id})["jobs"]
    if json:
        print_json(result)
    else:
        _print_jobs(result)


@app.command("exec", context_settings={"allow_interspersed_args": False})
def exec_(
    context: typer.Context,
    vm_id: options.VmId,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="One argument is a shell script.")],
    *,
    cwd: Annotated[str | None, typer.Option(help="Directory below /workspace.")] = None,
    env: options.Env = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Send our standard input, whole.")] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds of run time after which it is killed.")
    ] = None,
    output_limit_kib: Annotated[int | None, typer.Option(help="Output kept, in KiB, 1 to 16384.")] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Print the job and return at once.")] = False,
    request_id: options.RequestId = None,
    json: options.Json = False,
) -> None:
    """Run a command, show its output as it comes, and exit as it does; Ctrl-C cancels it."""
    request = execute.Request(
        vm_id=vm_id,
        request_id=request_id or new_request_id(),
        command=execute.shell_command(command),
        cwd=cwd,
        env=options.parse_env(env),
        stdin=execute.read_stdin() if stdin else None,
        timeout_seconds=timeout,
        output_limit_kib=output_limit_kib,
    )
    with connect(context) as client:
        if detach:
            _show(execute.start(client, request), as_json=json)
            return
        code = execute.run_captured(client, request) if json else execute.run_streaming(client, request)
    raise typer.Exit(code)


@app.command("job-status")
def job_status(
    context: typer.Context,
    vm_id: options.VmId,
    job_id: options.JobId,
    *,
    wait_seconds: Annotated[
        float | None, typer.Option("--wait", help="Wait for its end, up to 30 s.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Show a job."""
    arguments = {"vm_id": vm_id, "job_id": job_id, "wait_seconds": wait_seconds}
    _call(context, "vm_job_status", arguments, as_json=json)


@app.command("output")
def output(
    context: typer.Context,
    vm_id: options.VmId,
    job_id: options.JobId,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    stdout_cursor: Annotated[int, typer.Option(help="Byte offset to begin at.")] = 0,
    stderr_cursor: Annotated[int, typer.Option(help="Byte offset to begin at.")] = 0,
    encoding: Annotated[str | None, typer.Option(help="With --json: utf-8 or base64.")] = None,
    max_bytes: Annotated[
        int | None, typer.Option(help="With --json: page size per stream, 1 to 16384.")
    ] = None,
    wait_seconds: Annotated[
        float | None, typer.Option("--wait", help="With --json: wait for new bytes.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Print a job's output; with --json, one page of it."""
    cursor = {"stdout": stdout_cursor, "stderr": stderr_cursor}
    with connect(context) as client:
        if not json and follow:
            execute.follow_output(client, vm_id, job_id, cursor=cursor)
            return
        if not json:
            execute.copy_output(client, vm_id, job_id, cursor=cursor, follow=False)
            return
        arguments = {
            "vm_id": vm_id,
            "job_id": job_id,
            "cursor": cursor,
            "encoding": encoding,
            "max_bytes": max_bytes,
            "wait_seconds": wait_seconds,
        }
        print_json(client.call("vm_job_output", arguments))


@app.command("cancel")
def cancel(
    context: typer.Context, vm_id: options.VmId, job_id: options.JobId, *, json: options.Json = False
) -> None:
    """Kill a job and everything it started."""
    _call(context, "vm_job_cancel", {"vm_id": vm_id, "job_id": job_id}, as_json=json)


@app.command("read")
def read(
    context: typer.Context,
    vm_id: options.VmId,
    path: Annotated[str, typer.Argument(help="Below /workspace.")],
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write here instead of stdout.")
    ] = None,
    offset: Annotated[int, typer.Option(help="Byte to begin at.")] = 0,
    length: Annotated[int | None, typer.Option(help="Bytes to read; to the end by default.")] = None,
    json: options.Json = False,
) -> None:
    """Print a guest's file, byte for byte."""
    with connect(context) as client:
        files.read(client, vm_id, path, to=output, offset=offset, length=length, as_json=json)


@app.command("write")
def write(
    context: typer.Context,
    vm_id: options.VmId,
    path: Annotated[str, typer.Argument(help="Below /workspace.")],
    source: Annotated[Path, typer.Argument(help="A file here; - for standard input.")] = Path("-"),
    *,
    offset: Annotated[int | None, typer.Option(help="Write in place from this byte.")] = None,
    truncate: Annotated[
        bool | None, typer.Option(help="Whether the file ends after what was written.")
    ] = None,
    mode: Annotated[str | None, typer.Option(help="Octal permissions, such as 0644.")] = None,
    make_parents: Annotated[bool | None, typer.Option(help="Whether missing directories are made.")] = None,
    json: options.Json = False,
) -> None:
    """Write a guest's file from a file here or from standard input."""
    target = files.Target(vm_id, path, mode=mode, make_parents=make_parents, truncate=truncate)
    with connect(context) as client:
        _show(files.write(client, target, source=source, offset=offset), as_json=json)


@app.command("push")
def push(
    context: typer.Context,
    vm_id: options.VmId,
    source: Annotated[Path, typer.Argument(help="A file here; with -r a directory.")],
    path: Annotated[str, typer.Argument(help="Below /workspace.")],
    *,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="What a directory holds, into one.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Copy a file or a directory into a guest; it takes effect when all of it has arrived."""
    with connect(context) as client:
        _show(copies.push(client, vm_id, source, path, recursive=recursive), as_json=json)


@app.command("pull")
def pull(
    context: typer.Context,
    vm_id: options.VmId,
    path: Annotated[str, typer.Argument(help="Below /workspace.")],
    target: Annotated[Path, typer.Argument(help="A name here; with -r a new one.")],
    *,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="A whole directory.")] = False,
    json: options.Json = False,
) -> None:
    """Copy a guest's file or directory here; a cut download goes on where it ended."""
    with connect(context) as client:
        _show(copies.pull(client, vm_id, path, target, recursive=recursive), as_json=json)


@app.command("suspend")
def suspend(
    context: typer.Context,
    vm_id: options.VmId,
    *,
    mode: Annotated[str | None, typer.Option(help="hibernate or pause.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Also with active jobs: they are frozen.")] = False,
    json: options.Json = False,
) -> None:
    """Put a VM to rest; work wakes it."""
    _call(context, "vm_suspend", {"vm_id": vm_id, "mode": mode, "force": force or None}, as_json=json)


@app.command("resume")
def resume(
    context: typer.Context,
    vm_id: options.VmId,
    *,
    cold_boot: Annotated[
        bool, typer.Option("--cold-boot", help="Boot a stopped or failed VM from its disk.")
    ] = False,
    discard_memory: Annotated[
        bool, typer.Option("--discard-memory", help="With --cold-boot: drop its RAM.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Wake a VM."""
    arguments = {"vm_id": vm_id, "cold_boot": cold_boot or None, "discard_memory": discard_memory or None}
    _call(context, "vm_resume", arguments, as_json=json)


@app.command("destroy")
def destroy(context: typer.Context, vm_id: options.VmId, *, json: options.Json = False) -> None:
    """Delete a VM with its disk, memory and jobs."""
    _call(context, "vm_destroy", {"vm_id": vm_id}, as_json=json)
