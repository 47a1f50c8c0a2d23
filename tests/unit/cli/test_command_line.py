"""The command line as a whole: exit codes, where it connects, tokens, and terminals."""

from __future__ import annotations

import gc
import io
import json
import os
from pathlib import Path

import httpx2
import pytest
import trio

from microvm.cli import options
from microvm.cli.app import run
from microvm.cli.client import ADMIN_HINT, Client, Endpoint, UsageError, find_endpoint
from microvm.cli.console import GuestOutput, strip_control
from microvm.errors import MicrovmError, RequestError
from microvm.host.files import hold_lock
from microvm.model import VmId, VmRecord, VmSpec, VmState, WorkspaceId
from microvm.store import open_registry, open_store

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    "argv",
    [["nope"], ["vm", "nope"], ["vm", "list", "--nope"], ["issue-token"], ["vm", "create", "--vcpus", "x"]],
)
def test_a_wrong_command_line_is_code_2(argv: list[str]) -> None:
    assert run(argv) == 2


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["vm", "--help"], ["vm", "exec", "--help"]])
def test_help_is_code_0(argv: list[str]) -> None:
    assert run(argv) == 0


# httpcore2 leaves the socket of a failed connect to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_service_that_is_not_there_is_code_1_and_says_how_to_start_it(
    tmp_path: Path, capsys: Capture
) -> None:
    assert run(["vm", "--socket", str(tmp_path / "service.sock"), "list"]) == 1
    shown = capsys.readouterr().err
    assert "microvm serve" in shown
    assert "(No such file or directory)" in shown
    gc.collect()  # here, not in a later test, which would be blamed


def test_a_wrong_configuration_is_code_1_and_names_the_key(tmp_path: Path, capsys: Capture) -> None:
    config = tmp_path / "c.toml"
    config.write_text("max_vm = 3", "utf-8")
    assert run(["doctor", "--config", str(config)]) == 1
    assert "max_vms" in capsys.readouterr().err


def test_doctor_with_json_lists_checks(tmp_path: Path, capsys: Capture) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'state_dir = "{tmp_path}/s"', "utf-8")
    assert run(["doctor", "--config", str(config), "--json"]) == 1  # there is no vm_dir
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"] == str(config)
    names = [check["name"] for check in shown["checks"]]
    assert {"vm_dir", "image", "cgroups"} <= set(names)


# ---- where to, who as


def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("mvm_secret", "ascii")
    return path


def test_an_option_wins_over_the_environment(tmp_path: Path) -> None:
    env = {"MICROVM_URL": "http://env", "MICROVM_TOKEN_FILE": str(token(tmp_path))}
    assert find_endpoint(url="http://option/", env=env) == Endpoint("http://option", token="mvm_secret")
    assert find_endpoint(env=env).url == "http://env"


def test_a_chosen_socket_wins_over_the_environments_url(tmp_path: Path) -> None:
    env = {"MICROVM_URL": "http://env"}
    endpoint = find_endpoint(socket=tmp_path / "service.sock", token_file=token(tmp_path), env=env)
    assert endpoint.socket == tmp_path / "service.sock"


def test_root_without_a_token_uses_the_admin_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    endpoint = find_endpoint(env={"MICROVM_SOCKET": str(tmp_path / "service.sock")})
    assert (endpoint.socket, endpoint.token) == (tmp_path / "admin.sock", None)


def test_anybody_else_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="--token-file"):
        find_endpoint(env={"MICROVM_SOCKET": "/nowhere/service.sock"})


def test_a_url_needs_a_token() -> None:
    with pytest.raises(UsageError, match="--token-file"):
        find_endpoint(url="http://127.0.0.1:1", env={})


def test_a_url_without_http_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="http://"):
        find_endpoint(url="127.0.0.1:8090", token_file=token(tmp_path), env={})


def test_without_a_token_an_unknown_vm_explains_whose_vms_are_seen(tmp_path: Path) -> None:
    def refuse(request: httpx2.Request) -> httpx2.Response:
        code = "not_found" if request.url.path.endswith("vm_status") else "forbidden"
        return httpx2.Response(404, json={"error": {"code": code, "message": "no."}})

    def told(endpoint: Endpoint, tool: str) -> str:
        with (
            Client(endpoint, transport=httpx2.MockTransport(refuse)) as client,
            pytest.raises(MicrovmError) as caught,
        ):
            client.call(tool, {})
        return caught.value.message

    admin = Endpoint("http://localhost", socket=tmp_path / "admin.sock")
    assert told(admin, "vm_status") == f"no. {ADMIN_HINT}"
    assert told(admin, "vm_list") == "no."
    assert told(Endpoint("http://localhost", token="mvm_secret"), "vm_status") == "no."


def test_a_tokens_content_is_in_no_representation_or_error(tmp_path: Path) -> None:
    assert "mvm_secret" not in repr(find_endpoint(url="http://x", token_file=token(tmp_path), env={}))
    bad = tmp_path / "bad"
    bad.write_bytes(b"mvm_\xffsecret")
    with pytest.raises(RequestError) as caught:
        find_endpoint(url="http://x", token_file=bad, env={})
    assert "secret" not in caught.value.message
    assert caught.value.__cause__ is None


# ---- tokens


def issue(tmp_path: Path, name: str, *argv: str) -> int:
    state = tmp_path / "state"
    return run(
        [
            "issue-token",
            "--workspace",
            "a",
            "--state-dir",
            str(state),
            "--output",
            str(tmp_path / name),
            *argv,
        ]
    )


def test_an_issued_token_is_in_its_file_only_and_works(tmp_path: Path, capsys: Capture) -> None:
    assert issue(tmp_path, "t", "--json") == 0
    path = tmp_path / "t"
    secret = path.read_text("ascii")
    shown = capsys.readouterr()
    assert secret not in shown.out + shown.err
    assert path.stat().st_mode & 0o777 == 0o600
    with open_registry(tmp_path / "state") as registry:
        [info] = registry.tokens("a")
        assert info.token_id == json.loads(shown.out)["token_id"]
        assert info.expires_at - info.created_at == 30 * 86400
        workspace = registry.workspace("a")
    assert workspace is not None
    assert workspace.quota.max_vms == 16


def test_an_existing_file_is_not_overwritten_and_nothing_is_issued(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("mine", "ascii")
    assert issue(tmp_path, "t") == 1
    assert (tmp_path / "t").read_text("ascii") == "mine"
    with open_registry(tmp_path / "state") as registry:
        assert registry.tokens("a") == []


def test_a_second_token_leaves_the_workspaces_quota_alone(tmp_path: Path) -> None:
    assert issue(tmp_path, "t1", "--max-vms", "3") == 0
    assert issue(tmp_path, "t2") == 0
    assert issue(tmp_path, "t3", "--max-vms", "4") == 1
    assert not (tmp_path / "t3").exists()


def test_a_revoked_workspace_gets_no_token(tmp_path: Path) -> None:
    assert issue(tmp_path, "t1") == 0
    assert run(["revoke-workspace", "--workspace", "a", "--state-dir", str(tmp_path / "state")]) == 0
    assert issue(tmp_path, "t2") == 1


def test_an_unknown_workspace_cannot_be_revoked(tmp_path: Path) -> None:
    assert run(["revoke-workspace", "nobody", "--state-dir", str(tmp_path / "state")]) == 1


def test_a_revoked_token_works_no_more_and_others_do(tmp_path: Path, capsys: Capture) -> None:
    assert issue(tmp_path, "t1", "--json") == 0
    token_id = json.loads(capsys.readouterr().out)["token_id"]
    assert issue(tmp_path, "t2") == 0
    state = str(tmp_path / "state")
    assert run(["revoke-token", token_id, "--state-dir", state]) == 0
    assert run(["revoke-token", token_id, "--state-dir", state]) == 0
    with open_registry(tmp_path / "state") as registry:
        assert sorted(token.revoked for token in registry.tokens("a")) == [False, True]
    assert run(["revoke-token", "tok_nobody", "--state-dir", state]) == 1


def test_bounds_of_a_workspace_are_listed_and_changed(tmp_path: Path, capsys: Capture) -> None:
    assert issue(tmp_path, "t1", "--max-vms", "3") == 0
    state = str(tmp_path / "state")
    assert run(["workspaces", "set", "a", "--max-vms", "5", "--state-dir", state]) == 0
    assert run(["workspaces", "set", "a", "--state-dir", state]) == 2
    assert run(["workspaces", "set", "nobody", "--max-vms", "5", "--state-dir", state]) == 1
    capsys.readouterr()
    assert run(["workspaces", "list", "--state-dir", state, "--json"]) == 0
    listed = {row["workspace"]: row for row in json.loads(capsys.readouterr().out)["workspaces"]}
    assert (listed["a"]["max_vms"], listed["a"]["revoked"]) == (5, False)


def put_vm(state: Path, vm_id: str, workspace: str) -> None:
    record = VmRecord(
        VmId(vm_id), WorkspaceId(workspace), VmState.HIBERNATED, since=1.0, created_at=1.0, spec=VmSpec()
    )

    async def put() -> None:
        async with open_store(state) as store:
            await store.insert_vm(record)

    trio.run(put)


def states_of(state: Path) -> dict[str, str]:
    async def load() -> dict[str, str]:
        async with open_store(state) as store:
            return {vm.vm_id: vm.state.value for vm in (await store.load()).vms}

    return trio.run(load)


def test_without_a_service_a_workspaces_vms_go_at_the_next_start(tmp_path: Path, capsys: Capture) -> None:
    state = tmp_path / "state"
    assert issue(tmp_path, "t1") == 0
    with open_registry(state) as registry:
        registry.issue_token("b")
    put_vm(state, "vm_a", "a")
    put_vm(state, "vm_b", "b")
    assert run(["revoke-workspace", "a", "--stop", "--state-dir", str(state)]) == 0
    assert states_of(state) == {"vm_a": "hibernated", "vm_b": "hibernated"}
    capsys.readouterr()
    assert run(["revoke-workspace", "a", "--destroy", "--state-dir", str(state), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["destroyed_at_next_start"] == ["vm_a"]
    assert states_of(state) == {"vm_a": "destroying", "vm_b": "hibernated"}


def test_vms_are_left_alone_while_a_service_starts_or_ends(tmp_path: Path, capsys: Capture) -> None:
    state = tmp_path / "state"
    assert issue(tmp_path, "t1") == 0
    put_vm(state, "vm_a", "a")
    with hold_lock(state / "service.lock"):
        assert run(["revoke-workspace", "a", "--destroy", "--state-dir", str(state)]) == 1
    assert "run this again" in capsys.readouterr().err
    assert states_of(state) == {"vm_a": "hibernated"}


@pytest.mark.parametrize(
    "argv", [["--ttl", "soon"], ["--ttl", "0d"], ["--profile", "none"], ["--max-vms", "0"]]
)
def test_a_wrong_token_option_is_code_2(tmp_path: Path, argv: list[str]) -> None:
    assert issue(tmp_path, "t", *argv) == 2
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("45m", 2700), ("12h", 43200), ("30d", 2592000)])
def test_durations_have_units(text: str, seconds: int) -> None:
    assert options.parse_duration(text, option="--ttl") == seconds


def test_a_malformed_variable_is_refused_without_repeating_it() -> None:
    with pytest.raises(UsageError) as caught:
        options.parse_env(["topsecret"])
    assert "topsecret" not in str(caught.value)


# ---- terminals


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_guest_text_cannot_steer_a_terminal() -> None:
    assert strip_control("a\x1b]0;t\x07b\r\x9b31mc\u202ed\te\n") == "a]0;tb31mcd\te\n"


def test_a_character_split_between_pages_arrives_whole_on_a_terminal() -> None:
    terminal = Terminal()
    output = GuestOutput(terminal)
    for byte in "é€\x1b[1m".encode():
        output.write(bytes([byte]))
    output.write(b"", final=True)
    assert terminal.getvalue() == "é€[1m"
