"""Commands of the service's host: start it, administer tokens, examine the host, build the image.

Promises that token commands work with the service up or down and hold from the next request on; a secret
goes to its file and nowhere else. It must not keep state of its own. Neighbours: `daemon` and `store`,
which do the work.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from microvm.cli import options
from microvm.cli.client import Client, UsageError, find_endpoint
from microvm.cli.console import print_facts, print_json, print_line
from microvm.errors import RequestError
from microvm.model import NAME_PATTERN, Quota

if TYPE_CHECKING:
    from microvm.daemon.settings import Settings

DEFAULT_RECIPE: Final = Path(__file__).resolve().parents[2] / "image" / "recipe.toml"

image_app = typer.Typer(help="Build what VMs boot from.", no_args_is_help=True)

StateDir = Annotated[
    Path | None, typer.Option("--state-dir", metavar="DIR", help="Instead of the configuration's.")
]


def register(app: typer.Typer) -> None:
    """Adds the commands to the program's top level."""
    app.command("serve")(serve)
    app.command("issue-token")(issue_token)
    app.command("revoke-workspace")(revoke_workspace)
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


def revoke_workspace(
    workspace: Annotated[str | None, typer.Argument(metavar="WORKSPACE", help="Its name.")] = None,
    *,
    workspace_option: Annotated[str | None, typer.Option("--workspace", help="The same.")] = None,
    state_dir: StateDir = None,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """End every access of a workspace, for good; its VMs and jobs stay."""
    name = workspace or workspace_option
    if name is None or (workspace and workspace_option and workspace != workspace_option):
        raise UsageError("name one workspace")
    settings = _settings(config, state_dir)
    from microvm.store import open_registry

    with open_registry(settings.state_dir) as registry:
        registry.revoke_workspace(name)
    if json:
        print_json({"workspace": name, "revoked": True})
    else:
        print_line(f"{name} is revoked: none of its tokens works, and it gets no new ones")


def doctor(*, config: options.Config = None, json: options.Json = False) -> None:
    """Examine the host and the configuration, and say how to mend what is wrong."""
    from microvm.daemon.doctor import Status, examine

    checks = examine(_load(config))
    if json:
        print_json({"checks": [check.to_json() for check in checks]})
    else:
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
