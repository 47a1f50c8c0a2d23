"""One connection to a running service, over HTTP or a Unix socket.

Promises that a call either returns the tool's result or raises the service's own error. It must not print,
and it never puts a token into a message. Neighbours: `vm`, `exec` and `files`, which call tools through it.

Where to: `--url` or MICROVM_URL; else `--socket` or MICROVM_SOCKET; else the configuration's socket. Who
as: the token of `--token-file` or MICROVM_TOKEN_FILE; without one, root is the operator through
`admin.sock`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, cast
from urllib.parse import quote

import httpx2

from microvm.errors import STATUS_OF_CODE, CapacityError, MicrovmError, RequestError

# Any answer of the service stays under 60 s (its contract, §11); the rest is for a loaded host.
TIMEOUT_S: Final = 90.0
CONNECT_TIMEOUT_S: Final = 10.0
# A transfer has no such bound; its longest silence is a guest's that writes its caches out (fleet.transfer).
TRANSFER_TIMEOUT_S: Final = 150.0

ADMIN_HINT: Final = "(Without a token you are the workspace operator; others' VMs obey their own tokens.)"

_ERRNO: Final = re.compile(r"^\[Errno -?\d+\] ")


class UsageError(Exception):
    """The command line cannot be carried out as written; exit code 2."""


class CutError(MicrovmError):
    """A download ended before its end; what came is good."""

    def __init__(self, message: str) -> None:
        super().__init__("no_capacity", message, retry_after_s=1.0)


class BeyondEndError(RequestError):
    """The file has no byte of the wanted range."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the service is and who is calling.

    Attributes:
        url: The base of the routes.
        socket: The Unix socket to connect to; None for TCP.
        token: The caller's secret; None on the admin socket.
    """

    url: str
    socket: Path | None = None
    token: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """What a person would call it."""
        return str(self.socket) if self.socket else self.url


def find_endpoint(
    *,
    url: str | None = None,
    socket: Path | None = None,
    token_file: Path | None = None,
    config: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Endpoint:
    """Decides where to call; options win over the environment, and the environment over the configuration.

    Raises:
        UsageError: There is no token, and the caller is not root.
        RequestError: The token file or the configuration cannot be read.
    """
    env = os.environ if env is None else env
    if token_file is None and env.get("MICROVM_TOKEN_FILE"):
        token_file = Path(env["MICROVM_TOKEN_FILE"])
    token = _read_token(token_file) if token_file else None
    if url is None and socket is None:
        url = env.get("MICROVM_URL") or None
        if url is None and env.get("MICROVM_SOCKET"):
            socket = Path(env["MICROVM_SOCKET"])
    if url is not None:
        if token is None:
            raise UsageError("a URL needs a token: --token-file FILE or MICROVM_TOKEN_FILE")
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"a URL begins with http:// or https://, not {url!r}")
        return Endpoint(url.rstrip("/"), token=token)
    if socket is None:
        from microvm.daemon.settings import load_settings  # half of the start-up time, where it is needed

        socket = load_settings(config, env=env).socket
    if token is None:
        if os.geteuid() != 0:
            raise UsageError("no token: give --token-file FILE or MICROVM_TOKEN_FILE, or be root")
        socket = socket.with_name("admin.sock")
    return Endpoint("http://localhost", socket=socket, token=token)


def _read_token(path: Path) -> str:
    try:
        token = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        # The content stays out of the message and out of the chained traceback.
        reason = error.strerror if isinstance(error, OSError) else "not a token"
        raise RequestError("invalid_argument", f"the token file {path} cannot be read: {reason}") from None
    if not token:
        raise RequestError("invalid_argument", f"the token file {path} is empty")
    return token


class Client:
    """Calls tools of one service. A context manager; leaving it closes the connection."""

    def __init__(self, endpoint: Endpoint, *, transport: httpx2.BaseTransport | None = None) -> None:
        self.endpoint = endpoint
        if transport is None and endpoint.socket is not None:
            transport = httpx2.HTTPTransport(uds=str(endpoint.socket), verify=False)
        headers = {"Authorization": f"Bearer {endpoint.token}"} if endpoint.token else {}
        self._http = httpx2.Client(
            base_url=endpoint.url,
            headers=headers,
            transport=transport,
            timeout=httpx2.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            verify=endpoint.url.startswith("https:"),  # reading the host's certificates takes 0.2 s
            trust_env=False,  # a proxy variable must not see the token
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def call(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The result of one tool call.

        Args:
            tool: A name of the catalogue.
            arguments: Its arguments; members that are None are left out.

        Raises:
            MicrovmError: The service's own error, or that it cannot be reached.
        """
        body = {name: value for name, value in arguments.items() if value is not None}
        return self._ask("POST", f"/v1/tools/{tool}", body)

    def get(self, path: str) -> dict[str, Any]:
        """A JSON document of the service."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of a route that takes a JSON object."""
        return self._ask("POST", path, body)

    def upload(self, path: str, content: Iterable[bytes], params: Mapping[str, str]) -> dict[str, Any]:
        """Sends a body of any length, as it comes, and returns the answer.

        Raises:
            MicrovmError: The service's own error, or that it cannot be reached; nothing was changed.
        """
        with self._lost():
            response = self._http.put(path, content=content, params=params, timeout=_TRANSFER)
        return _result(response)

    @contextmanager
    def download(self, path: str, headers: Mapping[str, str]) -> Generator[httpx2.Response]:
        """An answer of any length, to be read in the block.

        Raises:
            MicrovmError: The service's own error, before the block.
            CutError: The connection was lost in the block.
        """
        begun = False
        try:
            with (
                self._lost(),
                self._http.stream("GET", path, headers=dict(headers), timeout=_TRANSFER) as response,
            ):
                if not response.is_success:
                    response.read()
                    _result(response)
                begun = True
                yield response
        except CapacityError as error:
            if begun and error.code == "no_capacity":
                raise CutError(error.message) from None
            raise

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        with self._lost():
            response = self._http.request(method, path, json=body)
        try:
            return _result(response)
        except MicrovmError as error:
            if self.endpoint.token is None and error.code == "not_found":
                error.message += f" {ADMIN_HINT}"
            raise

    @contextmanager
    def _lost(self) -> Generator[None]:
        """Tells what went wrong with the connection."""
        name = self.endpoint.name
        try:
            yield
        except httpx2.ConnectError as error:
            reason = _ERRNO.sub("", str(error))
            raise _unreachable(
                f"no service answers at {name} ({reason}); start it with `microvm serve` or "
                "tools/quickstart, or name another with --url, --socket or --config"
            ) from None
        except httpx2.TimeoutException:
            raise _unreachable(f"{name} did not answer in time") from None
        except httpx2.HTTPError as error:
            raise _unreachable(f"the connection to {name} was lost: {error}") from None


_TRANSFER: Final = httpx2.Timeout(TRANSFER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)


def raw_path(vm_id: str, kind: str, path: str) -> str:
    """The route of a file or an archive.

    Args:
        vm_id: The VM.
        kind: "files" or "archive".
        path: Below /workspace, or beginning with it.
    """
    below = (
        path.removeprefix("/workspace") if path == "/workspace" or path.startswith("/workspace/") else path
    )
    if below.startswith("/") and below == path:
        raise RequestError("invalid_argument", "the path must lie below /workspace")
    return f"/v1/vms/{quote(vm_id, safe='')}/{kind}/{quote(below.lstrip('/'), safe='/')}"


def _unreachable(message: str) -> CapacityError:
    return CapacityError("no_capacity", message)


def _result(response: httpx2.Response) -> dict[str, Any]:
    try:
        document: object = response.json()
    except ValueError:
        document = None
    if response.is_success and isinstance(document, dict):
        return cast(dict[str, Any], document)
    error = cast(dict[str, Any], document).get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict):
        raise MicrovmError("internal", f"the service answered {response.status_code} without an error object")
    fields = cast(dict[str, Any], error)
    code = str(fields.get("code"))
    message = str(fields.get("message", ""))
    if response.status_code == 416:
        raise BeyondEndError("invalid_argument", message)
    if code not in STATUS_OF_CODE:
        raise MicrovmError("internal", f"{code}: {message}")
    detail = fields.get("detail")
    raise MicrovmError(code, message, cast(dict[str, Any], detail) if isinstance(detail, dict) else None)
