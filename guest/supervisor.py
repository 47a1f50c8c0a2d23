"""The supervisor: what the host may ask of a guest, and what the guest tells the host.

    booting ──configure, thaw──► running ──freeze──► frozen ──HELLO, configure, thaw──► running

One loop, one thread. Nothing of a user's runs before the clock, entropy and identity are set: a thaw is
refused until a configure has succeeded since the start or the last freeze. Run as PID 1 of a guest, or with
`--transport-fd` as an ordinary process (see `main`). The pieces: `channel`, `jobs`, `files`, `platform`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from guest import PROTOCOL, VERSION
from guest.cgroups import Tree
from guest.channel import Channel, Stream, encode_json
from guest.clock import RunClock
from guest.errors import OpError
from guest.exec_call import ExecCall
from guest.files import FilePool
from guest.growth import Growth
from guest.jobs import Job, Jobs
from guest.loop import PRIORITY, READ, Loop, Timer
from guest.output import STDERR, STDOUT
from guest.platform import GuestPlatform, HostPlatform, Platform, find_port, is_identity, memory_facts
from guest.spawn import Host

INLINE_BYTES: Final = 16384
"""Output that a job's end carries with it, per stream: one page of the service's."""
_FREEZE_DEADLINE_S: Final = 5.0
"""A process in an uninterruptible sleep cannot be frozen; the suspension is refused rather than late."""
_NOTICES_IN_FLIGHT: Final = 4
_MIN_ENTROPY_BYTES: Final = 32
_PORT: Final = "microvm.agent"


class Supervisor:
    """Answers the host's calls.

    Args:
        fd: The transport, non-blocking.
        on_end: Called when the transport has ended for good.
    """

    def __init__(
        self,
        loop: Loop,
        fd: int,
        platform: Platform,
        tree: Tree,
        host: Host,
        *,
        spool: str,
        env: dict[bytes, bytes],
        on_end: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._platform = platform
        self._tree = tree
        self._generation = 0
        self._booting = True
        self._configured = False
        self._notices: deque[tuple[str, Job]] = deque()
        self._notices_in_flight = 0
        self.clock = RunClock(loop)
        self.jobs = Jobs(
            loop,
            self.clock,
            tree,
            host,
            spool=spool,
            env=env,
            on_completed=lambda job: self._notify("job_ended", job),
            on_emptied=lambda job: self._notify("job_changed", job),
        )
        self._growth = Growth(loop, self._tell_growth)
        self._workspace_fd = host.workspace_fd
        self.files = FilePool(loop, uid=host.uid, gid=host.gid, workspace_fd=host.workspace_fd)
        self.files.prepare()
        self._end_freeze: Callable[[], None] = _nothing
        self._channel = Channel(loop, fd, on_hello=self._hello, on_open=self._open, on_eof=on_end)
        self._ops: dict[str, Callable[[Stream, dict[str, Any]], None]] = {
            "configure": self._configure,
            "thaw": self._thaw,
            "freeze": self._freeze,
            "sync": lambda stream, args: self.files.run(stream, "sync", args),
            "noop": self._noop,
            "exec": self._exec,
            "job_status": self._job_status,
            "job_list": self._job_list,
            "job_cancel": self._job_cancel,
            "job_output": self._job_output,
            "read_file": self._file("read_file"),
            "write_file": self._file("write_file"),
            "read_archive": self._file("read_archive"),
            "write_archive": self._file("write_archive"),
            "stat": self._stat,
            "poweroff": self._poweroff,
        }

    def _hello(self, hello: dict[str, Any]) -> dict[str, Any]:
        generation = hello.get("generation")
        if isinstance(generation, int):
            self._generation = generation
        self._notices_in_flight = 0
        self._loop.soon(self._send_notices)
        self._end_freeze()  # its stream is gone, and its deadline must not thaw what a later freeze froze
        frozen = self.clock.frozen and self._tree.jobs_frozen()
        state = "booting" if self._booting else "frozen" if frozen else "running"
        return {
            "protocol": PROTOCOL,
            "version": VERSION,
            "generation": self._generation,
            "nonce": hello.get("nonce"),
            "state": state,
            "python": ".".join(map(str, sys.version_info[:3])),
        }

    def _open(self, stream: Stream, op: str, args: dict[str, Any]) -> None:
        handler = self._ops.get(op)
        try:
            if handler is None:
                raise OpError("invalid_argument", f"this supervisor has no operation {op[:64]!r}")
            handler(stream, args)
        except OpError as error:
            stream.fail(error)
        except OSError as error:
            stream.fail(OpError.of_errno(error.errno or 0, op))

    # ---- Time and identity

    def _configure(self, stream: Stream, args: dict[str, Any]) -> None:
        if not self.clock.frozen:
            raise OpError("invalid_state", "the guest runs; freeze it first")
        self._configured = False
        realtime_ns = args.get("realtime_ns")
        if isinstance(realtime_ns, bool) or not isinstance(realtime_ns, int) or not 0 < realtime_ns < 1 << 63:
            raise OpError("invalid_argument", "realtime_ns: nanoseconds since the epoch")
        try:
            entropy = bytes.fromhex(args.get("entropy_hex") or "")
        except (TypeError, ValueError) as error:
            raise OpError("invalid_argument", "entropy_hex: hexadecimal digits") from error
        if not _MIN_ENTROPY_BYTES <= len(entropy) <= 1024:
            raise OpError("invalid_argument", f"entropy_hex: {_MIN_ENTROPY_BYTES} to 1024 bytes")
        identity = self._identity_of(args.get("identity"))
        if args.get("network") is not None:
            raise OpError("invalid_argument", "network: this supervisor has none to configure")
        clock_set_ns = self._platform.set_realtime(realtime_ns)
        self._platform.add_entropy(entropy)
        if identity is not None:
            self._platform.become(*identity)
        self._configured = True
        stream.answer({"clock_set_ns": clock_set_ns})

    @staticmethod
    def _identity_of(value: Any) -> tuple[str, str] | None:
        """Machine id and host name; None where the guest stays who it is."""
        if value is None:
            return None
        try:
            machine_id, hostname = value["machine_id"], value["hostname"]
        except (KeyError, TypeError) as error:
            raise OpError("invalid_argument", "identity: machine_id and hostname") from error
        if not is_identity(machine_id, hostname):
            raise OpError("invalid_argument", "identity: 32 hexadecimal digits, and a host name")
        return machine_id, hostname

    def _thaw(self, stream: Stream, _args: dict[str, Any]) -> None:
        if self.clock.frozen:
            if not self._configured:
                raise OpError("invalid_state", "configure comes before thaw")
            self.clock.thaw()
            try:
                self._tree.set_frozen(False)
            except OSError:
                self.clock.freeze()
                raise
            self._booting = False
        stream.answer({})

    def _freeze(self, stream: Stream, _args: dict[str, Any]) -> None:
        self.clock.freeze()
        self._configured = False
        events = self._tree.open_jobs_events()
        timer: Timer | None = None

        def finish() -> None:
            self._end_freeze = _nothing
            self._loop.forget(events)
            os.close(events)
            if timer is not None:
                timer.cancel()

        def look(_events: int) -> None:
            os.pread(events, 4096, 0)
            if self._tree.jobs_frozen():
                finish()
                stream.close_last({"jobs": sum(not job.completed for job in self.jobs)})

        def give_up() -> None:
            finish()
            self._tree.set_frozen(False)
            self.clock.thaw()
            stream.fail(OpError("internal", "a process of a job cannot be frozen now; try again"))

        self._end_freeze()
        self._end_freeze = finish
        self._tree.set_frozen(True)
        self._loop.watch(events, PRIORITY, look)
        if self._tree.jobs_frozen():
            look(0)
        else:
            timer = self._loop.after(_FREEZE_DEADLINE_S, give_up)

    def _noop(self, stream: Stream, _args: dict[str, Any]) -> None:
        self.jobs.run_noop(lambda error: stream.fail(error) if error else stream.answer({}))

    # ---- Jobs

    def _exec(self, stream: Stream, args: dict[str, Any]) -> None:
        self._require_running()
        self._open_workspace()
        ExecCall(stream, args, self.jobs)

    def _open_workspace(self) -> None:
        """Lets the user back into its workspace: after a `chmod 000` no command could mend that any more."""
        mode = os.fstat(self._workspace_fd).st_mode & 0o7777
        if mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{self._workspace_fd}", mode | 0o700)

    def _require_running(self) -> None:
        if self.clock.frozen:
            raise OpError("invalid_state", "the guest is frozen")

    def _summary(self, job: Job) -> dict[str, Any]:
        self.jobs.count_background(job)
        return job.summary(self.clock)

    def _job_status(self, stream: Stream, args: dict[str, Any]) -> None:
        stream.answer(self._summary(self.jobs.get(args.get("job_id"))))

    def _job_list(self, stream: Stream, _args: dict[str, Any]) -> None:
        """256 summaries are more than a frame: they are the body, a JSON array."""
        summaries = [self._summary(job) for job in self.jobs if job.launched]
        stream.answer({"count": len(summaries)}, encode_json(summaries))

    def _job_cancel(self, stream: Stream, args: dict[str, Any]) -> None:
        job = self.jobs.get(args.get("job_id"))
        self._require_running()
        self.jobs.cancel(job)
        stream.answer(self._summary(job))

    def _job_output(self, stream: Stream, args: dict[str, Any]) -> None:
        job = self.jobs.get(args.get("job_id"))
        which = {"stdout": STDOUT, "stderr": STDERR}.get(str(args.get("stream")))
        offset, length = args.get("offset"), args.get("length")
        if which is None or not isinstance(offset, int) or not isinstance(length, int):
            raise OpError("invalid_argument", "job_output takes stream, offset and length")
        if offset < 0 or length < 0:
            raise OpError("invalid_argument", "offset and length: numbers from 0")
        if args.get("follow") is True:
            self._growth.follow(job)
        summary = self._summary(job)  # what is kept now: the body ends there, however the job goes on
        end = min(offset + length, job.capture.kept[which])
        at = offset

        def source(limit: int) -> bytes | None:
            nonlocal at
            if at >= end:
                return None
            data = job.capture.read(which, at, min(limit, end - at))
            at = at + len(data) if data else end
            return data or None

        stream.answer(summary, source)

    def _tell_growth(self, job: Job) -> Stream | None:
        return self._channel.open_stream("job_grew", self._summary(job), b"")

    def _notify(self, op: str, job: Job) -> None:
        self._notices.append((op, job))
        self._loop.soon(self._send_notices)  # behind the answer of an exec that ended at once

    def _send_notices(self) -> None:
        """Tells the host of jobs that ended; what a suspension cuts is told again after the next HELLO."""
        while self._notices and self._notices_in_flight < _NOTICES_IN_FLIGHT and not self._channel.silent:
            notice = self._notices.popleft()
            op, job = notice
            args = self._summary(job)
            body = b""
            if op == "job_ended":
                args["inline"] = max(job.capture.kept) <= INLINE_BYTES
                if args["inline"]:
                    body = job.capture.read(STDOUT, 0, INLINE_BYTES) + job.capture.read(
                        STDERR, 0, INLINE_BYTES
                    )
            stream = self._channel.open_stream(op, args, body)
            if stream is None:
                self._notices.appendleft(notice)
                return
            self._notices_in_flight += 1
            stream.on_closed = self._notice_taken
            stream.on_abandoned = self._notice_lost(notice)

    def _notice_taken(self, _answer: dict[str, Any]) -> None:
        self._notices_in_flight -= 1
        self._send_notices()

    def _notice_lost(self, notice: tuple[str, Job]) -> Callable[[], None]:
        def lost() -> None:
            self._notices.appendleft(notice)
            self._notices_in_flight -= 1

        return lost

    # ---- Files and the machine

    def _file(self, op: str) -> Callable[[Stream, dict[str, Any]], None]:
        def run(stream: Stream, args: dict[str, Any]) -> None:
            self._require_running()
            self._open_workspace()
            self.files.run(stream, op, args)

        return run

    def _stat(self, stream: Stream, _args: dict[str, Any]) -> None:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
        running = sum(not job.completed for job in self.jobs)
        stream.answer(
            {
                "memory": memory_facts(),
                "jobs": {"running": running, "remembered": sum(1 for _ in self.jobs)},
                "supervisor_rss_kib": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
                "realtime_ns": time.time_ns(),
            }
        )

    def _poweroff(self, stream: Stream, _args: dict[str, Any]) -> None:
        """Nothing runs after this, so that blocking in sync harms nobody."""
        self._tree.kill_jobs()
        os.sync()
        stream.answer({})
        self._channel.when_flushed(self._platform.power_off)


def _watch_children(loop: Loop, jobs: Jobs) -> None:
    """Has every dead child collected."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

    def reap(_events: int) -> None:
        ours.recv(4096)  # what does not fit is reported again
        jobs.reap()

    loop.watch(ours.fileno(), READ, reap)
    _keep_alive.append(theirs)


_keep_alive: list[object] = []
"""What must not be collected while the process lives."""


def _raise_file_limit() -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard) if hard > 0 else 8192, hard))


def _prepare_spool(path: str) -> None:
    os.makedirs(path, 0o700, exist_ok=True)
    os.chmod(path, 0o700)
    for name in os.listdir(path):  # of jobs that ended with the machine that ran them
        os.unlink(f"{path}/{name}")


def run_guest() -> None:
    """PID 1 of a virtual machine."""
    platform = GuestPlatform()
    platform.prepare()
    fd = os.open(find_port(_PORT), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    workspace_fd = os.open("/workspace", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    host = Host("/usr/lib/microvm/launch", 1000, 1000, workspace_fd)
    # A port without a listener reads as ended and comes back; the next edge says so.
    _run(fd, platform, "/sys/fs/cgroup", host, "/var/lib/microvm/spool", {}, on_end=lambda _loop: None)


def run_on_host(options: dict[str, str]) -> None:
    """An ordinary process: everything that it may touch is given."""
    fd = int(options["transport-fd"])
    os.set_inheritable(fd, False)
    os.set_blocking(fd, False)
    workspace = options["workspace"]
    workspace_fd = os.open(workspace, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    uid = int(options.get("uid", "-1"))
    host = Host(options["launcher"], uid, uid, workspace_fd)
    platform = HostPlatform()
    platform.prepare()
    env = {b"HOME": workspace.encode()}

    def end(loop: Loop) -> None:
        loop.stop()

    _run(fd, platform, options["cgroup"], host, options["spool"], env, on_end=end)


def _run(
    fd: int,
    platform: Platform,
    cgroup: str,
    host: Host,
    spool: str,
    env: dict[bytes, bytes],
    *,
    on_end: Callable[[Loop], None],
) -> None:
    _raise_file_limit()
    _prepare_spool(spool)
    tree = Tree(cgroup)
    tree.prepare(available_bytes=platform.available_bytes(), threads_max=platform.threads_max())
    loop = Loop()
    supervisor = Supervisor(loop, fd, platform, tree, host, spool=spool, env=env, on_end=lambda: on_end(loop))
    _watch_children(loop, supervisor.jobs)
    try:
        loop.run()
    finally:
        tree.kill_jobs()


def _nothing() -> None:
    """No freeze is pending."""


def main(argv: list[str]) -> None:
    """`supervisor` alone is PID 1; with `--NAME VALUE` pairs it is a process among others.

    The names: transport-fd, workspace, cgroup, spool, launcher, uid.
    """
    if not argv:
        run_guest()
        return
    names = [name.removeprefix("--") for name in argv[::2]]
    run_on_host(dict(zip(names, argv[1::2], strict=True)))


if __name__ == "__main__":
    main(sys.argv[1:])
