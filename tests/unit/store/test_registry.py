"""Tokens are issued, honoured and ended as local administration says, at once and beside a live daemon."""

from __future__ import annotations

import os
import re
import stat
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from microvm.errors import HostError, MicrovmError, RequestError
from microvm.model import JOB_ID_PATTERN, VM_ID_PATTERN, Principal, Quota, WorkspaceId
from microvm.store import (
    IssuedToken,
    Registry,
    Store,
    new_job_id,
    new_vm_id,
    open_registry,
    open_store,
    token_id_of,
    write_token_file,
)
from microvm.store.database import FILE_NAME


class Clock:
    """Seconds that move when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(tmp_path: Path, clock: Clock) -> Generator[Registry, None, None]:
    with open_registry(tmp_path, clock) as opened:
        yield opened


async def test_a_token_says_who_its_bearer_is(tmp_path: Path, registry: Registry) -> None:
    async with open_store(tmp_path, Clock()) as store:
        token = registry.issue_token("alice", allow_network=True, operator=True, profile="core")
        assert store.authenticate(token.secret) == Principal(
            workspace_id=WorkspaceId("alice"),
            operator=True,
            profile="core",
            allow_network=True,
            token_id=token.token_id,
        )


@pytest.mark.parametrize(
    "presented",
    ["", "mvm_", "mvm_" + "a" * 56, "mvm_" + "a" * 55, "x" * 100_000, "mvm_\ud800", "mvm_" + "a" * 56 + "\n"],
)
async def test_what_is_no_token_is_nobody(tmp_path: Path, registry: Registry, presented: str) -> None:
    async with open_store(tmp_path, Clock()) as store:
        registry.issue_token("alice")
        assert store.authenticate(presented) is None


async def test_expiry_and_both_revocations_end_access_at_once(
    tmp_path: Path, registry: Registry, clock: Clock
) -> None:
    async with open_store(tmp_path, clock) as store:
        short = registry.issue_token("alice", ttl_s=10.0)
        revoked = registry.issue_token("alice")
        kept = registry.issue_token("alice")
        clock.now += 9.9
        assert _valid(store, short, revoked, kept) == [True, True, True]
        clock.now += 0.1
        assert _valid(store, short, revoked, kept) == [False, True, True]
        assert registry.revoke_token(revoked.token_id).revoked
        assert _valid(store, short, revoked, kept) == [False, False, True]
        assert registry.revoke_workspace("alice").revoked
        assert _valid(store, short, revoked, kept) == [False, False, False]
        with pytest.raises(RequestError) as caught:
            registry.issue_token("alice")
        assert caught.value.code == "forbidden"


def _valid(store: Store, *tokens: IssuedToken) -> list[bool]:
    return [store.authenticate(token.secret) is not None for token in tokens]


async def test_another_token_leaves_the_first_and_the_policy_alone(
    tmp_path: Path, registry: Registry
) -> None:
    async with open_store(tmp_path, Clock()) as store:
        first = registry.issue_token("alice", allow_network=True, quota=Quota(max_vms=3))
        second = registry.issue_token("alice", quota=Quota(max_vms=3))
        third = registry.issue_token("alice")
        assert _valid(store, first, second, third) == [True, True, True]
    workspace = registry.workspace("alice")
    assert workspace is not None
    assert (workspace.allow_network, workspace.quota) == (True, Quota(max_vms=3))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"quota": Quota(max_vms=4)}, "max_vms"),
        ({"quota": Quota(max_memory_mib=1)}, "max_memory_mib"),
        ({"quota": Quota(max_vms=3, max_storage_gib=0)}, "max_storage_gib"),
        ({"allow_network": True}, "allow_network"),
    ],
)
def test_other_values_for_an_existing_workspace_issue_nothing(
    registry: Registry, asked: dict[str, Any], named: str
) -> None:
    registry.issue_token("alice", quota=Quota(max_vms=3))
    with pytest.raises(RequestError, match=named):
        registry.issue_token("alice", **asked)
    assert len(registry.tokens("alice")) == 1


@pytest.mark.parametrize(
    "asked",
    [
        {"workspace": "-alice"},
        {"workspace": ""},
        {"workspace": "a" * 65},
        {"workspace": "a/b"},
        {"workspace": "alice\n"},
        {"workspace": "alice", "ttl_s": 0.0},
        {"workspace": "alice", "ttl_s": float("nan")},
        {"workspace": "alice", "ttl_s": float("inf")},
        {"workspace": "alice", "quota": Quota(max_vms=-1)},
        {"workspace": "alice", "quota": Quota(max_memory_mib=2**63)},
        {"workspace": "alice", "profile": "no such thing"},
    ],
)
def test_bad_requests_are_refused_and_make_no_workspace(registry: Registry, asked: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        registry.issue_token(**asked)
    assert [each.workspace_id for each in registry.workspaces()] == ["operator"]


def test_unknown_tokens_and_workspaces_are_not_found(registry: Registry) -> None:
    for attempt in (
        lambda: registry.revoke_token("tok_nothing"),
        lambda: registry.revoke_workspace("nobody"),
        lambda: registry.set_workspace("nobody", max_vms=1),
    ):
        with pytest.raises(RequestError) as caught:
            attempt()
        assert caught.value.code == "not_found"


def test_the_built_in_workspace_cannot_be_revoked(registry: Registry) -> None:
    with pytest.raises(RequestError):
        registry.revoke_workspace("operator")


def test_a_bound_can_be_set_and_taken_away(registry: Registry) -> None:
    registry.issue_token("alice", quota=Quota(max_vms=3, max_memory_mib=1024))
    registry.set_workspace("alice", max_vms=None, max_storage_gib=7)
    workspace = registry.workspace("alice")
    assert workspace is not None
    assert workspace.quota == Quota(max_vms=None, max_memory_mib=1024, max_storage_gib=7)


def test_secrets_have_their_prefix_and_their_bits_and_differ(registry: Registry) -> None:
    secrets = {registry.issue_token("alice").secret for _ in range(50)}
    assert len(secrets) == 50
    for secret in secrets:
        match = re.fullmatch(r"mvm_([a-z2-7]+)", secret)
        assert match is not None
        assert len(match[1]) * 5 >= 256


def test_the_file_holds_no_secret_and_representations_show_none(tmp_path: Path, registry: Registry) -> None:
    token = registry.issue_token("alice")
    assert token.secret not in repr(token)
    assert token_id_of(token.secret) == token.token_id
    for path in tmp_path.glob(FILE_NAME + "*"):
        assert token.secret[4:].encode() not in path.read_bytes()


def test_a_token_file_is_0600_exact_and_alone(tmp_path: Path, registry: Registry) -> None:
    directory = tmp_path / "tokens"
    directory.mkdir()
    old = os.umask(0)
    try:
        token = registry.issue_token_file(directory / "alice.token", "alice")
    finally:
        os.umask(old)
    assert os.listdir(directory) == ["alice.token"]
    assert (directory / "alice.token").read_text() == token.secret
    assert stat.S_IMODE((directory / "alice.token").stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["file", "dangling link", "directory"])
def test_an_existing_name_is_never_overwritten_and_nothing_is_issued(
    tmp_path: Path, registry: Registry, kind: str
) -> None:
    path = tmp_path / "taken"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RequestError, match="exists"):
        registry.issue_token_file(path, "alice")
    assert registry.workspace("alice") is None
    assert not (tmp_path / "elsewhere").exists()
    assert kind != "file" or path.read_text() == "precious"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".taken")]


def test_a_directory_that_cannot_be_written_is_an_error_without_the_secret(tmp_path: Path) -> None:
    secret = "mvm_" + "z" * 56
    with pytest.raises(HostError) as caught:
        write_token_file(tmp_path / "missing" / "token", secret)
    assert secret not in "".join(traceback.format_exception(caught.value))
    assert isinstance(caught.value, MicrovmError)


def test_ids_have_their_form_and_differ() -> None:
    assert VM_ID_PATTERN.fullmatch(new_vm_id())
    assert JOB_ID_PATTERN.fullmatch(new_job_id())
    assert len({new_vm_id() for _ in range(1000)}) == 1000
