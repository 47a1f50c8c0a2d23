"""The error taxonomy: every failure that crosses a layer is one of these.

A `MicrovmError` carries the public code, a message that says what to do next, and optional detail that
is safe to show. Bugs are assertions and never become one of these. This module must not know HTTP or MCP
beyond the one table that maps a code to its status; its neighbours above are every other module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

STATUS_OF_CODE: Final[Mapping[str, int]] = {
    "invalid_argument": 400,
    "unauthenticated": 401,
    "forbidden": 403,
    "network_not_allowed": 403,
    "not_found": 404,
    "request_id_conflict": 409,
    "outcome_unknown": 409,
    "invalid_state": 409,
    "name_taken": 409,
    "jobs_active": 409,
    "vm_failed": 409,
    "checkpoint_mismatch": 409,
    "payload_too_large": 413,
    "quota_exceeded": 429,
    "rate_limited": 429,
    "job_limit": 429,
    "receipt_limit": 429,
    "internal": 500,
    "guest_unreachable": 502,
    "no_capacity": 503,
    "draining": 503,
    "guest_timeout": 504,
    "disk_full": 507,
}
"""Code → HTTP status; the only place where the two meet (the service's contract, §11)."""


class MicrovmError(Exception):
    """A failure with a public code.

    Args:
        code: A key of `STATUS_OF_CODE`.
        message: One or two sentences for the caller: what happened and what to do next. No secrets.
        detail: JSON-safe facts a program can act on.
        retry_after_s: Seconds after which the same call may succeed; None where waiting does not help.
    """

    def __init__(
        self,
        code: str,
        message: str,
        detail: Mapping[str, Any] | None = None,
        *,
        retry_after_s: float | None = None,
    ) -> None:
        assert code in STATUS_OF_CODE, code
        super().__init__(message)
        self.code = code
        self.message = message
        self.detail = dict(detail) if detail else None
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        """The HTTP status of this error's code."""
        return STATUS_OF_CODE[self.code]

    def to_json(self) -> dict[str, Any]:
        """The `error` object of both doors: code, message, detail when there is one."""
        body: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.detail is not None:
            body["detail"] = self.detail
        return body


class RequestError(MicrovmError):
    """The caller asked for something that cannot be done as asked (4xx); nothing was changed."""


class CapacityError(MicrovmError):
    """There is no room now (429, 503); the same call may succeed after `retry_after_s`."""

    def __init__(
        self, code: str, message: str, detail: Mapping[str, Any] | None = None, *, retry_after_s: float = 5.0
    ) -> None:
        super().__init__(code, message, detail, retry_after_s=retry_after_s)


class GuestError(MicrovmError):
    """The guest or its supervisor refused, failed, or did not answer."""


class VmmError(MicrovmError):
    """A VMM process did not do what was asked, or died.

    Args:
        message: What was being done and what came back.
        exit_status: The process's exit status as `os.waitstatus_to_exitcode` gives it; None while alive.
        console_tail: The last lines of the guest's console and the VMM's log.
    """

    def __init__(self, message: str, *, exit_status: int | None = None, console_tail: str = "") -> None:
        detail: dict[str, Any] = {}
        if exit_status is not None:
            detail["exit_status"] = exit_status
        if console_tail:
            detail["console_tail"] = console_tail
        super().__init__("vm_failed", message, detail or None)
        self.exit_status = exit_status
        self.console_tail = console_tail


class HostError(MicrovmError):
    """An operation on the host failed.

    Args:
        operation: What was tried, as a verb phrase ("reflink", "mount", "clone3").
        path: What it was tried on; empty where there is no path.
        errno_: The error number; 0 where the failure was not a system call's.
        message: What to do about it, when that is known.
    """

    def __init__(self, operation: str, path: str = "", errno_: int = 0, message: str = "") -> None:
        import errno as _errno  # names of numbers only; this module does no I/O

        name = _errno.errorcode.get(errno_, str(errno_)) if errno_ else ""
        text = " ".join(part for part in (operation, path, name) if part)
        full = _errno.errorcode.get(errno_, "") in {"ENOSPC", "EDQUOT"}
        super().__init__("disk_full" if full else "internal", f"{text}: {message}" if message else text)
        self.operation = operation
        self.path = path
        self.errno = errno_


def first_error(group: BaseExceptionGroup[MicrovmError]) -> MicrovmError:
    """The first domain error of a group: several tasks that saw one failure are one failure."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, MicrovmError)
    return error
