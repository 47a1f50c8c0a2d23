"""Commands in a real guest: streams, exit codes, signals, how many at once, stdin, and how they are ended."""

from __future__ import annotations

import base64
import hashlib
import os

import pytest

from tests.vm.live_service import Client, Machine, Service, ToolError

pytestmark = [pytest.mark.vm, pytest.mark.root]

STUBBORN = (
    "setsid setsid sh -c 'trap \"\" TERM; echo up; while :; do sleep {mark}; done' &"
    "sleep {mark}; sleep {mark}"
)
"""A job with a grandchild in a session of its own that ignores SIGTERM."""


def processes_named(vm: Machine, mark: str) -> str:
    """Command lines with `mark` in them, save the one that looks."""
    return vm.run(f"pgrep -af '[{mark[0]}]{mark[1:]}'")["stdout"].decode()


def until_nothing_is_left(vm: Machine, job_id: str) -> None:
    """Returns once the service knows that a completed job has no processes any more."""
    for _ in range(50):
        if not vm.call("vm_job_status", job_id=job_id)["background_processes"]:
            return
        vm.run("true")
    raise AssertionError(vm.status)


def test_stdout_and_stderr_stay_apart(shared_vm: Machine) -> None:
    job = shared_vm.run("echo out; echo err >&2; printf more")
    assert (job["stdout"], job["stderr"]) == (b"out\nmore", b"err\n")
    assert job["totals"] == {"stdout": 8, "stderr": 4}
    assert (job["state"], job["exit_code"], job["truncated"]) == ("completed", 0, False)


@pytest.mark.parametrize("code", [0, 1, 77, 255])
def test_the_exit_code_is_the_commands(shared_vm: Machine, code: int) -> None:
    job = shared_vm.run(f"exit {code}")
    assert (job["exit_code"], job.get("signal")) == (code, None)


def test_a_program_that_does_not_exist_or_may_not_run_gives_the_shells_codes(shared_vm: Machine) -> None:
    assert shared_vm.run("no-such-program")["exit_code"] == 127
    assert shared_vm.run("/etc/passwd")["exit_code"] == 126
    assert shared_vm.run("if then")["exit_code"] == 2


@pytest.mark.parametrize(("name", "number"), [("TERM", 15), ("KILL", 9), ("SEGV", 11), ("PIPE", 13)])
def test_a_death_by_signal_names_it_and_exits_with_128_more(
    shared_vm: Machine, name: str, number: int
) -> None:
    job = shared_vm.run(f"kill -{name} $$")
    assert (job["exit_code"], job["signal"]) == (128 + number, number)
    assert not job["timed_out"]
    assert not job["cancelled"]


def test_commands_run_as_the_unprivileged_user_in_the_workspace_in_their_own_session(
    shared_vm: Machine,
) -> None:
    facts = shared_vm.text("id -u; id -g; pwd; ps -o sid= -p $$ | tr -d ' '; echo $$; echo $HOME $USER $LANG")
    uid, gid, cwd, session, pid, names = facts.splitlines()
    assert (uid, gid, cwd) == ("1000", "1000", "/workspace")
    assert session == pid
    assert names == "/workspace agent C.UTF-8"
    assert shared_vm.run("cat /etc/shadow")["exit_code"] == 1
    assert shared_vm.run("command -v sudo")["exit_code"] == 1


def test_commands_have_no_capabilities_and_cannot_reach_the_supervisor(shared_vm: Machine) -> None:
    status = shared_vm.text("grep -E '^Cap(Prm|Eff|Amb)' /proc/self/status")
    assert [line.split()[1] for line in status.splitlines()] == ["0" * 16] * 3
    assert shared_vm.run("kill -0 1")["exit_code"] == 1
    assert shared_vm.run("echo 1 > /sys/fs/cgroup/jobs/cgroup.kill")["exit_code"] == 1
    assert shared_vm.run("for port in /dev/vport*; do : < $port && exit 9; done; true")["exit_code"] == 0


def test_cwd_is_a_directory_below_the_workspace(shared_vm: Machine) -> None:
    shared_vm.text("mkdir -p deep/er && ln -sfn /etc out && ln -sfn deep in")
    assert shared_vm.text("pwd", cwd="deep/er") == "/workspace/deep/er\n"
    assert shared_vm.text("pwd", cwd="/workspace/deep") == "/workspace/deep\n"
    assert shared_vm.text("pwd -P", cwd="in") == "/workspace/deep\n"
    for cwd in ("out", "..", "deep/../..", "/etc", "deep/none"):
        with pytest.raises(ToolError) as refused:
            shared_vm.run("pwd", cwd=cwd)
        assert refused.value.code in {"invalid_argument", "not_found"}, cwd


def test_four_commands_run_at_once_and_a_fifth_is_refused_until_one_ends(vm: Machine) -> None:
    jobs = [vm.start(f"until [ -e go{n} ]; do sleep 0.05; done; echo {n}") for n in range(4)]
    with pytest.raises(ToolError) as refused:
        vm.start("echo five")
    assert (refused.value.code, refused.value.status) == ("job_limit", 429)
    assert refused.value.retry_after is not None
    assert {job["state"] for job in vm.status["jobs"]} == {"running"}
    vm.write("go2", b"")
    assert vm.wait(jobs[2])["exit_code"] == 0
    assert vm.run("echo five")["stdout"] == b"five\n"
    for number in (0, 1, 3):
        vm.write(f"go{number}", b"")
        assert vm.wait(jobs[number])["exit_code"] == 0
        assert vm.output(jobs[number])[0] == f"{number}\n".encode()
    assert len(vm.status["jobs"]) == 5


def test_a_command_that_leaves_a_process_behind_completes_at_once_and_says_so(vm: Machine) -> None:
    job = vm.run("sh -c 'sleep 600 & echo hi'")
    assert (job["stdout"], job["exit_code"], job["state"]) == (b"hi\n", 0, "completed")
    assert job["background_processes"] == 1
    with pytest.raises(ToolError) as refused:
        vm.suspend()
    assert refused.value.code == "jobs_active"
    done = vm.call("vm_job_cancel", job_id=job["job_id"])
    assert (done["exit_code"], done["cancelled"]) == (0, False)
    until_nothing_is_left(vm, job["job_id"])
    assert processes_named(vm, "sleep 600") == ""
    assert vm.suspend()["state"] == "hibernated"


def test_a_command_without_stdin_reads_an_empty_one(shared_vm: Machine) -> None:
    job = shared_vm.run("cat; echo $?")
    assert (job["stdout"], job["exit_code"]) == (b"0\n", 0)


def test_stdin_arrives_exactly_as_text_or_bytes(shared_vm: Machine) -> None:
    assert shared_vm.run("cat", stdin="zwei\nKöpfe\n")["stdout"] == "zwei\nKöpfe\n".encode()
    data = os.urandom(2_000_000)
    job = shared_vm.run("sha256sum", stdin_base64=base64.b64encode(data).decode())
    assert job["stdout"].split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_a_command_need_not_read_its_stdin(shared_vm: Machine) -> None:
    job = shared_vm.run("exec 0<&-; echo done", stdin="x" * 300_000)
    assert (job["stdout"], job["exit_code"]) == (b"done\n", 0)


def test_a_timeout_kills_grandchildren_in_sessions_of_their_own(vm: Machine) -> None:
    job = vm.run(STUBBORN.format(mark="4242"), timeout_seconds=4)
    assert job["stdout"] == b"up\n"
    assert (job["timed_out"], job["cancelled"], job["state"]) == (True, False, "completed")
    assert job["background_processes"] == 0
    assert processes_named(vm, "sleep 4242") == ""


def test_a_cancel_kills_grandchildren_in_sessions_of_their_own(vm: Machine) -> None:
    job_id = vm.start(STUBBORN.format(mark="4343"))
    vm.wait_output(job_id, b"up")
    vm.call("vm_job_cancel", job_id=job_id)
    job = vm.wait(job_id)
    assert (job["timed_out"], job["cancelled"]) == (False, True)
    assert (job["exit_code"], job["signal"]) == (143, 15)
    assert job["background_processes"] == 0
    assert processes_named(vm, "sleep 4343") == ""


def test_a_cancelled_command_may_clean_up(vm: Machine) -> None:
    job_id = vm.start("trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.1; done")
    vm.wait_output(job_id, b"up")
    vm.call("vm_job_cancel", job_id=job_id)
    job = vm.wait(job_id)
    assert (job["cancelled"], job["exit_code"], job.get("signal")) == (True, 3, None)
    assert vm.output(job_id)[0].startswith(b"up\nbye\n")


def test_a_cancel_ends_a_command_that_was_stopped(vm: Machine) -> None:
    job_id = vm.start("echo up; kill -STOP $$; sleep 600")
    vm.wait_output(job_id, b"up")
    vm.call("vm_job_cancel", job_id=job_id)
    job = vm.wait(job_id)
    assert (job["cancelled"], job["exit_code"], job["signal"]) == (True, 137, 9)


def test_a_command_may_kill_every_process_of_its_user_without_harm(vm: Machine) -> None:
    vm.write("before", b"before")
    job = vm.run("sleep 600 & disown; kill -9 -1; sleep 0.2; echo alone")
    assert (job["stdout"], job["exit_code"]) == (b"alone\n", 0)
    assert vm.read("before") == b"before"
    vm.write("after", b"after")
    assert vm.text("cat after; pgrep -c sleep || true") == "after0\n"


def test_cancelling_a_finished_command_changes_nothing(shared_vm: Machine) -> None:
    job = shared_vm.run("exit 5")
    again = shared_vm.call("vm_job_cancel", job_id=job["job_id"])
    assert again == {name: value for name, value in job.items() if name in again}
    assert (again["exit_code"], again["cancelled"]) == (5, False)


def test_a_timeout_does_not_touch_what_a_finished_command_left_running(vm: Machine) -> None:
    job = vm.run("(until [ -e go ]; do sleep 0.1; done; echo late > late) & exit 0", timeout_seconds=2)
    assert (job["timed_out"], job["background_processes"] > 0) == (False, True)
    vm.text("sleep 3")
    vm.write("go", b"")
    until_nothing_is_left(vm, job["job_id"])
    assert vm.read("late") == b"late\n"


def test_commands_arrive_exactly_as_written(shared_vm: Machine) -> None:
    command = (
        "cat <<'END'\n$HOME `id` \\ \"quoted\" 'single'\n\ttabs and  spaces \nEND\n"
        "printf '%s|' 'a b' \"$((6*7))\" $'x\\ny' \"it's\"\n"
        "echo\ncat <<END\n$((1+1)) \\$kept\nEND\n"
        "echo 'Grüße ☃ 𝄞' # a comment"
    )
    assert shared_vm.text(command) == (
        "$HOME `id` \\ \"quoted\" 'single'\n\ttabs and  spaces \na b|42|x\ny|it's|\n2 $kept\nGrüße ☃ 𝄞\n"
    )


@pytest.mark.parametrize("size", [96 * 1024 - 1, 96 * 1024 + 1, 200_000, 1 << 20])
def test_long_commands_run_and_keep_their_stdin(shared_vm: Machine, size: int) -> None:
    head, tail = "x='", "'; echo ${#x} $(cat) $0"
    count = (size - len(head + tail)) // 2
    job = shared_vm.run(f"{head}{'ä' * count}{tail}", stdin="input")
    name = shared_vm.text("echo $0")
    assert job["stdout"].decode() == f"{count} input {name}"
    assert len(job["command"]) == 200


def test_a_command_that_is_too_long_is_refused(shared_vm: Machine) -> None:
    with pytest.raises(ToolError) as refused:
        shared_vm.run("#" * ((1 << 20) + 1))
    assert refused.value.code == "invalid_argument"


def test_environment_comes_from_the_vm_and_the_command_and_the_commands_wins(client: Client) -> None:
    vm = client.create(env={"FROM_VM": "vm", "BOTH": "vm"})
    try:
        text = vm.text('echo "$FROM_VM $BOTH $MINE"', env={"BOTH": "exec", "MINE": "a 'b' $c\nd"})
        assert text == "vm exec a 'b' $c\nd\n"
        assert vm.text('echo "$BOTH$MINE"') == "vm\n"
    finally:
        vm.destroy()


def test_the_largest_environment_fits_beside_the_largest_inline_command(shared_vm: Machine) -> None:
    env = {f"V{number:03}": "x" * 1018 for number in range(256)}
    command = "env | grep -c ^V; #" + "x" * (96 * 1024 - 30)
    assert shared_vm.text(command, env=env) == "256\n"
    with pytest.raises(ToolError) as refused:
        shared_vm.run("true", env={**env, "ONE_MORE": ""})
    assert refused.value.code == "invalid_argument"


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "LD_X", "BASH_ENV", "ENV", "IFS", "SHELLOPTS", "PS4", "A-B", ""]
)
def test_dangerous_names_are_refused_and_values_are_never_shown(
    service: Service, shared_vm: Machine, name: str
) -> None:
    for tool, arguments in (
        ("vm_exec", {"vm_id": shared_vm.vm_id, "command": "env"}),
        ("vm_create", {"memory_mib": 256}),
    ):
        with pytest.raises(ToolError) as refused:
            shared_vm.client.call(tool, **arguments, env={name: "hunter2-secret"})
        assert refused.value.code == "invalid_argument"
        assert "hunter2" not in str(refused.value)
    assert "hunter2" not in service.log


def test_secret_values_are_not_logged_nor_listed(service: Service, vm: Machine) -> None:
    assert vm.text("echo ${#TOKEN}", env={"TOKEN": "correct-horse-battery"}) == "21\n"
    assert "correct-horse" not in service.log
    assert "correct-horse" not in str(vm.status)


@pytest.mark.slow
def test_256_jobs_are_remembered_and_the_oldest_finished_is_forgotten_first(vm: Machine) -> None:
    first, second = vm.run("echo 0")["job_id"], vm.run("echo 1")["job_id"]
    for number in range(2, 257):
        vm.run(f"echo {number}")
    assert len(vm.status["jobs"]) == 256
    with pytest.raises(ToolError) as refused:
        vm.call("vm_job_status", job_id=first)
    assert refused.value.code == "not_found"
    assert vm.output(second)[0] == b"1\n"
