"""The configuration: one TOML file, checked as a whole before anything starts.

Promises a frozen, complete `Settings`, or an error that names the file, the key and the nearest known key.
It must not touch what the keys name: directories, devices and addresses are looked at by `doctor` and by
the wiring. Neighbours: `examples/microvm.toml` documents every key, and a test parses it.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from microvm.errors import RequestError
from microvm.model import Quota

DEFAULT_CONFIG_PATH: Final = Path("/etc/microvm/microvm.toml")
DEFAULT_STATE_DIR: Final = Path("/var/lib/microvm")

SLOTS: Final = 256  # a slot is one octet of the guests' addresses (10.231.<slot>.0/30)

# 65536 to 99999 is nobody's: Debian's users end at 65535, its subordinate ids begin at 100000 (login.defs
# SUB_UID_MIN), and systemd's containers begin at 524288 (systemd UIDS-GIDS).
DEFAULT_UID_BASE: Final = 70000

# sizeof(sockaddr_un.sun_path) is 108 with the final NUL (unix(7)).
MAX_SOCKET_PATH_BYTES: Final = 107

LogLevel = Literal["debug", "info", "warning", "error"]

_STRICT: Final = ConfigDict(extra="forbid", frozen=True, strict=True)

# TOML has no paths: text becomes one here, and nothing else does although the model is strict.
TomlPath = Annotated[Path, Field(strict=False)]


class WorkspaceSettings(BaseModel):
    """What a workspace may hold unless its token was issued with numbers of its own."""

    model_config = _STRICT

    max_vms: Annotated[int, Field(ge=1)] = 16
    max_memory_mib: Annotated[int, Field(ge=128)] | None = None
    max_storage_gib: Annotated[int, Field(ge=1)] | None = None

    @property
    def quota(self) -> Quota:
        """The same as the record that `store` keeps."""
        return Quota(self.max_vms, self.max_memory_mib, self.max_storage_gib)


class Settings(BaseModel):
    """Everything an operator decides.

    Attributes:
        state_dir: Metadata, logs and the instance's identity; 0700.
        vm_dir: Disks, RAM, checkpoints and templates; on a file system with reflinks, and on another one than
            `state_dir`, because an fsync of RAM delays every commit beside it.
        image: What `microvm image build` made.
        listen: `host:port` of the HTTP listener.
        socket: The Unix socket with the same routes; `admin.sock` stands beside it.
        uid_base: The first of 256 UIDs that belong to VMs and to nothing else on this host.
        max_memory_mib: RAM of all live VMs; None for three quarters of the host's.
        max_storage_gib: Reserved disk and RAM of all retained VMs; None for what `vm_dir` has room for.
        limits: "v2" puts CPU and process limits on every VMM and is refused where the controllers are
            missing; "none" is for trials.
        drain_seconds: How long a shutdown may take to checkpoint what runs.
    """

    model_config = _STRICT

    state_dir: TomlPath = DEFAULT_STATE_DIR
    vm_dir: TomlPath = Path()
    image: TomlPath = Path()
    listen: str = "127.0.0.1:8090"
    socket: TomlPath = Path()
    allow_remote: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    uid_base: Annotated[int, Field(ge=1000, le=2**32 - 2 - SLOTS)] = DEFAULT_UID_BASE
    max_vms: Annotated[int, Field(ge=1)] = 256
    max_memory_mib: Annotated[int, Field(ge=128)] | None = None
    max_storage_gib: Annotated[int, Field(ge=1)] | None = None
    workspace: WorkspaceSettings = WorkspaceSettings()
    vmm: Literal["qemu"] = "qemu"
    qemu: Literal["closure"] = "closure"
    accel: Literal["auto", "kvm", "tcg"] = "auto"
    limits: Literal["v2", "none"] = "v2"
    drain_seconds: Annotated[float, Field(ge=1, le=3600)] = 60.0
    log_level: LogLevel = "info"

    @field_validator("allowed_hosts", "allowed_origins", mode="before")
    @classmethod
    def _tuple_of_array(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]

    @field_validator("drain_seconds", mode="before")
    @classmethod
    def _whole_seconds(cls, value: object) -> object:
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("state_dir", "vm_dir", "image", "socket", mode="after")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        if value != Path() and not value.is_absolute():
            raise ValueError("must be an absolute path")
        return value

    @model_validator(mode="after")
    def _complete(self) -> Self:
        # Frozen for everybody else: the defaults below depend on another key, so they are filled in here.
        for name, default in (("vm_dir", "vm"), ("image", "image"), ("socket", "run/service.sock")):
            if getattr(self, name) == Path():
                object.__setattr__(self, name, self.state_dir / default)
        if len(os.fsencode(self.socket)) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"socket: {self.socket} has more than {MAX_SOCKET_PATH_BYTES} bytes")
        host, _ = _split_address(self.listen)
        if not self.allow_remote and not _is_loopback(host):
            raise ValueError(f"listen: {host} is not loopback; set allow_remote = true to mean it")
        return self

    @property
    def host(self) -> str:
        """The address part of `listen`, without brackets."""
        return _split_address(self.listen)[0]

    @property
    def port(self) -> int:
        """The port part of `listen`; 0 for any free one."""
        return _split_address(self.listen)[1]

    @property
    def admin_socket(self) -> Path:
        """The socket whose peer, with the daemon's uid, is the operator."""
        return self.socket.with_name("admin.sock")

    @property
    def quota(self) -> Quota:
        """The host's own bounds, where they were given."""
        return Quota(self.max_vms, self.max_memory_mib, self.max_storage_gib)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed and unwise."""
        if not _is_loopback(self.host) and not self.allowed_hosts:
            return ("listen is not loopback and allowed_hosts is empty: any Host header is accepted",)
        return ()


def _split_address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"listen: {text!r} is not host:port")
    return host, int(port)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_settings(path: Path | None = None, *, env: Mapping[str, str] | None = None) -> Settings:
    """Reads the configuration.

    Args:
        path: The file; None for `MICROVM_CONFIG`, then `/etc/microvm/microvm.toml`, then all defaults.
        env: The environment; `MICROVM_LOG` replaces `log_level`.

    Raises:
        RequestError: The file cannot be read, or says something that is not understood.
    """
    env = os.environ if env is None else env
    path = find_config(path, env=env)
    text = "" if path is None else _read(path)
    return parse_settings(text, source=str(path or "defaults"), log_level=env.get("MICROVM_LOG"))


def find_config(path: Path | None = None, *, env: Mapping[str, str] | None = None) -> Path | None:
    """The file that `load_settings` would read; None when it would take all defaults."""
    env = os.environ if env is None else env
    if path is None and env.get("MICROVM_CONFIG"):
        return Path(env["MICROVM_CONFIG"])
    if path is None and DEFAULT_CONFIG_PATH.exists():
        return DEFAULT_CONFIG_PATH
    return path


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("invalid_argument", f"the configuration {path} cannot be read: {error}") from error


def parse_settings(text: str, *, source: str = "configuration", log_level: str | None = None) -> Settings:
    """Checks TOML text.

    Args:
        text: The file's content.
        source: What to call it in an error.
        log_level: A level that replaces the file's; None for the file's own.

    Raises:
        RequestError: Not TOML, an unknown key, or a value of the wrong type or range.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RequestError("invalid_argument", f"{source} is not TOML: {error}") from error
    if log_level:
        values["log_level"] = log_level.lower()
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise RequestError("invalid_argument", f"{source}: {_explain(error)}") from error


def _explain(error: ValidationError) -> str:
    parts: list[str] = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        where = ".".join(str(step) for step in item["loc"])
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown key {where!r}{_nearest(where)}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            parts.append(f"{where}: {message}" if where else message)
    return "; ".join(parts)


def _nearest(where: str) -> str:
    table, dot, key = where.rpartition(".")
    model: type[BaseModel] = WorkspaceSettings if table == "workspace" else Settings
    near = difflib.get_close_matches(key, list(model.model_fields), n=1)
    return f"; the nearest known one is {table}{dot}{near[0]}" if near else ""


def dump_settings(values: Mapping[str, Any]) -> str:
    """TOML text of the given keys, checked by parsing it again; for tools that write a configuration."""
    import tomli_w

    text = tomli_w.dumps(
        {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
    )
    parse_settings(text, source="generated configuration")
    return text
