"""Who comes in: tokens, peers, hosts, origins, and what strangers learn."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Any

import pytest
import trio

from microvm.web.limits import AddressLimiter

VM_ID = "vm_" + "a" * 20
LOCKED = [
    ("GET", "/v1/tools"),
    ("GET", "/openapi.json"),
    ("POST", "/v1/tools/vm_list"),
    ("POST", "/v1/tools/nothing"),
    ("POST", "/mcp"),
    ("GET", "/mcp"),
    ("DELETE", "/mcp"),
    ("GET", "/nothing"),
    ("OPTIONS", "/v1/tools"),
]


@pytest.mark.parametrize(("method", "path"), LOCKED)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic YTpi"},
        {"authorization": "alice-token"},
        {"authorization": "Bearer " + "x" * 600},
    ],
    ids=["no token", "a wrong token", "another scheme", "no scheme", "a huge token"],
)
async def test_without_a_valid_token_nothing_is_told(
    doors: Any, method: str, path: str, headers: dict[str, str]
) -> None:
    async with doors.http(token=None) as http:
        answer = await http.request(method, path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "unauthenticated"


async def test_a_token_in_the_query_is_no_token(doors: Any) -> None:
    async with doors.http(token=None) as http:
        for query in ("token=alice-token", "access_token=alice-token", "authorization=Bearer+alice-token"):
            assert (await http.get(f"/v1/tools?{query}")).status_code == 401


async def test_two_tokens_are_none(doors: Any) -> None:
    async with doors.http(token=None) as http:
        headers = [("authorization", "Bearer alice-token"), ("authorization", "Bearer alice-token")]
        assert (await http.get("/v1/tools", headers=headers)).status_code == 401


async def test_a_stranger_is_turned_away_before_its_body_is_read(doors: Any) -> None:
    with trio.fail_after(5):
        stream = await trio.open_tcp_stream("127.0.0.1", doors.port)
        async with stream:
            head = "POST /v1/tools/vm_list HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30000000\r\n\r\n"
            await stream.send_all(head.encode())
            received = await stream.receive_some(4096)
    assert received.startswith(b"HTTP/1.1 401")


class TestWithASmallAllowance:
    @pytest.fixture
    def web_settings(self, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
        monkeypatch.setattr("microvm.web.access.AddressLimiter", lambda: AddressLimiter(per_s=0.01, burst=3))
        return {"listen": "127.0.0.1:0", "grace_s": 1.0}

    async def test_strangers_are_limited_and_told_when_to_come_back(self, doors: Any) -> None:
        async with doors.http(token=None) as http:
            answers = [await http.get("/v1/tools") for _ in range(4)]
        assert [answer.status_code for answer in answers] == [401, 401, 401, 429]
        assert answers[-1].json()["error"]["code"] == "rate_limited"
        assert int(answers[-1].headers["retry-after"]) > 1
        async with doors.http() as http:
            assert (await http.get("/v1/tools")).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/.well-known/oauth-authorization-server",
        "/.well-known/oauth-protected-resource/mcp",
        "/.well-known/openid-configuration",
    ],
)
async def test_well_known_paths_are_a_json_404_for_everybody(doors: Any, path: str) -> None:
    async with doors.http(token=None) as http:
        answer = await http.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/json")
    assert answer.json()["error"]["code"] == "not_found"


async def test_an_unknown_path_is_a_json_404_to_those_who_may_know(doors: Any) -> None:
    async with doors.http() as http:
        answer = await http.get("/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_a_tool_asked_for_by_get_names_the_method_to_use(doors: Any) -> None:
    async with doors.http() as http:
        answer = await http.get("/v1/tools/vm_list")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"] == {"code": "invalid_argument", "message": "this path takes POST"}


@pytest.mark.parametrize("path", ["/mcp", "/mcp/"])
@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "OPTIONS"])
async def test_mcp_takes_posts_only_and_says_so(doors: Any, method: str, path: str) -> None:
    async with doors.http() as http:
        answer = await http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


HOSTS = [
    ("localhost", 200),
    ("LOCALHOST:1234", 200),
    ("127.0.0.1:8090", 200),
    ("[::1]:8090", 200),
    ("evil.example", 403),
    ("127.0.0.1.evil.example", 403),
    ("localhost.evil.example:8090", 403),
]


@pytest.mark.parametrize(("host", "status"), HOSTS)
async def test_a_loopback_listener_believes_loopback_hosts_only(doors: Any, host: str, status: int) -> None:
    async with doors.http() as http:
        assert (await http.get("/v1/tools", headers={"host": host})).status_code == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:6274", 200),
        ("http://127.0.0.1:8090", 200),
        ("https://evil.example", 403),
        ("null", 403),
        ("http://localhost.evil.example", 403),
        ("http://[", 403),
    ],
)
@pytest.mark.parametrize("path", ["/v1/tools/vm_list", "/mcp"])
async def test_a_foreign_origin_is_forbidden(doors: Any, path: str, origin: str, status: int) -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "ping"} if path == "/mcp" else {}
    async with doors.http() as http:
        answer = await http.post(path, json=body, headers={"origin": origin})
    assert answer.status_code == status


class TestBehindAProxy:
    @pytest.fixture
    def web_settings(self) -> Mapping[str, Any]:
        return {
            "listen": "127.0.0.1:0",
            "allowed_hosts": ("vms.example", "other.example:444"),
            "allowed_origins": ("https://app.example",),
            "grace_s": 1.0,
        }

    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({"host": "vms.example"}, 200),
            ({"host": "vms.example:443"}, 200),
            ({"host": "other.example:444"}, 200),
            ({"host": "other.example"}, 403),
            ({"host": "vms.example", "origin": "https://app.example"}, 200),
            ({"host": "vms.example", "origin": "https://other.example"}, 403),
        ],
    )
    async def test_the_names_that_were_allowed_are(
        self, doors: Any, headers: dict[str, str], status: int
    ) -> None:
        async with doors.http() as http:
            assert (await http.get("/v1/tools", headers=headers)).status_code == status


async def test_the_service_socket_needs_a_token(doors: Any) -> None:
    path = doors.bound.service_socket
    async with doors.http(token=None, uds=path) as http:
        assert (await http.get("/v1/tools")).status_code == 401
    async with doors.http(uds=path) as http:
        assert (await http.get("/v1/tools", headers={"host": "anything"})).status_code == 200


async def test_a_peer_with_our_uid_is_operator_on_the_admin_socket(doors: Any) -> None:
    async with doors.http(token=None, uds=doors.bound.admin_socket) as http:
        answer = await http.post("/v1/tools/vm_list", json={"all": True})
    assert answer.status_code == 200


async def test_a_presented_token_beats_the_peers_uid(doors: Any) -> None:
    path = doors.bound.admin_socket
    async with doors.http(uds=path) as http:
        assert (await http.post("/v1/tools/vm_list", json={"all": True})).status_code == 403
    async with doors.http("wrong", uds=path) as http:
        assert (await http.post("/v1/tools/vm_list", json={})).status_code == 401


async def test_another_uid_is_nobody_on_the_admin_socket(doors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_uid(_stream: object) -> int:
        return os.geteuid() + 1

    monkeypatch.setattr("microvm.web.server._peer_uid", other_uid)
    async with doors.http(token=None, uds=doors.bound.admin_socket) as http:
        assert (await http.get("/v1/tools")).status_code == 401


async def test_the_admin_socket_is_private_and_both_go_with_the_service(doors: Any) -> None:
    admin, service = trio.Path(doors.bound.admin_socket), trio.Path(doors.bound.service_socket)
    assert stat.S_IMODE((await admin.stat()).st_mode) == 0o600
    assert stat.S_ISSOCK((await service.stat()).st_mode)
    doors.stop.set()
    with trio.fail_after(5):
        await doors.stopped.wait()
    assert not await admin.exists()
    assert not await service.exists()
