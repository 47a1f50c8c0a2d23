"""The real supervisor, as a process, driven through the host's own link: jobs, output, files, time."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from microvm.agentlink import AgentLink, GuestCall, open_link
from microvm.errors import GuestError
from microvm.model import ExecSpec, JobId
from microvm.wire.agent import JobSummary
from tests.fake import GuestProcess, open_guest

pytestmark = pytest.mark.root

LIMIT_S = 60
"""For a whole test on a busy machine; none takes more than a few seconds on an idle one."""
SUPERVISOR_RSS_KIB = 40 * 1024


class Rig:
    """A guest, its link, and what the guest told."""

    def __init__(self, guest: GuestProcess) -> None:
        self.guest = guest
        self.link: AgentLink
        self.ended: dict[str, JobSummary] = {}
        self.inline: dict[str, tuple[bytes, bytes]] = {}
        self.emptied: set[str] = set()
        self._news = trio.Event()
        self._count = 0

    async def take(self, call: GuestCall) -> dict[str, Any]:
        body = await call.read_all(most=32768)
        summary = JobSummary.parse(call.args)
        if call.op == "job_ended":
            self.ended[summary.job_id] = summary
            if call.args["inline"]:
                self.inline[summary.job_id] = (body[: summary.kept[0]], body[summary.kept[0] :])
        else:
            self.emptied.add(summary.job_id)
        self._news.set()
        self._news = trio.Event()
        return {}

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._news.wait()

    async def start(self, command: str, **spec: Any) -> JobId:
        self._count += 1
        job_id = JobId(f"job_{self._count}")
        await self.link.exec(job_id, ExecSpec(command=command, **spec))
        return job_id

    async def end(self, job_id: JobId) -> JobSummary:
        await self.until(lambda: job_id in self.ended)
        return self.ended[job_id]

    async def run(self, command: str, **spec: Any) -> tuple[JobSummary, bytes, bytes]:
        summary = await self.end(job_id := await self.start(command, **spec))
        return summary, await self.output(job_id, "stdout"), await self.output(job_id, "stderr")

    async def output(self, job_id: JobId, stream: Any) -> bytes:
        return (await self.link.job_output(job_id, stream, offset=0, length=1 << 24))[1]

    async def thaw(self) -> None:
        await self.link.configure(realtime_ns=time.time_ns(), entropy=os.urandom(32))
        await self.link.thaw()

    async def suspend(self) -> None:
        await self.link.freeze()
        await self.link.hello(2)

    def groups(self) -> list[str]:
        """The cgroups of jobs that something is in; empty ones are kept for the next jobs, a few."""
        groups = [path for path in (self.guest.group / "jobs").iterdir() if path.is_dir()]
        assert len(groups) <= 8
        return [path.name for path in groups if "populated 1" in (path / "cgroup.events").read_text()]

    def descriptors(self) -> int:
        """How many descriptors the supervisor has open."""
        return len(os.listdir(f"/proc/{self.guest.process.pid}/fd"))

    def processes(self, words: bytes) -> list[int]:
        """The guest's processes whose arguments hold `words`."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    here = str(self.guest.group.name) in (entry / "cgroup").read_text()
                    if here and words in (entry / "cmdline").read_bytes().replace(b"\0", b" "):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found


@asynccontextmanager
async def rigged(*, thawed: bool = True) -> AsyncGenerator[Rig]:
    with trio.fail_after(LIMIT_S):
        async with open_guest() as (guest, stream):
            rig = Rig(guest)
            async with open_link(stream, on_guest_stream=rig.take) as link:
                rig.link = link
                assert (await link.hello(1)).state == "booting"
                if thawed:
                    await rig.thaw()
                yield rig


async def refused(code: str, attempt: Callable[[], Any]) -> None:
    with pytest.raises(GuestError) as caught:
        await attempt()
    assert caught.value.code == code, caught.value


# ---- jobs


async def test_streams_exit_code_user_and_place() -> None:
    async with rigged() as rig:
        summary, out, err = await rig.run("echo out; echo err >&2; id -u; pwd; exit 3", env={"A": "b c"})
        assert out == f"out\n1000\n{rig.guest.workspace}\n".encode()
        assert err == b"err\n"
        assert (summary.exit_code, summary.signal, summary.state) == (3, None, "completed")
        assert (summary.totals, summary.kept) == ((len(out), 4), (len(out), 4))
        assert rig.inline[summary.job_id] == (out, err)


async def test_a_death_by_signal_is_128_plus_its_number() -> None:
    async with rigged() as rig:
        summary, _, _ = await rig.run("kill -SEGV $$")
        assert (summary.exit_code, summary.signal) == (128 + signal.SIGSEGV, signal.SIGSEGV)


async def test_the_command_begins_like_any_other() -> None:
    signals = "grep -E 'Sig(Blk|Ign)' /proc/self/status; "
    async with rigged() as rig:
        command = f"{signals} ls /proc/self/fd | wc -l; umask; ps -o sid= $$; echo $$"
        summary, out, _ = await rig.run(command)
        lines = out.decode().split("\n")
        assert "SigBlk:\t0000000000000000" in lines
        assert "SigIgn:\t0000000000000000" in lines
        assert "4" in lines, "ls has 0, 1, 2 and the directory"
        assert "0022" in lines
        assert lines[-3].strip() == lines[-2], "a session of its own"
        assert summary.exit_code == 0


async def test_text_is_passed_as_it_is() -> None:
    command = "cat <<'X'\n$HOME \"quotes\" 'single' \\back `tick` ünï €\tx\nX\nprintf '%s' \"$V\" \"$1\""
    async with rigged() as rig:
        _, out, _ = await rig.run(command, env={"V": "a\nb'\"$c"})
        assert out.decode() == "$HOME \"quotes\" 'single' \\back `tick` ünï €\tx\na\nb'\"$c"


async def test_a_command_may_begin_with_a_hyphen() -> None:
    async with rigged() as rig:
        summary, _, err = await rig.run("--help")
        assert summary.exit_code == 127
        assert b"--help: command not found" in err


async def test_a_command_of_any_length_runs_the_same() -> None:
    async with rigged() as rig:
        for size in (90_000, 200_000, 1_000_000):
            command = f"x={'y' * size}\necho ${{#x}} $0; ls -l /proc/self/fd | wc -l; read z; echo <$z>; nope"
            command = command.replace("<$z>", "'['\"$z\"']'")
            summary, out, err = await rig.run(command, stdin=b"line\n")
            lines = out.decode().split("\n")
            assert lines[0] == f"{size} /bin/bash"
            assert lines[2] == "[line]"
            assert lines[1] == "5", "no descriptor more than usual"
            assert b"line 2: nope" in err
            assert summary.exit_code == 127


async def test_stdin_is_given_or_empty() -> None:
    async with rigged() as rig:
        assert (await rig.run("cat"))[1] == b""
        data = os.urandom(700_000)
        _, out, _ = await rig.run("sha256sum", stdin=data)
        assert out.split()[0].decode() == hashlib.sha256(data).hexdigest()


async def test_random_bytes_come_back_exactly() -> None:
    data = os.urandom(200_000)
    async with rigged() as rig:
        await rig.link.write_file("data", data[:131072])
        await rig.link.write_file("data", data[131072:], offset=131072)
        summary, out, err = await rig.run("cat data; cat data >&2", output_limit_kib=1024)
        assert out == err == data
        encoded = (await rig.run("base64 -w0 data", output_limit_kib=1024))[1]
        assert base64.b64decode(encoded) == data
        assert not summary.truncated


async def test_output_is_paged_by_offset() -> None:
    text = "aé€😀".encode() * 3
    async with rigged() as rig:
        job_id = JobId((await rig.run(f"printf '%s' '{text.decode()}'"))[0].job_id)
        for size in (1, 2, 3, 1000):
            pages = b""
            while True:
                _, page = await rig.link.job_output(job_id, "stdout", offset=len(pages), length=size)
                if not page:
                    break
                pages += page
            assert pages == text


async def test_four_jobs_run_at_once_and_a_fifth_is_refused() -> None:
    async with rigged() as rig:
        jobs = [await rig.start("sleep 600") for _ in range(4)]
        await refused("job_limit", lambda: rig.start("true"))
        await rig.link.job_cancel(jobs[0])
        assert (await rig.end(jobs[0])).cancelled
        assert (await rig.run("echo room"))[1] == b"room\n"
        states = {summary.job_id: summary.state for summary in await rig.link.job_list()}
        assert [states[job_id] for job_id in jobs] == ["completed", "running", "running", "running"]


async def test_an_exec_that_is_sent_again_runs_nothing_again() -> None:
    async with rigged() as rig:
        spec = ExecSpec(command="echo once >> file")
        first = await rig.link.exec(JobId("job_same"), spec)
        await rig.until(lambda: "job_same" in rig.ended)
        assert await rig.link.exec(JobId("job_same"), spec) == first
        assert (await rig.link.read_file("file"))[1] == b"once\n"


async def test_256_jobs_are_remembered_and_the_oldest_is_forgotten() -> None:
    async with rigged() as rig:
        for _ in range(257):
            await rig.end(await rig.start("true"))
        assert len(await rig.link.job_list()) == 256
        await refused("not_found", lambda: rig.link.job_status(JobId("job_1")))
        assert (await rig.link.job_status(JobId("job_2"))).state == "completed"


async def test_a_job_ends_with_its_main_process() -> None:
    async with rigged() as rig:
        summary, out, _ = await rig.run("sleep 600 & echo hi")
        assert out == b"hi\n"
        assert summary.background_processes == 1
        assert len(rig.processes(b"sleep 600")) == 1
        assert (await rig.link.job_cancel(JobId(summary.job_id))).exit_code == 0
        await rig.until(lambda: summary.job_id in rig.emptied)
        after = await rig.link.job_status(JobId(summary.job_id))
        assert (after.background_processes, after.cancelled, after.exit_code) == (0, False, 0)
        assert not rig.processes(b"sleep 600")


async def test_what_is_left_behind_may_go_on_writing() -> None:
    async with rigged() as rig:
        command = "(for i in $(seq 5000); do echo a line that nobody keeps; done; echo done > done) & echo hi"
        summary, _, _ = await rig.run(command)
        await rig.until(lambda: summary.job_id in rig.emptied)
        assert (await rig.link.read_file("done"))[1] == b"done\n"
        assert (await rig.link.job_status(JobId(summary.job_id))).totals == summary.totals


STUBBORN = (
    "setsid sh -c 'trap \"\" TERM; setsid sleep 987 & sleep 986; sleep 985' & "
    "trap '' TERM; sleep 984; sleep 983"
)


async def test_a_timeout_kills_everything_and_says_so() -> None:
    async with rigged() as rig:
        summary, _, _ = await rig.run(STUBBORN, timeout_seconds=0.3)
        assert (summary.timed_out, summary.cancelled, summary.signal) == (True, False, 9)
        assert 2.2 < summary.run_seconds < 30
        assert not rig.processes(b"sleep 98")


async def test_a_cancel_kills_everything_and_says_so() -> None:
    async with rigged() as rig:
        job_id = await rig.start(STUBBORN)
        assert (await rig.link.job_cancel(job_id)).cancelled
        summary = await rig.end(job_id)
        assert (summary.timed_out, summary.cancelled) == (False, True)
        assert not rig.processes(b"sleep 98")


async def test_a_cancelled_job_may_end_by_itself() -> None:
    async with rigged() as rig:
        job_id = await rig.start("trap 'echo bye; exit 7' TERM; echo ready; while :; do sleep 0.01; done")
        while not (await rig.output(job_id, "stdout")):
            await trio.lowlevel.checkpoint()
        await rig.link.job_cancel(job_id)
        summary = await rig.end(job_id)
        assert (summary.exit_code, summary.cancelled) == (7, True)
        assert rig.inline[job_id][0] == b"ready\nbye\n"


async def test_endless_output_is_counted_exactly_and_cut(rounds: Callable[[int, int], int]) -> None:
    size = rounds(30_000_000, 300_000_000)
    async with rigged() as rig:
        summary, out, err = await rig.run(f"head -c {size} /dev/zero; echo e >&2")
        assert summary.totals == (size, 2)
        assert summary.truncated
        assert sum(summary.kept) == 256 * 1024
        assert out == bytes(summary.kept[0])
        assert err == b"e\n"[: summary.kept[1]]
        assert (await rig.link.stat())["supervisor_rss_kib"] < SUPERVISOR_RSS_KIB


async def test_one_line_of_20_mb_is_nothing_special() -> None:
    async with rigged() as rig:
        command = "head -c 20000000 /dev/zero | tr '\\0' x"
        summary, out, _ = await rig.run(command, output_limit_kib=16384)
        assert summary.totals == (20_000_000, 0)
        assert out == b"x" * (16384 * 1024)
        assert (await rig.link.stat())["supervisor_rss_kib"] < SUPERVISOR_RSS_KIB


@pytest.mark.parametrize(
    ("cwd", "code"),
    [
        ("none", "not_found"),
        ("..", "invalid_argument"),
        ("out", "invalid_argument"),
        ("/etc", "invalid_argument"),
    ],
)
async def test_a_cwd_that_is_not_there_starts_nothing(cwd: str, code: str) -> None:
    async with rigged() as rig:
        (rig.guest.workspace / "out").symlink_to("/etc")
        await refused(code, lambda: rig.start("true", cwd=cwd))
        assert await rig.link.job_list() == []
        while rig.groups():
            await trio.lowlevel.checkpoint()


async def test_a_cwd_below_the_workspace() -> None:
    async with rigged() as rig:
        await rig.link.write_file("a/b/f", b"")
        _, out, _ = await rig.run("pwd", cwd="/workspace/a/b")
        assert out == f"{rig.guest.workspace}/a/b\n".encode()


async def test_an_environment_that_is_too_large_is_refused() -> None:
    async with rigged() as rig:
        await refused("invalid_argument", lambda: rig.start("true", env={"A": "x" * 200_000}))


async def test_nothing_is_left_of_a_job_in_the_machine() -> None:
    async with rigged() as rig:
        for _ in range(5):
            await rig.run("sleep 0 & true; exit 1")
        while rig.groups():
            await trio.lowlevel.checkpoint()
        before = rig.descriptors()
        for _ in range(5):
            await rig.run("true")
        assert rig.descriptors() == before
        assert rig.groups() == []


async def test_a_killed_launcher_is_replaced() -> None:
    async with rigged() as rig:
        await rig.run("true")
        (launcher,) = rig.processes(b"1000 1000")
        os.kill(launcher, signal.SIGKILL)
        with contextlib.suppress(GuestError):  # the call that finds it dead
            await rig.start("true")
        assert (await rig.run("echo again"))[1] == b"again\n"
        assert rig.processes(b"1000 1000") not in ([], [launcher])


# ---- time


async def test_nothing_runs_before_the_first_thaw_and_no_thaw_before_a_configure() -> None:
    async with rigged(thawed=False) as rig:
        await refused("invalid_state", lambda: rig.start("true"))
        await refused("invalid_state", rig.link.thaw)
        await refused("invalid_argument", lambda: rig.link.configure(realtime_ns=-1, entropy=bytes(32)))
        await refused("invalid_argument", lambda: rig.link.configure(realtime_ns=1, entropy=b"few"))
        await refused("invalid_state", rig.link.thaw)
        await rig.link.noop()
        await rig.thaw()
        assert (await rig.run("echo hi"))[1] == b"hi\n"


async def test_a_freeze_stops_jobs_and_a_thaw_continues_them() -> None:
    async with rigged() as rig:
        job_id = await rig.start("while :; do echo x; sleep 0.01; done")
        while not await rig.output(job_id, "stdout"):
            await trio.lowlevel.checkpoint()
        await rig.suspend()
        frozen = await rig.link.job_status(job_id)
        assert frozen.state == "frozen"
        assert (await rig.link.job_status(job_id)).totals == frozen.totals
        await refused("invalid_state", lambda: rig.link.job_cancel(job_id))
        await refused("invalid_state", lambda: rig.link.read_file("x"))
        await rig.thaw()
        while (await rig.link.job_status(job_id)).totals == frozen.totals:
            await trio.lowlevel.checkpoint()


async def test_a_timeout_counts_run_time_only() -> None:
    async with rigged() as rig:
        job_id = await rig.start("sleep 600", timeout_seconds=1.0)
        await rig.suspend()
        before = (await rig.link.job_status(job_id)).run_seconds
        assert before < 1.0
        await trio.sleep(1.5)  # longer than the whole budget: time itself is what is tested
        assert (await rig.link.job_status(job_id)).run_seconds == before
        assert job_id not in rig.ended
        await rig.thaw()
        summary = await rig.end(job_id)
        assert summary.timed_out
        assert summary.run_seconds >= 1.0


async def test_an_end_that_a_freeze_interrupts_is_told_after_the_thaw() -> None:
    async with rigged() as rig:
        jobs = [await rig.start("echo x") for _ in range(3)]
        await rig.suspend()
        await rig.thaw()
        for job_id in jobs:
            assert (await rig.end(job_id)).exit_code == 0


async def test_many_rounds_of_freeze_and_thaw_lose_nothing() -> None:
    async with rigged() as rig:
        job_id = await rig.start("i=0; while [ $i -lt 300 ]; do i=$((i+1)); echo $i; sleep 0.002; done")
        for generation in range(2, 12):
            await rig.link.freeze()
            assert (await rig.link.hello(generation)).generation == generation
            await rig.thaw()
        await rig.end(job_id)
        assert (await rig.output(job_id, "stdout")).split() == [str(n).encode() for n in range(1, 301)]


# ---- files


@pytest.mark.parametrize("size", [0, 1, 131072])
async def test_a_file_of_any_size_comes_back(size: int) -> None:
    content = os.urandom(size)
    async with rigged() as rig:
        assert await rig.link.write_file("/workspace/a/f", content, mode="0640") == (
            size,
            hashlib.sha256(content).hexdigest(),
        )
        facts, data = await rig.link.read_file("a/f")
        assert data == content
        assert (facts.size, facts.eof, facts.mode) == (size, True, "0640")
        owner = (rig.guest.workspace / "a/f").stat()
        assert (owner.st_uid, owner.st_gid) == (1000, 1000)


async def test_files_overwrite_append_and_truncate() -> None:
    async with rigged() as rig:
        await rig.link.write_file("f", b"first content")
        await rig.link.write_file("f", b"second")
        await rig.link.write_file("f", b"+more", offset=6)
        assert (await rig.link.read_file("f"))[1] == b"second+more"
        assert (await rig.link.write_file("f", b"X", offset=2, truncate=True))[0] == 3


async def test_a_user_that_locks_itself_out_of_its_workspace_is_let_in_again() -> None:
    async with rigged() as rig:
        for _ in range(2):
            assert (await rig.run("chmod 000 ."))[0].exit_code == 0
            assert (await rig.link.write_file("f", b"x"))[0] == 1
            assert (await rig.run("chmod 000 ."))[0].exit_code == 0
            assert (await rig.run("cat f"))[1] == b"x"


async def test_the_users_rights_decide() -> None:
    async with rigged() as rig:
        (rig.guest.workspace / "roots").write_text("secret")
        (rig.guest.workspace / "roots").chmod(0o600)
        await refused("invalid_argument", lambda: rig.link.read_file("roots"))
        (rig.guest.workspace / "closed").mkdir(0o700)
        await refused("invalid_argument", lambda: rig.link.write_file("closed/f", b"x"))


async def test_what_is_no_file_below_the_workspace_is_refused() -> None:
    async with rigged() as rig:
        await rig.run(
            "mkfifo fifo; mkdir dir; ln -s /etc/passwd out; ln -s /dev/zero zero; ln -s /proc/self/root magic"
        )
        for path in (
            "fifo",
            "dir",
            "out",
            "zero",
            "magic/etc/passwd",
            "../x",
            "/etc/passwd",
            "dir/../../x",
            "",
        ):
            await refused("invalid_argument", lambda path=path: rig.link.read_file(path))
            await refused("invalid_argument", lambda path=path: rig.link.write_file(path, b"x"))
        await refused("not_found", lambda: rig.link.read_file("none"))
        await refused("not_found", lambda: rig.link.write_file("no/parent", b"", make_parents=False))


async def test_many_file_calls_at_once_are_all_answered() -> None:
    async with rigged() as rig:
        contents = {f"f{number}": os.urandom(50_000 + number) for number in range(40)}

        async def there_and_back(name: str) -> None:
            await rig.link.write_file(name, contents[name])
            assert (await rig.link.read_file(name))[1] == contents[name]

        async with trio.open_nursery() as nursery:
            for name in contents:
                nursery.start_soon(there_and_back, name)


async def test_a_killed_file_worker_is_replaced() -> None:
    async with rigged() as rig:
        await rig.link.write_file("f", b"x")
        await rig.run("kill -9 -1 || true")
        with contextlib.suppress(GuestError):  # the call that finds it dead
            await rig.link.write_file("f", b"y")
        await rig.link.write_file("f", b"y")
        assert (await rig.link.read_file("f"))[1] == b"y"


async def test_an_abandoned_write_leaves_the_old_file_and_no_scratch() -> None:
    async with rigged() as rig:
        await rig.link.write_file("f", b"old")

        async def endless() -> AsyncGenerator[bytes]:
            while True:
                yield bytes(16384)

        args = {"path": "f", "offset": None, "mode": "0644", "make_parents": False, "truncate": False}
        await refused("guest_timeout", lambda: rig.link.call("write_file", args, endless(), timeout_s=0.3))
        assert (await rig.link.read_file("f"))[1] == b"old"
        while [path.name for path in rig.guest.workspace.iterdir()] != ["f"]:
            await trio.lowlevel.checkpoint()


async def test_a_large_file_streams_both_ways() -> None:
    content = os.urandom(1 << 20) * 4
    async with rigged() as rig:
        await rig.link.call(
            "write_file",
            {"path": "big", "offset": None, "mode": None, "make_parents": False, "truncate": False},
            content,
            timeout_s=LIMIT_S,
        )
        reply = await rig.link.call(
            "read_file",
            {"path": "big", "offset": 0, "length": len(content)},
            timeout_s=LIMIT_S,
            max_body_bytes=len(content),
        )
        assert reply.body == content
        assert (await rig.link.stat())["supervisor_rss_kib"] < SUPERVISOR_RSS_KIB


async def test_unknown_operations_and_bad_arguments_are_errors() -> None:
    async with rigged() as rig:
        await refused("invalid_argument", lambda: rig.link.call("no_such", {}, timeout_s=5))
        await refused("invalid_argument", lambda: rig.link.call("exec", {}, timeout_s=5))
        await refused("not_found", lambda: rig.link.job_cancel(JobId("job_none")))
        args = {"job_id": "job_short", "spec_bytes": 100}
        await refused("invalid_argument", lambda: rig.link.call("exec", args, b"{}", timeout_s=5))


async def test_power_off_ends_the_guest_and_the_channel() -> None:
    async with rigged() as rig:
        await rig.start("sleep 600")
        await rig.link.sync()
        await rig.link.poweroff()
        await rig.link.drain_to_eof()
        assert rig.guest.process.wait() == 0


async def test_a_job_after_a_kill_runs_like_any_other() -> None:
    async with rigged() as rig:
        for _ in range(6):
            job_id = await rig.start("trap '' TERM; sleep 600; sleep 600", timeout_seconds=0.05)
            assert (await rig.end(job_id)).signal == signal.SIGKILL
            assert (await rig.run("echo fine"))[1] == b"fine\n"


async def test_a_command_that_is_killed_before_it_begins_is_an_error() -> None:
    async with rigged() as rig:
        await rig.run("true")
        (group,) = [path for path in (rig.guest.group / "jobs").iterdir() if path.is_dir()]
        (group / "cgroup.freeze").write_text("1")  # what is born into it stands still

        async def kill() -> None:
            while not (pids := (group / "cgroup.procs").read_text().split()):
                await trio.lowlevel.checkpoint()
            os.kill(int(pids[0]), signal.SIGKILL)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            await refused("internal", lambda: rig.start("true"))
        assert len(await rig.link.job_list()) == 1
