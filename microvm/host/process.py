"""Starts untrusted programs in their jail, and ends them: `spawn_jailed`.

Promises that the program sees a private root with only its closure and the files it was given, an empty
network namespace, no capabilities, no way to gain privileges, exactly the descriptors of its spec, and
that it dies with the daemon. Must not decide who runs what. Neighbours: `native/jail.c` does the work
between clone3 and execve, `cgroup` makes the group that the process is born in.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from microvm._native import ffi, lib
from microvm.errors import HostError

REAP_SECONDS: Final = 10.0
"""How long `aclose` waits for a killed process. A process that does not die of SIGKILL is in an
uninterruptible system call on failing storage; the daemon's own end must not wait for that."""


@dataclass(frozen=True, slots=True)
class JailSpec:
    """What to run, and all that it may have. The descriptors stay the caller's.

    Attributes:
        root_fd: Directory that becomes "/" (O_PATH is enough), bound read-only, nosuid, nodev. It must hold
            an empty directory `dev` and an empty file for each bind.
        argv: argv[0] is the path inside the jail.
        env: The whole environment.
        uid, gid: Who it runs as; never 0.
        log_fd: Becomes stdout and stderr. Stdin is /dev/null.
        cgroup_fd: cgroup v2 directory in which it is born; None: the daemon's own.
        binds: (descriptor of a regular file, path below the root such as "vm/ram"), bound writable, nosuid,
            nodev, noexec. By descriptor, so that no path of the host is looked up. The file's own mode and
            owner still decide whether `uid` may open it.
        read_only_binds: The same, bound read-only.
        fds: Become descriptors 3, 4, 5, … in this order.
        limit_nofile: RLIMIT_NOFILE, descriptors.
        limit_fsize_bytes: RLIMIT_FSIZE; the largest file that it may write.
        with_kvm: Whether the jail's /dev has kvm.
    """

    root_fd: int
    argv: Sequence[str]
    uid: int
    gid: int
    log_fd: int
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    cgroup_fd: int | None = None
    binds: tuple[tuple[int, str], ...] = ()
    read_only_binds: tuple[tuple[int, str], ...] = ()
    fds: tuple[int, ...] = ()
    limit_nofile: int = 256
    limit_fsize_bytes: int = 1 << 40
    with_kvm: bool = False


class JailedProcess:
    """A process that `spawn_jailed` started, until it is reaped.

    Ownership: whoever holds it calls `aclose`, which also closes `pidfd`.
    """

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid: Final = pid
        self.pidfd: Final = pidfd
        self._exit_status: int | None = None
        self._closed = False
        self._reaping = trio.Lock()

    @property
    def exit_status(self) -> int | None:
        """As `os.waitstatus_to_exitcode` gives it (-9: killed by SIGKILL); None until it is reaped."""
        return self._exit_status

    def kill(self) -> None:
        """Sends SIGKILL; the kernel ends everything in its PID namespace with it. Nothing if it is dead."""
        if self._closed or self._exit_status is not None:
            return
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # dead already, not reaped yet
        except OSError as error:
            raise HostError("kill", f"pid {self.pid}", error.errno or 0) from error

    async def wait(self) -> int:
        """Waits until the process is dead and reaps it.

        Returns:
            The exit status as `os.waitstatus_to_exitcode` gives it.

        Cancellation: the process goes on; any number of tasks may wait.
        """
        async with self._reaping:
            while self._exit_status is None:
                await trio.lowlevel.wait_readable(self.pidfd)
                self._reap()
        return self._exit_status

    def _reap(self) -> None:
        result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        if result is None:
            return
        killed = result.si_code != os.CLD_EXITED
        self._exit_status = -result.si_status if killed else result.si_status

    async def aclose(self) -> None:
        """Kills, reaps and closes. Always releases the descriptor, also when cancelled."""
        if self._closed:
            await trio.lowlevel.checkpoint()
            return
        try:
            self.kill()
            with trio.move_on_after(REAP_SECONDS, shield=True):
                await self.wait()
        finally:
            if not self._closed:
                self._closed = True
                trio.lowlevel.notify_closing(self.pidfd)
                os.close(self.pidfd)

    async def __aenter__(self) -> JailedProcess:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def spawn_jailed(spec: JailSpec) -> JailedProcess:
    """Starts `spec.argv` in a jail of its own; returns when execve has happened (about a millisecond).

    Must be called on the main thread: the kernel kills the process when the *thread* that cloned it ends.

    Returns:
        The process. Nothing is awaited, so the caller can enter its context at once.

    Raises:
        HostError: A step failed, named by its `operation` ("clone3", "execve", "move_mount bind", …); nothing
            is left behind.

    Source: clone(2), open_tree(2), mount_setattr(2), pivot_root(2), prctl(2) PR_SET_PDEATHSIG.
    """
    assert threading.get_native_id() == os.getpid(), "VMMs are cloned on the main thread"
    assert min(spec.uid, spec.gid) > 0, "nothing runs as root in a jail"
    alive: list[Any] = []  # cffi frees what nobody refers to
    jail = _to_native(spec, alive)
    spawned = ffi.new("struct mvm_spawned *")
    if lib.mvm_spawn_jailed(jail, spawned) != 0:
        operation = ffi.string(spawned.operation).decode("ascii")
        raise HostError(operation, spec.argv[0], spawned.error)
    return JailedProcess(spawned.pid, spawned.pidfd)


def _to_native(spec: JailSpec, alive: list[Any]) -> Any:
    def keep(cdecl: str, value: Any) -> Any:
        alive.append(ffi.new(cdecl, value))
        return alive[-1]

    def strings(values: Sequence[str]) -> Any:
        encoded = [os.fsencode(value) for value in values]
        assert not any(b"\0" in value for value in encoded)
        return keep("const char *[]", [*(keep("char[]", value) for value in encoded), ffi.NULL])

    binds = [
        {"fd": fd, "path": keep("char[]", os.fsencode(path)), "read_only": read_only}
        for read_only, given in ((0, spec.binds), (1, spec.read_only_binds))
        for fd, path in given
    ]
    return keep(
        "struct mvm_jail *",
        {
            "root_fd": spec.root_fd,
            "argv": strings(spec.argv),
            "env": strings([f"{name}={value}" for name, value in spec.env.items()]),
            "uid": spec.uid,
            "gid": spec.gid,
            "cgroup_fd": -1 if spec.cgroup_fd is None else spec.cgroup_fd,
            "binds": keep("struct mvm_bind[]", binds),
            "bind_count": len(binds),
            "fds": keep("int[]", list(spec.fds)),
            "fd_count": len(spec.fds),
            "log_fd": spec.log_fd,
            "limit_nofile": spec.limit_nofile,
            "limit_fsize_bytes": spec.limit_fsize_bytes,
            "with_kvm": spec.with_kvm,
        },
    )
