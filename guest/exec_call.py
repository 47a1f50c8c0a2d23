"""The `exec` call: collects the command and its standard input from the stream, then starts the job.

The body is the specification, `spec_bytes` of JSON, and then the standard input, which goes to an anonymous
file as it comes and never through this process's memory at once. What a job is: `jobs`.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, Final, cast

from guest.channel import Stream
from guest.errors import OpError
from guest.jobs import Job, Jobs, JobSpec

SPEC_MAX: Final = 8 << 20
"""A command of 1 MiB whose every byte is escaped, and its environment."""
COMMAND_MAX: Final = 1 << 20
STDIN_MAX: Final = 8 << 20
OUTPUT_LIMIT_MAX: Final = 16384 * 1024
_JOB_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIMEOUT_MAX_S: Final = 10 * 365 * 86400


class ExecCall:
    """One `exec`, while its body arrives."""

    def __init__(self, stream: Stream, args: dict[str, Any], jobs: Jobs) -> None:
        self._stream = stream
        self._args = args
        self._jobs = jobs
        self._spec = bytearray()
        self._stdin_fd = -1
        self._stdin_bytes = 0
        self._done = False
        spec_bytes = args.get("spec_bytes")
        if isinstance(spec_bytes, bool) or not isinstance(spec_bytes, int) or spec_bytes < 2:
            raise OpError("invalid_argument", "spec_bytes: the length of the specification")
        if spec_bytes > SPEC_MAX:
            raise OpError("payload_too_large", f"the specification is longer than {SPEC_MAX} bytes")
        self._spec_bytes = spec_bytes
        stream.on_body = self._on_body
        stream.on_abandoned = self._release

    def _on_body(self, data: bytes, end: bool) -> None:  # noqa: FBT001 - Stream.on_body's signature
        self._stream.consumed(len(data))
        if self._done:
            return
        try:
            self._take(data)
            if end:
                self._done = True
                self._start()
        except OpError as error:
            self._done = True
            self._release()
            self._stream.fail(error)

    def _take(self, data: bytes) -> None:
        missing = self._spec_bytes - len(self._spec)
        self._spec += data[:missing]
        rest = data[missing:]
        if not rest:
            return
        self._stdin_bytes += len(rest)
        if self._stdin_bytes > STDIN_MAX:
            raise OpError("payload_too_large", f"stdin is longer than {STDIN_MAX} bytes")
        try:
            if self._stdin_fd < 0:
                self._stdin_fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
            view = memoryview(rest)
            while view:
                view = view[os.write(self._stdin_fd, view) :]
        except OSError as error:
            raise OpError("internal", f"no room for stdin: {error.strerror}") from error

    def _release(self) -> None:
        if self._stdin_fd >= 0:
            os.close(self._stdin_fd)
            self._stdin_fd = -1

    def _start(self) -> None:
        if len(self._spec) < self._spec_bytes:
            raise OpError("invalid_argument", "the body is shorter than spec_bytes")
        spec = _spec_of(self._args, bytes(self._spec))
        self._spec.clear()
        if self._stdin_fd >= 0:
            os.lseek(self._stdin_fd, 0, os.SEEK_SET)
            spec.stdin_fd, self._stdin_fd = self._stdin_fd, -1
        self._jobs.start(spec, self._answer)

    def _answer(self, outcome: Job | OpError) -> None:
        if isinstance(outcome, OpError):
            self._stream.fail(outcome)
        else:
            self._stream.answer({"pid": outcome.pid, "started_at_ns": outcome.started_at_ns})


def _spec_of(args: dict[str, Any], text: bytes) -> JobSpec:
    """The call's arguments, checked."""
    try:
        spec = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OpError("invalid_argument", "the specification is not JSON") from error
    if not isinstance(spec, dict):
        raise OpError("invalid_argument", "the specification is not an object")
    fields = cast("dict[str, Any]", spec)
    job_id = args.get("job_id")
    if not isinstance(job_id, str) or not _JOB_ID.fullmatch(job_id):
        raise OpError("invalid_argument", "job_id: 1 to 64 letters, digits, _ or -")
    limit = args.get("output_limit_bytes", 256 * 1024)
    if isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit <= OUTPUT_LIMIT_MAX:
        raise OpError("invalid_argument", f"output_limit_bytes: 0 to {OUTPUT_LIMIT_MAX}")
    return JobSpec(
        job_id=job_id,
        command=_command_of(fields.get("command")),
        cwd=_cwd_of(args.get("cwd")),
        env=_env_of(fields.get("env")),
        timeout_s=_timeout_of(args.get("timeout_s")),
        output_limit_bytes=limit,
    )


def _command_of(value: object) -> bytes:
    command = _text_of(value, "command")
    if len(command) > COMMAND_MAX:
        raise OpError("payload_too_large", f"command: longer than {COMMAND_MAX} bytes")
    return command


def _text_of(value: object, name: str) -> bytes:
    if not isinstance(value, str) or "\0" in value:
        raise OpError("invalid_argument", f"{name}: a text without NUL")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise OpError("invalid_argument", f"{name}: not valid Unicode") from error


def _cwd_of(value: object) -> str:
    if value is None or value in ("", "/workspace"):
        return "."
    text = _text_of(value, "cwd").decode()
    if text.startswith("/workspace/"):
        return text[len("/workspace/") :].lstrip("/") or "."
    if text.startswith("/"):
        raise OpError("invalid_argument", "cwd: must lie below /workspace")
    return text


def _env_of(value: object) -> dict[bytes, bytes]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise OpError("invalid_argument", "env: an object of texts")
    env: dict[bytes, bytes] = {}
    for name, text in cast("dict[str, Any]", value).items():
        if not _ENV_NAME.fullmatch(name):
            raise OpError("invalid_argument", "env: a name is not one that a shell can use")
        env[name.encode()] = _text_of(text, f"env {name}")
    return env


def _timeout_of(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _TIMEOUT_MAX_S:
        raise OpError("invalid_argument", "timeout_s: a number of seconds above 0")
    return float(value)
