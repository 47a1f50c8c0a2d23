"""`microvm vm`: what each command sends, prints and exits with."""

from __future__ import annotations

import base64
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import SECRET, Answer, Service

Capture = pytest.CaptureFixture[str]
BinaryCapture = pytest.CaptureFixture[bytes]

VM = {"vm_id": "vm_a", "state": "running", "memory_mib": 1024, "vcpus": 1, "vmm": {"kind": "qemu"}}


class Job:
    """A job with output that pages as the service's do."""

    def __init__(self, stdout: bytes = b"", stderr: bytes = b"", *, page: int = 16384, **end: Any) -> None:
        self.kept = {"stdout": stdout, "stderr": stderr}
        self.page = page
        self.end: dict[str, Any] = {
            "state": "completed",
            "exit_code": 0,
            "timed_out": False,
            "truncated": False,
            "totals": {name: len(data) for name, data in self.kept.items()},
            **end,
        }

    def output(self, arguments: dict[str, Any]) -> Answer:
        cursor: dict[str, int] = arguments["cursor"]
        slices = {name: data[cursor[name] :][: self.page] for name, data in self.kept.items()}
        following = {name: cursor[name] + len(data) for name, data in slices.items()}
        encoded = {f"{name}_base64": base64.b64encode(data).decode() for name, data in slices.items()}
        return 200, {"job_id": "job_a", "encoding": "base64", **encoded, "next_cursor": following, **self.end}


def use(service: Service, job: Job) -> None:
    service.answers["vm_exec"] = {"job_id": "job_a", "state": "running"}
    service.answers["vm_job_output"] = job.output
    service.answers["vm_job_status"] = {"job_id": "job_a", **job.end}


def test_create_sends_what_was_given_and_a_request_id_of_its_own(service: Service, capsys: Capture) -> None:
    service.answers["vm_create"] = VM
    assert (
        service.run("create", "--memory-mib", "256", "--env", "A=b=c", "--idle-seconds", "0", "--json") == 0
    )
    [(tool, arguments)] = service.calls
    request_id: str = arguments.pop("request_id")
    assert request_id.startswith("cli-")
    assert (tool, arguments) == (
        "vm_create",
        {"memory_mib": 256, "env": {"A": "b=c"}, "idle_seconds": 0},
    )
    assert json.loads(capsys.readouterr().out) == VM
    assert service.authorizations == {f"Bearer {SECRET}"}


def test_a_request_id_can_be_chosen(service: Service) -> None:
    service.answers["vm_create"] = VM
    assert service.run("create", "--request-id", "mine") == 0
    assert service.calls == [("vm_create", {"request_id": "mine"})]


def test_list_off_a_terminal_is_tab_separated_under_headings(service: Service, capsys: Capture) -> None:
    service.answers["vm_list"] = {"vms": [{**VM, "description": "a\tb\nc\x1b[31m"}]}
    assert service.run("list") == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split("\t")[:2] == ["vm_id", "state"]
    assert row.split("\t")[0] == "vm_a"
    assert row.split("\t")[-1] == "a b c[31m"


def test_status_shows_the_vm_and_its_jobs(service: Service, capsys: Capture) -> None:
    job = {"job_id": "job_a", "state": "completed", "exit_code": 3, "command": "false"}
    service.answers["vm_status"] = {**VM, "jobs": [job]}
    assert service.run("status", "vm_a") == 0
    shown = capsys.readouterr().out
    assert "vmm.kind" in shown
    assert "job_a\tcompleted\t3" in shown


def test_exec_copies_both_streams_exactly_and_exits_as_the_command_did(
    service: Service, capfdbinary: BinaryCapture
) -> None:
    stdout, stderr = bytes(range(256)) * 300, b"\xff\x00err"
    use(service, Job(stdout, stderr, exit_code=7))
    assert service.run("exec", "vm_a", "--", "sh", "-c", "exit 7") == 7
    assert capfdbinary.readouterr() == (stdout, stderr)
    assert service.calls[0][1]["command"] == "sh -c 'exit 7'"


def test_exec_takes_one_word_as_a_script(service: Service) -> None:
    use(service, Job())
    assert service.run("exec", "vm_a", "echo $HOME; exit 0") == 0
    assert service.calls[0][1]["command"] == "echo $HOME; exit 0"


def test_exec_passes_options_of_the_command_on(service: Service) -> None:
    use(service, Job())
    assert service.run("exec", "--cwd", "src", "vm_a", "ls", "--json", "-l") == 0
    assert service.calls[0][1]["command"] == "ls --json -l"
    assert service.calls[0][1]["cwd"] == "src"


def test_exec_takes_no_options_of_its_own_for_a_command(service: Service, capsys: Capture) -> None:
    assert service.run("exec", "vm_a", "--timeout", "1", "sleep 9") == 2
    assert "--timeout" in capsys.readouterr().err
    assert service.calls == []


def test_exec_runs_a_command_that_begins_with_a_hyphen_after_two(service: Service) -> None:
    use(service, Job())
    assert service.run("exec", "vm_a", "--", "-odd", "x") == 0
    assert service.calls[0][1]["command"] == "-odd x"


def test_exec_asks_for_no_more_pages_than_there_are(service: Service) -> None:
    use(service, Job(b"hi\n"))
    service.run("exec", "vm_a", "echo hi")
    assert [tool for tool, _ in service.calls] == ["vm_exec", "vm_job_output"]


def test_exec_says_that_output_was_dropped(service: Service, capsys: Capture) -> None:
    use(service, Job(b"abc", truncated=True, totals={"stdout": 900, "stderr": 0}))
    assert service.run("exec", "vm_a", "yes") == 0
    assert "kept 3 of 900 bytes" in capsys.readouterr().err


def test_exec_of_a_lost_job_fails(service: Service, capsys: Capture) -> None:
    use(service, Job(state="lost", exit_code=None))
    assert service.run("exec", "vm_a", "sleep 9") == 1
    assert "lost" in capsys.readouterr().err


def test_exec_with_json_prints_one_object_with_the_output(service: Service, capsys: Capture) -> None:
    use(service, Job("ä\n".encode(), b"e", exit_code=2))
    assert service.run("exec", "--json", "vm_a", "x") == 2
    printed = json.loads(capsys.readouterr().out)
    assert (printed["stdout"], printed["stderr"], printed["exit_code"]) == ("ä\n", "e", 2)


def test_a_detached_exec_returns_the_job(service: Service, capsys: Capture) -> None:
    use(service, Job())
    assert service.run("exec", "-d", "--json", "vm_a", "x") == 0
    assert json.loads(capsys.readouterr().out)["job_id"] == "job_a"
    assert [tool for tool, _ in service.calls] == ["vm_exec"]


def test_an_interrupt_cancels_the_job(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    use(service, Job())

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("microvm.cli.execute.copy_output", interrupt)
    assert service.run("exec", "vm_a", "sleep 9") == 130
    assert service.calls[-1] == ("vm_job_cancel", {"vm_id": "vm_a", "job_id": "job_a"})


def test_output_without_follow_stops_at_what_there_is(service: Service, capfdbinary: BinaryCapture) -> None:
    use(service, Job(b"abcdef", page=4, state="running", exit_code=None))
    assert service.run("output", "vm_a", "job_a", "--stdout-cursor", "1") == 0
    assert capfdbinary.readouterr().out == b"bcdef"


def test_output_with_json_is_one_page_of_the_tool(service: Service) -> None:
    use(service, Job(b"abc"))
    assert service.run("output", "vm_a", "job_a", "--json", "--max-bytes", "2", "--encoding", "utf-8") == 0
    assert service.calls[0][1] == {
        "vm_id": "vm_a",
        "job_id": "job_a",
        "cursor": {"stdout": 0, "stderr": 0},
        "encoding": "utf-8",
        "max_bytes": 2,
    }


def test_files_larger_than_a_call_travel_both_ways(
    service: Service, tmp_path: Path, capfdbinary: BinaryCapture
) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 1500)
    assert service.run("write", "vm_a", "/workspace/a b", str(source), "--mode", "0600") == 0
    assert service.raw["/v1/vms/vm_a/files/a%20b?mode=0600"] == source.read_bytes()
    service.raw["/v1/vms/vm_a/files/a%20b"] = source.read_bytes()
    capfdbinary.readouterr()
    assert service.run("read", "vm_a", "a b") == 0
    assert capfdbinary.readouterr().out == source.read_bytes()
    target = str(tmp_path / "t")
    assert service.run("read", "vm_a", "a b", "--offset", "10", "--length", "200000", "-o", target) == 0
    assert (tmp_path / "t").read_bytes() == source.read_bytes()[10:200010]
    assert service.run("read", "vm_a", "a b", "--offset", "999999", "-o", target) == 0
    assert (tmp_path / "t").read_bytes() == b""


def test_a_small_file_is_one_call_of_the_tool(service: Service, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * 131072)
    assert service.run("write", "vm_a", "f", str(source)) == 0
    [(tool, arguments)] = service.calls
    assert (tool, base64.b64decode(arguments["content_base64"])) == ("vm_write_file", source.read_bytes())


def test_a_large_write_at_an_offset_goes_on_call_by_call(service: Service, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * 200_000)
    assert service.run("write", "vm_a", "f", str(source), "--offset", "5") == 0
    assert [arguments["offset"] for _, arguments in service.calls] == [5, 131077]


def test_a_failed_read_leaves_the_local_file_alone(service: Service, tmp_path: Path) -> None:
    target = tmp_path / "t"
    target.write_bytes(b"old")
    assert service.run("read", "vm_a", "x", "-o", str(target)) == 1
    assert service.run("pull", "vm_a", "x", str(target)) == 1
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


def test_a_path_outside_the_workspace_is_refused_here(service: Service, tmp_path: Path) -> None:
    assert service.run("pull", "vm_a", "/etc/passwd", str(tmp_path / "t")) == 1
    assert service.ranges == []


def test_a_pushed_file_keeps_its_mode_and_a_pulled_one_too(service: Service, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"#!/bin/sh")
    source.chmod(0o750)
    assert service.run("push", "vm_a", str(source), "bin/run") == 0
    assert service.raw["/v1/vms/vm_a/files/bin/run?mode=0750"] == b"#!/bin/sh"
    service.raw["/v1/vms/vm_a/files/bin/run"] = b"#!/bin/sh"
    assert service.run("pull", "vm_a", "bin/run", str(tmp_path)) == 0
    assert (tmp_path / "run").read_bytes() == b"#!/bin/sh"
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o755


def test_a_cut_download_goes_on_where_it_ended(service: Service, tmp_path: Path) -> None:
    content = bytes(range(256)) * 4000
    service.raw["/v1/vms/vm_a/files/f"] = content
    service.cuts += [300_000, 1, 500_000]
    assert service.run("pull", "vm_a", "f", str(tmp_path / "f")) == 0
    assert (tmp_path / "f").read_bytes() == content
    assert service.ranges == [None, "bytes=300000-", "bytes=300001-", "bytes=800001-"]


def test_a_download_that_brings_nothing_is_given_up(service: Service, tmp_path: Path) -> None:
    service.raw["/v1/vms/vm_a/files/f"] = b"x" * 1000
    service.cuts += [10, 0, 0, 0, 0]
    assert service.run("pull", "vm_a", "f", str(tmp_path / "f")) == 1
    assert list(tmp_path.glob("*f*")) == []


def tree_of(folder: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_directories_travel_as_archives(service: Service, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / "f").write_bytes(os.urandom(100_000))
    (source / "link").symlink_to("deep/er/f")
    assert service.run("push", "vm_a", "-r", str(source), "there") == 0
    service.raw["/v1/vms/vm_a/archive/there"] = service.raw["/v1/vms/vm_a/archive/there"]
    assert service.run("pull", "vm_a", "-r", "there", str(tmp_path / "back")) == 0
    assert tree_of(tmp_path / "back") == tree_of(source)
    assert service.run("pull", "vm_a", "-r", "there", str(tmp_path / "back")) == 2
    assert service.run("push", "vm_a", str(source), "there") == 2


def evil(name: str, **facts: Any) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo(name)
        for key, value in facts.items():
            setattr(member, key, value)
        archive.addfile(member)
    return packed.getvalue()


@pytest.mark.parametrize(
    "archive",
    [
        evil("../outside"),
        evil("link", type=tarfile.SYMTYPE, linkname="/etc"),
        evil("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
        b"no archive at all" * 100,
    ],
)
def test_a_guests_archive_does_nothing_outside_its_directory(
    service: Service, tmp_path: Path, archive: bytes
) -> None:
    service.raw["/v1/vms/vm_a/archive/d"] = archive
    (tmp_path / "in").mkdir()
    assert service.run("pull", "vm_a", "-r", "d", str(tmp_path / "in" / "d")) == 1
    assert list((tmp_path / "in").iterdir()) == []
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize(
    ("argv", "tool", "arguments"),
    [
        (["suspend", "vm_a"], "vm_suspend", {"vm_id": "vm_a"}),
        (
            ["suspend", "vm_a", "--mode", "pause", "--force"],
            "vm_suspend",
            {"vm_id": "vm_a", "mode": "pause", "force": True},
        ),
        (["resume", "vm_a"], "vm_resume", {"vm_id": "vm_a"}),
        (
            ["resume", "vm_a", "--cold-boot", "--discard-memory"],
            "vm_resume",
            {"vm_id": "vm_a", "cold_boot": True, "discard_memory": True},
        ),
        (["destroy", "vm_a"], "vm_destroy", {"vm_id": "vm_a"}),
        (["cancel", "vm_a", "job_a"], "vm_job_cancel", {"vm_id": "vm_a", "job_id": "job_a"}),
        (
            ["job-status", "vm_a", "job_a", "--wait", "2.5"],
            "vm_job_status",
            {"vm_id": "vm_a", "job_id": "job_a", "wait_seconds": 2.5},
        ),
    ],
)
def test_a_command_is_one_call_of_its_tool(
    service: Service, argv: list[str], tool: str, arguments: dict[str, Any]
) -> None:
    assert service.run(*argv) == 0
    assert service.calls == [(tool, arguments)]


def test_the_services_error_is_a_sentence_for_people(service: Service, capsys: Capture) -> None:
    service.answers["vm_status"] = refuse
    assert service.run("status", "vm_a") == 1
    assert capsys.readouterr() == ("", "microvm: there is no such VM [not_found]\n")


def test_the_services_error_is_an_object_for_programs(service: Service, capsys: Capture) -> None:
    service.answers["vm_status"] = refuse
    assert service.run("status", "vm_a", "--json") == 1
    assert json.loads(capsys.readouterr().out) == {
        "error": {"code": "not_found", "message": "there is no such VM"}
    }


def refuse(_: dict[str, Any]) -> Answer:
    return 404, {"error": {"code": "not_found", "message": "there is no such VM"}}


def test_an_answer_without_an_error_object_is_internal(service: Service, capsys: Capture) -> None:
    service.answers["vm_status"] = lambda _: (502, {})  # pyright: ignore[reportUnknownLambdaType]
    assert service.run("status", "vm_a") == 1
    assert "answered 502" in capsys.readouterr().err
