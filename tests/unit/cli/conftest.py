"""A scripted service on loopback: it records what the command line sends and answers what the test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from microvm.cli.app import run

SECRET = "mvm_secret-of-the-test"

Answer = tuple[int, dict[str, Any]]
NOT_FOUND: Answer = (404, {"error": {"code": "not_found", "message": "no such file"}})


@dataclass
class Service:
    """The service that the commands talk to.

    Attributes:
        answers: Per tool, what to say: a result, or a function of the arguments to a status and a body.
        calls: Tool and arguments of each call, in order.
        raw: What raw transfers read and write, by path and query.
        cuts: Bytes after which the next downloads are cut, in order.
        ranges: The ranges that downloads asked for.
    """

    url: str
    token_file: Path
    answers: dict[str, Any] = field(default_factory=dict[str, Any])
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list[tuple[str, dict[str, Any]]])
    authorizations: set[str | None] = field(default_factory=set[str | None])
    raw: dict[str, bytes] = field(default_factory=dict[str, bytes])
    cuts: list[int] = field(default_factory=list[int])
    ranges: list[str | None] = field(default_factory=list[str | None])

    def run(self, *argv: str) -> int:
        """Runs `microvm vm …` against this service."""
        options = ["--url", self.url, "--token-file", str(self.token_file)]
        return run(["vm", *options, *argv])

    def answer(self, tool: str, arguments: dict[str, Any]) -> Answer:
        self.calls.append((tool, arguments))
        said: dict[str, Any] | Callable[[dict[str, Any]], Answer] = self.answers.get(tool, {})
        return said(arguments) if callable(said) else (200, said)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    token_file = tmp_path / "token"
    token_file.write_text(SECRET, "ascii")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send(*scripted.answer(self.path.removeprefix("/v1/tools/"), body))

        def do_GET(self) -> None:
            if self.headers["Upgrade"]:
                self.send(*NOT_FOUND)  # a service that knows no WebSockets
            elif self.path.startswith("/v1/vms/"):
                self.download()
            else:
                self.send(*scripted.answer(self.path, {}))

        def do_PUT(self) -> None:
            if self.headers["Content-Length"]:
                body = self.rfile.read(int(self.headers["Content-Length"]))
            else:
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            scripted.raw[self.path] = body
            self.send(200, {"size": len(body), "sha256": "x"})

        def download(self) -> None:
            wanted = self.headers["Range"]
            scripted.ranges.append(wanted)
            content = scripted.raw.get(self.path)
            if content is None:
                self.send(*NOT_FOUND)
                return
            first, last = (wanted or "bytes=0-").removeprefix("bytes=").split("-")
            data = content[int(first) : int(last) + 1 if last else None]
            if wanted and not data:
                self.send(416, {"error": {"code": "invalid_argument", "message": "beyond the end"}})
                return
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", '"1"')
            self.send_header("Microvm-Mode", "0755")
            self.end_headers()
            if scripted.cuts:
                self.wfile.write(data[: scripted.cuts.pop(0)])
                self.close_connection = True
            else:
                self.wfile.write(data)

        def send(self, status: int, answer: dict[str, Any]) -> None:
            scripted.authorizations.add(self.headers["Authorization"])
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        scripted = Service(f"http://127.0.0.1:{server.server_port}", token_file)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield scripted
        finally:
            server.shutdown()
            thread.join()
