"""From the project's environment to a running service: image, volume, configuration, token, self-check.

Promises to be safe to repeat: what is there and good is used again, what is missing is made, and a service
of another version is restarted. It must not print a token. Neighbours: `bootstrap` runs before it;
`service` and `selfcheck` do the last two steps.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
import tomllib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import service
from bootstrap import INTERRUPTED, ROOT, FailedError, say, stop
from quickstart_options import SMALLEST_VOLUME_GIB, VOLUME_GIB, parse_arguments
from selfcheck import run_selfcheck

from image import ImageError, build_image
from microvm.cli.client import Client, find_endpoint
from microvm.daemon.settings import (
    DEFAULT_CONFIG_PATH,
    DEFAULT_STATE_DIR,
    SLOTS,
    Settings,
    dump_settings,
    parse_settings,
)
from microvm.errors import HostError, MicrovmError
from microvm.host.cgroup import find_hierarchy
from microvm.host.volume import check_reflink, make_loop_volume
from microvm.store import open_registry

GIB: Final = 2**30
# Between systemd's container UIDs and those that do not fit 31 bits (systemd UIDS-GIDS): nobody's.
FURTHER_UIDS: Final = range(1879048192, 2147483648)
LEFT_FREE_GIB: Final = 4  # for the host: image builds, logs
WORKSPACE: Final = "default"
TOKEN_TTL_S: Final = 30 * 86400.0


def main() -> None:
    """The command `tools/quickstart`."""
    options = parse_arguments()
    try:
        _run(options)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except FailedError as error:
        stop("quickstart", error)
    except ImageError as error:
        stop("quickstart", FailedError(f"building the image: {error}"))
    except MicrovmError as error:
        stop("quickstart", FailedError(error.message))
    except OSError as error:
        stop("quickstart", FailedError(str(error)))


def _run(options: argparse.Namespace) -> None:
    timings: dict[str, float] = {}
    with _locked(options.state_dir):
        config, settings = _configure(options.state_dir, options.port)
        with _timed("image_s", timings):
            digest = build_image(settings.image, progress=say).digest
        with _timed("volume_s", timings):
            _make_volume(settings, options.volume_gib)
        with _timed("start_s", timings):
            running = _ensure_running(settings, config, digest)
        token_file = _ensure_token(settings)
        url = f"http://{settings.listen}"
        try:
            with Client(find_endpoint(url=url, token_file=token_file)) as client:
                timings.update(run_selfcheck(client))
        finally:
            if options.once:
                service.stop(settings, running)
    result = {
        "url": url,
        "socket": str(settings.socket),
        "token_file": str(token_file),
        "state_dir": str(settings.state_dir),
        "config": str(config),
        "timings": timings,
    }
    if options.json:
        print(json.dumps(result))
    else:
        _explain(result, end=None if options.once else service.how_to_stop(settings, running))


@contextmanager
def _locked(state_dir: Path) -> Generator[None]:
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    state_dir.chmod(0o700)
    fd = os.open(state_dir / ".quickstart.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another quickstart of this state directory")
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _configure(state_dir: Path, port: int | None) -> tuple[Path, Settings]:
    """The configuration's file and content; an existing one keeps every key but a given port's `listen`."""
    config = DEFAULT_CONFIG_PATH if state_dir == DEFAULT_STATE_DIR else state_dir / "microvm.toml"
    values: dict[str, Any] = {}
    if config.exists():
        settings = parse_settings(config.read_text("utf-8"), source=str(config))
        if port is None or settings.port == port:
            return config, settings
        values = tomllib.loads(config.read_text("utf-8"))
    else:
        values = {"state_dir": str(state_dir), "vm_dir": str(state_dir / "vm"), "limits": _limits()}
        if state_dir != DEFAULT_STATE_DIR:
            values["uid_base"] = _uid_base(state_dir)
    values["listen"] = f"127.0.0.1:{port or 8090}"
    say(f"writing {config}")
    config.parent.mkdir(parents=True, exist_ok=True)
    text = dump_settings(values)
    config.write_text(
        "# Written by tools/quickstart; every key is explained in examples/microvm.toml.\n" + text
    )
    return config, parse_settings(text, source=str(config))


def _uid_base(state_dir: Path) -> int:
    """UIDs for a further service on this host: a range of its own, since two services may not share one."""
    number = int.from_bytes(hashlib.sha256(os.fsencode(state_dir)).digest()[:8], "big")
    return FURTHER_UIDS.start + number % (len(FURTHER_UIDS) // SLOTS) * SLOTS


def _limits() -> str:
    lacks = find_hierarchy().lacks
    if not lacks:
        return "v2"
    say(f'cgroup v2 lacks {", ".join(sorted(lacks))} here: limits = "none", for trials only')
    return "none"


def _make_volume(settings: Settings, wanted_gib: int | None) -> None:
    backing = settings.state_dir / "volume.xfs"
    if not backing.exists():
        settings.vm_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            check_reflink(settings.vm_dir)
        except HostError:
            say(f"{settings.vm_dir} makes no reflinks: making an XFS volume in {backing}")
        else:
            return
    if make_loop_volume(backing, settings.vm_dir, _volume_gib(settings.state_dir, wanted_gib) * GIB):
        say(f"mounted {backing} at {settings.vm_dir}")
    check_reflink(settings.vm_dir)


def _volume_gib(directory: Path, wanted_gib: int | None) -> int:
    if (directory / "volume.xfs").exists():
        return VOLUME_GIB  # an existing volume keeps its size
    free_gib = shutil.disk_usage(directory).free // GIB
    size_gib = min(wanted_gib or VOLUME_GIB, free_gib - LEFT_FREE_GIB)
    if size_gib < (wanted_gib or SMALLEST_VOLUME_GIB):
        needed = (wanted_gib or SMALLEST_VOLUME_GIB) + LEFT_FREE_GIB
        raise FailedError(
            f"{directory} has {free_gib} GiB free and {needed} GiB are needed; free some, choose another "
            "--state-dir, or mount an XFS or Btrfs volume and name it as vm_dir in the configuration"
        )
    return size_gib


def _ensure_running(settings: Settings, config: Path, image_digest: str) -> service.Running:
    mark = service.fingerprint(config, image_digest)
    running = service.find_running(settings)
    if running is not None:
        if running.fingerprint == mark and service.is_ready(settings):
            say("the service is running already")
            return running
        service.stop(settings, running)
    return service.start(settings, config, mark)


def _ensure_token(settings: Settings) -> Path:
    path = settings.state_dir / "token"
    with open_registry(settings.state_dir) as registry:
        if path.exists():
            from microvm.store import token_id_of

            token_id = token_id_of(path.read_text("ascii").strip())
            soon = time.time() + 86400
            if any(
                token.token_id == token_id and not token.revoked and token.expires_at > soon
                for token in registry.tokens(WORKSPACE)
            ):
                return path
            path.unlink()
        registry.issue_token_file(path, WORKSPACE, ttl_s=TOKEN_TTL_S)
    say(f"issued a token for the workspace {WORKSPACE} into {path}")
    return path


@contextmanager
def _timed(name: str, timings: dict[str, float]) -> Generator[None]:
    began = time.monotonic()
    yield
    timings[name] = round(time.monotonic() - began, 2)


def _explain(result: dict[str, Any], *, end: str | None) -> None:
    """For people; `end` is how to stop the service, None when it is stopped."""
    timings = "\n".join(f"  {name:<20} {value:>9g}" for name, value in result["timings"].items())
    headers = {"Authorization": "Bearer ${MICROVM_TOKEN}"}
    server = {"type": "http", "url": f"{result['url']}/mcp", "headers": headers}
    options = f"--url {result['url']} --token-file {result['token_file']}"
    print(
        f"The self-check passed: a VM was made, used, hibernated, woken and destroyed.\n{timings}\n\n"
        f'For an MCP client (export MICROVM_TOKEN="$(cat {result["token_file"]})" where it starts):\n'
        f"{json.dumps({'mcpServers': {'microvm': server}}, indent=2)}\n\n"
        f"On the command line:\n  {ROOT}/.venv/bin/microvm vm {options} create\n"
    )
    if end is None:
        print("The service was stopped (--once); the same command without --once starts it again.")
    else:
        print(f"The service listens on {result['url']} and {result['socket']}; stop it with: {end}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
