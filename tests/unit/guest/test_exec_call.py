"""What an exec may ask for, and what of it is refused."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from guest.errors import OpError
from guest.exec_call import COMMAND_MAX, _spec_of  # pyright: ignore[reportPrivateUsage]
from guest.spawn import INLINE_COMMAND_BYTES, bash_argv


def spec(args: dict[str, Any] | None = None, **fields: Any) -> Any:
    text = json.dumps({"command": "true", **fields}).encode()
    return _spec_of({"job_id": "job_1", **(args or {})}, text)


def test_defaults_are_the_services() -> None:
    made = spec()
    assert (made.command, made.cwd, made.env, made.timeout_s) == (b"true", ".", {}, None)
    assert made.output_limit_bytes == 256 * 1024


@pytest.mark.parametrize(
    ("cwd", "relative"),
    [
        (None, "."),
        ("", "."),
        ("/workspace", "."),
        ("/workspace/", "."),
        ("/workspace/a/b", "a/b"),
        ("a/../b", "a/../b"),
    ],
)
def test_a_cwd_is_below_the_workspace(cwd: str | None, relative: str) -> None:
    assert spec({"cwd": cwd}).cwd == relative


@pytest.mark.parametrize(
    "args",
    [
        {"cwd": "/etc"},
        {"cwd": "a\0"},
        {"cwd": 1},
        {"job_id": "../x"},
        {"job_id": ""},
        {"job_id": None},
        {"timeout_s": 0},
        {"timeout_s": True},
        {"timeout_s": "1"},
        {"timeout_s": float("inf")},
        {"output_limit_bytes": -1},
        {"output_limit_bytes": 1 << 40},
    ],
)
def test_bad_arguments_are_refused(args: dict[str, Any]) -> None:
    with pytest.raises(OpError) as caught:
        spec(args)
    assert caught.value.code == "invalid_argument"


@pytest.mark.parametrize(
    "fields",
    [
        {"command": None},
        {"command": "a\0b"},
        {"command": "\ud800"},
        {"env": []},
        {"env": {"1A": "x"}},
        {"env": {"A B": "x"}},
        {"env": {"A": 1}},
        {"env": {"A": "x\0"}},
    ],
)
def test_bad_specifications_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(OpError) as caught:
        spec(**fields)
    assert caught.value.code == "invalid_argument"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"1", b"[" * 100_000])
def test_what_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(OpError):
        _spec_of({"job_id": "j"}, text)


def test_a_command_of_a_mebibyte_is_taken_and_a_longer_one_is_not() -> None:
    assert len(spec(command="x" * COMMAND_MAX).command) == COMMAND_MAX
    with pytest.raises(OpError) as caught:
        spec(command="x" * (COMMAND_MAX + 1))
    assert caught.value.code == "payload_too_large"


def test_a_long_command_runs_from_a_descriptor() -> None:
    argv, fd = bash_argv(b"x" * INLINE_COMMAND_BYTES)
    assert (argv[1], fd) == (b"-c", -1)
    argv, fd = bash_argv(b"y" * (INLINE_COMMAND_BYTES + 1))
    try:
        assert len(argv[2]) < 100
        assert os.read(fd, 20).endswith(b"yyy")
    finally:
        os.close(fd)
