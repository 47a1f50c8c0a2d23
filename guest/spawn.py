"""The way in which a command comes to life: in the job's cgroup, with the job's rights, by posix_spawn.

A fork of this interpreter would cost more than everything else under emulation, hence the static launcher
(`launch.c`), which reports through a pipe what it could not do. This module starts and says how it went;
`jobs` knows what a job is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from guest.cgroups import Group
from guest.errors import OpError
from guest.loop import READ, Loop

INLINE_COMMAND_BYTES: Final = 96 * 1024
"""A longer command runs from a descriptor: Linux takes at most 128 KiB in one argument (MAX_ARG_STRLEN)."""
_COMMAND_FD: Final = 9
"""Where the launcher puts the descriptor of a long command; the command's own first words close it."""
_ASIDE_FD: Final = 4000
"""Above every descriptor of the supervisor's own (256 remembered jobs hold at most a few each)."""
_FAILURES: Final = {
    "exec": "the command and its environment are too large, or the shell is missing",
    "cgroup": "the job's cgroup could not be joined",
}


@dataclass(frozen=True, slots=True)
class Host:
    """What every launch shares.

    Attributes:
        launcher: Path of the static launcher.
        uid, gid: What commands run as; -1 keeps the supervisor's own.
        workspace_fd: The directory that every working directory lies beneath.
    """

    launcher: str
    uid: int
    gid: int
    workspace_fd: int


def bash_argv(command: bytes) -> tuple[list[bytes], int]:
    """The arguments that run `command`, and the descriptor that it needs open, -1 for none."""
    if len(command) <= INLINE_COMMAND_BYTES:
        return [b"/bin/bash", b"-c", command], -1
    fd = os.memfd_create("command", os.MFD_CLOEXEC)
    # On the command's first line, so that the line numbers of bash's messages are the caller's.
    with os.fdopen(os.dup(fd), "wb") as out:
        out.write(b"exec %d<&-;" % _COMMAND_FD)
        out.write(command)
        out.write(b"\n")
    os.lseek(fd, 0, os.SEEK_SET)
    return [b"/bin/bash", b"-c", b". /proc/self/fd/%d" % _COMMAND_FD], fd


def launch(
    loop: Loop,
    host: Host,
    group: Group,
    argv: Sequence[bytes],
    *,
    env: Mapping[bytes, bytes],
    cwd: str,
    stdio: tuple[int, int, int],
    kept_fd: int,
    on_outcome: Callable[[OpError | None], None],
) -> int:
    """Starts `argv` in `group`; `on_outcome` learns whether the command itself began.

    Args:
        loop: Watches for the launcher's report.
        host: What every launch shares.
        group: The job's cgroup.
        argv: The command, its program by absolute path.
        env: The whole environment.
        cwd: Relative to the workspace.
        stdio: Become 0, 1 and 2; all descriptors stay the caller's.
        kept_fd: One more for the command; -1 for none.
        on_outcome: Gets None, or the error for the caller.
        on_outcome: Gets None, or the error for the caller.

    Returns:
        The pid, whose exit the caller must expect whatever the outcome.

    Raises:
        OSError: when no process could be made at all.
    """
    report, report_end = os.pipe2(os.O_CLOEXEC)
    try:
        inherited = [*stdio, group.procs_fd, report_end, host.workspace_fd]
        if kept_fd >= 0:
            inherited.append(kept_fd)
        # Upwards first, so that no descriptor is overwritten before it was copied.
        actions = [(os.POSIX_SPAWN_DUP2, fd, _ASIDE_FD + index) for index, fd in enumerate(inherited)]
        actions += [(os.POSIX_SPAWN_DUP2, _ASIDE_FD + index, index) for index in range(len(inherited))]
        words = [host.launcher, str(host.uid), str(host.gid), cwd, "1" if kept_fd >= 0 else "0", "--", *argv]
        pid = os.posix_spawn(host.launcher, words, env, file_actions=actions)
    except BaseException:
        os.close(report)
        raise
    finally:
        os.close(report_end)
    _await_report(loop, report, on_outcome)
    return pid


def _await_report(loop: Loop, report: int, on_outcome: Callable[[OpError | None], None]) -> None:
    def take(_events: int) -> None:
        text = os.read(report, 256).decode("ascii", "replace")
        loop.forget(report)
        os.close(report)
        on_outcome(_error_of(text) if text else None)

    loop.watch(report, READ, take)


def _error_of(text: str) -> OpError:
    """What the launcher's report means to the caller."""
    operation, _, number = text.partition(" ")
    code = 0
    with contextlib.suppress(ValueError):
        code = int(number)
    if operation == "cwd":
        return OpError.of_errno(code, "cwd")
    return OpError(
        "invalid_argument" if operation == "exec" else "internal",
        f"{_FAILURES.get(operation, operation)} ({os.strerror(code)})",
    )
