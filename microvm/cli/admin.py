"""Commands of the service's host: start it, administer tokens, examine the host, build the image.

Promises that token commands work with the service up or down and hold from the next request on; a secret
goes to its file and nowhere else. It must not keep state of its own. Neighbours: `daemon` and `store`,
which do the work.
"""

from __future__ import annotations

import errno
import socket
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from microvm.cli import options
from microvm.cli.client import Client, Endpoint, UsageError, find_endpoint
from microvm.cli.console import print_facts, print_json, print_line, print_table
from microvm.errors import CapacityError, HostError, RequestError
from microvm.model import NAME_PATTERN, Quota, Workspace

if TYPE_CHECKING:
    from microvm.daemon.settings import Settings

DEFAULT_RECIPE: Final = Path(__file__).resolve().parents[2] / "image" / "recipe.toml"

BOUNDS: Final = ("max_vms", "max_memory_mib", "max_storage_gib")

workspaces_app = typer.Typer(help="See workspaces and change their bounds.", no_args_is_help=True)
image_app = typer.Typer(help="Build what VMs boot from.", no_args_is_help=True)

StateDir = Annotated[
    Path | None, typer.Option("--state-dir", metavar="DIR", help="Instead of the configuration's.")
]


def register(app: typer.Typer) -> None:
    """Adds the commands to the program's top level."""
    app.command("serve")(serve)
    app.command("issue-token")(issue_token)
    app.command("revoke-token")(revoke_token)
    app.command("revoke-workspace")(revoke_workspace)
    app.add_typer(workspaces_app, name="workspaces")
    app.command("doctor")(doctor)
    app.command("openapi")(openapi)


def serve(*, config: options.Config = None) -> None:
    """Run the service in the foreground until SIGTERM or Ctrl-C."""
    import trio

    settings = _load(config)
    for warning in settings.warnings:
        print_line(f"microvm: warning: {warning}", to=sys.stderr)
    from microvm.daemon.service import run_service

    trio.run(partial(run_service, settings))


def issue_token(
    *,
    workspace: Annotated[str, typer.Option(help="Who it is for: 1 to 64 of A-Z a-z 0-9 _ -.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where the secret goes; must not exist.")],
    ttl: Annotated[str, typer.Option(help="How long it lasts: 90, 45m, 12h, 30d.")] = "30d",
    allow_network: Annotated[bool, typer.Option("--allow-network", help="Allow a network.")] = False,
    operator: Annotated[bool, typer.Option("--operator", help="Operator tools too.")] = False,
    profile: Annotated[str | None, typer.Option(help="Fix the tool profile: core or full.")] = None,
    max_vms: Annotated[int | None, typer.Option(min=1, help="For a new workspace.")] = None,
    max_memory_mib: Annotated[int | None, typer.Option(min=128, help="For a new workspace.")] = None,
    max_storage_gib: Annotated[int | None, typer.Option(min=1, help="For a new workspace.")] = None,
    state_dir: StateDir = None,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Write a new token for a workspace to a file only its owner can read."""
    if not NAME_PATTERN.fullmatch(workspace):
        raise UsageError("--workspace wants 1 to 64 of A-Z a-z 0-9 _ -, the first a letter or digit")
    from microvm.catalogue import PROFILES

    if profile is not None and profile not in PROFILES:
        raise UsageError(f"--profile is one of {', '.join(PROFILES)}")
    ttl_s = options.parse_duration(ttl, option="--ttl")
    settings = _settings(config, state_dir)
    from microvm.store import open_registry

    with open_registry(settings.state_dir) as registry:
        given = Quota(max_vms, max_memory_mib, max_storage_gib)
        issued = registry.issue_token_file(
            output,
            workspace,
            ttl_s=ttl_s,
            allow_network=allow_network,
            operator=operator,
            profile=profile,
            quota=given if registry.workspace(workspace) else _with_defaults(given, settings.workspace.quota),
        )
    expires_at = datetime.fromtimestamp(issued.expires_at, UTC).isoformat(timespec="seconds")
    if json:
        facts = {"workspace": workspace, "token_id": issued.token_id, "token_file": str(output)}
        print_json({**facts, "expires_at": expires_at})
    else:
        print_line(f"token {issued.token_id} for {workspace} in {output}, valid until {expires_at}")


def revoke_token(
    token_id: Annotated[str, typer.Argument(metavar="TOKEN_ID", help="As issue-token printed it.")],
    *,
    state_dir: StateDir = None,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """End one token; its workspace, VMs and jobs stay."""
    from microvm.store import open_registry

    with open_registry(_settings(config, state_dir).state_dir) as registry:
        token = registry.revoke_token(token_id)
    if json:
        print_json({"token_id": token_id, "workspace": token.workspace_id, "revoked": True})
    else:
        print_line(f"{token_id} of {token.workspace_id} is revoked")


def revoke_workspace(
    workspace: Annotated[str | None, typer.Argument(metavar="WORKSPACE", help="Its name.")] = None,
    *,
    workspace_option: Annotated[str | None, typer.Option("--workspace", help="The same.")] = None,
    stop: Annotated[bool, typer.Option("--stop", help="Also kill its running VMs at once.")] = False,
    destroy: Annotated[bool, typer.Option("--destroy", help="Also delete its VMs.")] = False,
    state_dir: StateDir = None,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """End every access of a workspace, for good; its VMs and jobs stay, unless told otherwise."""
    name = workspace or workspace_option
    if name is None or (workspace and workspace_option and workspace != workspace_option):
        raise UsageError("name one workspace")
    settings = _settings(config, state_dir)
    from microvm.store import open_registry

    with open_registry(settings.state_dir) as registry:
        registry.revoke_workspace(name)
    ended = end_vms(settings, name, destroy=destroy) if stop or destroy else {}
    if json:
        print_json({"workspace": name, "revoked": True, **ended})
    else:
        print_line(f"{name} is revoked: none of its tokens works, and it gets no new ones")
        for what, vm_ids in ended.items():
            print_line(f"{what.replace('_', ' ')}: {', '.join(vm_ids) or 'none'}")


def end_vms(settings: Settings, workspace: str, *, destroy: bool) -> dict[str, list[str]]:
    """Ends the VMs of a revoked workspace, now if the service runs, else at its next start.

    Returns:
        What was done, and to which VMs.

    Raises:
        MicrovmError: The service is starting or ending, or could not do it.
    """
    from microvm.host.files import hold_lock
    from microvm.store import open_registry

    if _listens(settings.admin_socket):
        with Client(Endpoint("http://localhost", socket=settings.admin_socket)) as client:
            body = {"workspace": workspace, "destroy": destroy}
            return client.post("/v1/admin/end-workspace", body)
    try:
        # No VMM lives without the service, and with its lock held none begins.
        with hold_lock(settings.state_dir / "service.lock"), open_registry(settings.state_dir) as registry:
            if not destroy:
                return {"stopped": []}
            return {"destroyed_at_next_start": registry.condemn_vms(workspace)}
    except HostError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise
        raise CapacityError(
            "draining",
            "the workspace is revoked, but the service is starting or ending: run this again for its VMs",
        ) from error


def _listens(path: Path) -> bool:
    """Whether somebody takes connections there."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@workspaces_app.command("list")
def workspaces_list(
    *, state_dir: StateDir = None, config: options.Config = None, json: options.Json = False
) -> None:
    """List every workspace with its bounds."""
    from microvm.store import open_registry

    with open_registry(_settings(config, state_dir).state_dir) as registry:
        rows = [_facts_of(workspace) for workspace in registry.workspaces()]
    if json:
        print_json({"workspaces": rows})
    else:
        columns = ["workspace", "revoked", "allow_network", *BOUNDS]
        print_table(columns, ([row[column] for column in columns] for row in rows))


@workspaces_app.command("set")
def workspaces_set(
    workspace: Annotated[str, typer.Argument(metavar="WORKSPACE", help="Its name.")],
    *,
    allow_network: Annotated[
        bool | None, typer.Option("--allow-network/--deny-network", help="Whether VMs may have one.")
    ] = None,
    max_vms: Annotated[int | None, typer.Option(min=0, help="VMs that it may keep.")] = None,
    max_memory_mib: Annotated[int | None, typer.Option(min=0, help="RAM of its VMs awake.")] = None,
    max_storage_gib: Annotated[int | None, typer.Option(min=0, help="Storage of all its VMs.")] = None,
    state_dir: StateDir = None,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Change a workspace's bounds; they hold from the next request, and take nothing away that is there."""
    given = {
        "allow_network": allow_network,
        "max_vms": max_vms,
        "max_memory_mib": max_memory_mib,
        "max_storage_gib": max_storage_gib,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        raise UsageError("say what to change")
    from microvm.store import open_registry

    with open_registry(_settings(config, state_dir).state_dir) as registry:
        facts = _facts_of(registry.set_workspace(workspace, **changes))
    if json:
        print_json(facts)
    else:
        print_facts(facts)


def _facts_of(workspace: Workspace) -> dict[str, Any]:
    return {
        "workspace": workspace.workspace_id,
        "revoked": workspace.revoked,
        "allow_network": workspace.allow_network,
        **{name: getattr(workspace.quota, name) for name in BOUNDS},
    }


def doctor(*, config: options.Config = None, json: options.Json = False) -> None:
    """Examine the host and the configuration, and say how to mend what is wrong."""
    from microvm.daemon.doctor import Status, examine
    from microvm.daemon.settings import DEFAULT_CONFIG_PATH, find_config

    checks = examine(_load(config))
    found = find_config(config)
    if json:
        shown = None if found is None else str(found)
        print_json({"config": shown, "checks": [check.to_json() for check in checks]})
    else:
        print_line(f"configuration: {found or f'all defaults, for there is no {DEFAULT_CONFIG_PATH}'}")
        for check in checks:
            print_line(f"{check.status.value:<4}  {check.name}: {check.seen}")
            if check.mend:
                print_line(f"      → {check.mend}")
    if any(check.status is Status.FAIL for check in checks):
        raise typer.Exit(1)


def openapi(
    *,
    url: Annotated[str | None, typer.Option(help="The service's URL [MICROVM_URL].")] = None,
    socket: Annotated[Path | None, typer.Option(help="The service's Unix socket [MICROVM_SOCKET].")] = None,
    token_file: Annotated[Path | None, typer.Option(help="The token's file [MICROVM_TOKEN_FILE].")] = None,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Print the running service's OpenAPI 3.1 document (always JSON)."""
    del json
    with Client(find_endpoint(url=url, socket=socket, token_file=token_file, config=config)) as client:
        print_json(client.get("/openapi.json"))


@image_app.command("build")
def image_build(
    *,
    recipe: Annotated[Path, typer.Option(metavar="FILE", help="What goes into it.")] = DEFAULT_RECIPE,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Not the configuration's image.")] = None,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Build the guest image: root file system, kernel, initrd and VMM; nothing changed, nothing done."""
    from image import ImageError, build_image

    target = output or _load(config).image
    try:
        manifest = build_image(target, recipe, progress=lambda text: print_line(text, to=sys.stderr))
    except ImageError as error:
        raise RequestError("invalid_argument", f"the image was not built: {error}") from error
    facts = {"image": str(target), "digest": manifest.digest}
    if json:
        print_json(facts)
    else:
        print_facts(facts)


def _with_defaults(given: Quota, defaults: Quota) -> Quota:
    return Quota(
        defaults.max_vms if given.max_vms is None else given.max_vms,
        defaults.max_memory_mib if given.max_memory_mib is None else given.max_memory_mib,
        defaults.max_storage_gib if given.max_storage_gib is None else given.max_storage_gib,
    )


def _load(config: Path | None) -> Settings:
    # Imported late, like trio: together they are most of the start-up time of commands that need neither.
    from microvm.daemon.settings import load_settings

    return load_settings(config)


def _settings(config: Path | None, state_dir: Path | None) -> Settings:
    if state_dir is None:
        return _load(config)
    if config is not None:
        raise UsageError("--state-dir or --config, not both")
    from microvm.daemon.settings import Settings

    return Settings(state_dir=state_dir.absolute())
