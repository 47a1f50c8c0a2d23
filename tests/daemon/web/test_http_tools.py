"""Tools, documents and health over HTTP."""

from __future__ import annotations

import base64
from typing import Any

import pytest
import trio

from microvm.catalogue import CATALOGUE
from microvm.errors import STATUS_OF_CODE, CapacityError, HostError, MicrovmError, RequestError, VmmError

VM_ID = "vm_" + "a" * 20
JOB_ID = "job_" + "b" * 20
ARGUMENTS: dict[str, dict[str, Any]] = {
    "vm_create": {"request_id": "r1", "memory_mib": 512},
    "vm_list": {},
    "vm_status": {"vm_id": VM_ID},
    "vm_exec": {"vm_id": VM_ID, "request_id": "r2", "command": "echo hello", "wait_seconds": 5},
    "vm_job_status": {"vm_id": VM_ID, "job_id": JOB_ID},
    "vm_job_output": {"vm_id": VM_ID, "job_id": JOB_ID},
    "vm_job_cancel": {"vm_id": VM_ID, "job_id": JOB_ID},
    "vm_read_file": {"vm_id": VM_ID, "path": "a"},
    "vm_write_file": {"vm_id": VM_ID, "path": "a", "content": "x"},
    "vm_suspend": {"vm_id": VM_ID},
    "vm_resume": {"vm_id": VM_ID},
    "vm_destroy": {"vm_id": VM_ID},
}


@pytest.mark.parametrize("name", list(CATALOGUE))
async def test_every_tool_answers_what_its_result_model_says(doors: Any, name: str) -> None:
    async with doors.http() as http:
        answer = await http.post(f"/v1/tools/{name}", json=ARGUMENTS[name])
    assert answer.status_code == 200, answer.text
    CATALOGUE[name].result.model_validate(answer.json())


async def test_a_vm_shows_no_workspace_to_its_owner_and_never_its_closure(doors: Any) -> None:
    async with doors.http() as http:
        shown = (await http.post("/v1/tools/vm_status", json={"vm_id": VM_ID})).json()
    assert "workspace" not in shown
    assert shown["vmm"] == {"kind": "qemu", "accel": "tcg", "version": "10.0"}
    assert shown["created_at"] == "1970-01-01T00:00:01.000Z"
    assert shown["jobs"][0]["exit_code"] == 0


async def test_only_operators_list_every_workspace(doors: Any) -> None:
    async with doors.http() as http:
        refused = await http.post("/v1/tools/vm_list", json={"all": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    async with doors.http("root-token") as http:
        listed = (await http.post("/v1/tools/vm_list", json={"all": True})).json()
    assert [vm["workspace"] for vm in listed["vms"]] == ["alice"]


async def test_a_foreign_id_gets_the_answer_of_one_that_never_existed(doors: Any) -> None:
    async with doors.http("bob-token") as http:
        foreign = await http.post("/v1/tools/vm_status", json={"vm_id": VM_ID})
        unknown = await http.post("/v1/tools/vm_status", json={"vm_id": "vm_" + "z" * 20})
    assert (foreign.status_code, foreign.content) == (404, unknown.content)


async def test_exec_carries_the_first_page_only_when_the_job_ended_in_time(doors: Any) -> None:
    async with doors.http() as http:
        arguments = ARGUMENTS["vm_exec"]
        waited = (await http.post("/v1/tools/vm_exec", json=arguments)).json()
        at_once = (await http.post("/v1/tools/vm_exec", json={**arguments, "wait_seconds": 0})).json()
    assert waited["output"]["stdout"] == "hello\n"
    assert "output" not in at_once


async def test_waiting_is_no_part_of_what_a_receipt_compares(doors: Any) -> None:
    async with doors.http() as http:
        for wait in (0, 5):
            await http.post("/v1/tools/vm_exec", json={**ARGUMENTS["vm_exec"], "wait_seconds": wait})
    first, second = [told["arguments"] for name, told in doors.fleet.calls if name == "exec"]
    assert first == second
    assert not {"wait_seconds", "request_id"} & set(first)


async def test_defaults_and_their_spelling_out_are_the_same_arguments(doors: Any) -> None:
    async with doors.http() as http:
        await http.post("/v1/tools/vm_create", json={"request_id": "a"})
        await http.post("/v1/tools/vm_create", json={"request_id": "b", "vcpus": 1, "idle_seconds": 300})
    first, second = [told["arguments"] for name, told in doors.fleet.calls if name == "create"]
    assert first == second


@pytest.mark.parametrize("max_bytes", [1, 2, 3])
async def test_text_pages_of_any_size_read_the_whole_output(doors: Any, max_bytes: int) -> None:
    doors.fleet.stdout = "aé€😀 ü\n".encode() + b"\xff" + "é".encode()[:1]
    cursor, text, errors = {"stdout": 0, "stderr": 0}, "", False
    async with doors.http() as http:
        with trio.fail_after(10):
            while True:
                arguments = {"vm_id": VM_ID, "job_id": JOB_ID, "max_bytes": max_bytes, "cursor": cursor}
                page = (await http.post("/v1/tools/vm_job_output", json=arguments)).json()
                if page["next_cursor"] == cursor:
                    break
                cursor = page["next_cursor"]
                text += page["stdout"]
                errors = errors or page["decoding_errors"]["stdout"]
    assert text == doors.fleet.stdout.decode("utf-8", "replace")
    assert errors


async def test_base64_pages_are_exact_and_omit_the_text_keys(doors: Any) -> None:
    doors.fleet.stdout = bytes(range(256))
    async with doors.http() as http:
        arguments = {"vm_id": VM_ID, "job_id": JOB_ID, "encoding": "base64", "max_bytes": 100}
        page = (await http.post("/v1/tools/vm_job_output", json=arguments)).json()
    assert base64.b64decode(page["stdout_base64"]) == bytes(range(100))
    assert not {"stdout", "stderr", "decoding_errors"} & set(page)


async def test_files_are_read_as_text_without_splitting_a_character(doors: Any) -> None:
    doors.fleet.content = "a€b".encode()
    async with doors.http() as http:
        arguments = {"vm_id": VM_ID, "path": "f", "encoding": "utf-8", "length": 2}
        first = (await http.post("/v1/tools/vm_read_file", json=arguments)).json()
        arguments["offset"] = first["next_offset"]
        second = (await http.post("/v1/tools/vm_read_file", json=arguments)).json()
    assert (first["content"], first["eof"], first["next_offset"]) == ("a", False, 1)
    assert (second["content"], second["eof"], second["next_offset"]) == ("€", False, 4)


async def test_replacing_truncates_and_writing_in_place_does_not(doors: Any) -> None:
    async with doors.http() as http:
        base = {"vm_id": VM_ID, "path": "f", "content": "x"}
        await http.post("/v1/tools/vm_write_file", json=base)
        await http.post("/v1/tools/vm_write_file", json={**base, "offset": 3})
    told = [call for name, call in doors.fleet.calls if name == "write_file"]
    assert [(call["offset"], call["truncate"]) for call in told] == [(None, True), (3, False)]


async def test_a_write_beyond_the_limit_of_one_call_is_too_large(doors: Any) -> None:
    async with doors.http() as http:
        body = {"vm_id": VM_ID, "path": "f", "content": "x" * 131073}
        answer = await http.post("/v1/tools/vm_write_file", json=body)
        read = await http.post("/v1/tools/vm_read_file", json={"vm_id": VM_ID, "path": "f", "length": 131073})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
    assert read.status_code == 413
    assert not doors.fleet.calls


@pytest.mark.parametrize("code", sorted(STATUS_OF_CODE))
async def test_every_code_has_its_status_at_both_doors(doors: Any, code: str) -> None:
    async def act(_progress: Any) -> None:
        raise MicrovmError(code, "as told", retry_after_s=2.2 if STATUS_OF_CODE[code] in {429, 503} else None)

    with doors.acting(act):
        async with doors.http() as http:
            answer = await http.post("/v1/tools/vm_suspend", json={"vm_id": VM_ID})
            call = {"name": "vm_suspend", "arguments": {"vm_id": VM_ID}}
            message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
            over_mcp = (await http.post("/mcp", json=message)).json()
    assert answer.status_code == STATUS_OF_CODE[code]
    assert answer.json()["error"]["code"] == code
    assert over_mcp["result"]["isError"] is True
    assert over_mcp["result"]["structuredContent"]["error"]["code"] == code
    if STATUS_OF_CODE[code] in {429, 503}:
        assert answer.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("password=hunter2"), "internal"),
        (HostError("open", "/private/path", 13), "internal"),
        (HostError("write", "/private/path", 28), "disk_full"),
        (ExceptionGroup("1", [ValueError("hunter2"), RequestError("jobs_active", "wait")]), "jobs_active"),
        (BaseExceptionGroup("1", [ExceptionGroup("2", [CapacityError("no_capacity", "")])]), "no_capacity"),
    ],
    ids=["a bug", "a host failure", "a full disk", "a group with one of ours", "groups within groups"],
)
async def test_failures_become_one_error_without_secrets(
    doors: Any, error: BaseException, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(_progress: Any) -> None:
        raise error

    with doors.acting(act):
        async with doors.http() as http:
            answer = await http.post("/v1/tools/vm_suspend", json={"vm_id": VM_ID})
    assert answer.json()["error"]["code"] == code
    assert "hunter2" not in answer.text + caplog.text
    assert "/private" not in answer.text
    if code == "internal":
        assert answer.json()["error"]["detail"]["trace_id"] in caplog.text


async def test_a_dead_vmm_says_why(doors: Any) -> None:
    async def act(_progress: Any) -> None:
        raise VmmError("the VMM died", exit_status=-9, console_tail="Kernel panic")

    with doors.acting(act):
        async with doors.http() as http:
            answer = await http.post("/v1/tools/vm_resume", json={"vm_id": VM_ID})
    assert answer.status_code == 409
    assert answer.json()["error"]["detail"] == {"exit_status": -9, "console_tail": "Kernel panic"}


async def test_the_trace_id_of_the_caller_is_kept(doors: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def act(_progress: Any) -> None:
        raise RuntimeError

    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    with doors.acting(act):
        async with doors.http() as http:
            headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
            answer = await http.post("/v1/tools/vm_suspend", json={"vm_id": VM_ID}, headers=headers)
    assert answer.json()["error"]["detail"] == {"trace_id": trace}


async def test_the_documents_describe_every_tool(doors: Any) -> None:
    async with doors.http() as http:
        listed = (await http.get("/v1/tools")).json()["tools"]
        document = (await http.get("/openapi.json")).json()
    assert [tool["name"] for tool in listed] == list(CATALOGUE)
    assert document["openapi"].startswith("3.1")
    assert document["info"]["version"] == "1.2.3"
    for tool in listed:
        operation = document["paths"][f"/v1/tools/{tool['name']}"]["post"]
        assert operation["requestBody"]["content"]["application/json"]["schema"] == tool["input_schema"]


async def test_a_profile_of_the_token_beats_the_query(doors: Any) -> None:
    async with doors.http("core-token") as http:
        assert (await http.get("/v1/tools?profile=nonsense")).status_code == 200
    async with doors.http() as http:
        assert (await http.get("/v1/tools?profile=core")).status_code == 200
        assert (await http.get("/v1/tools?profile=nonsense")).status_code == 400


async def test_health_says_ok_to_anybody_and_nothing_else(doors: Any) -> None:
    async with doors.http(token=None) as http:
        for path in ("/healthz", "/readyz"):
            answer = await http.get(path)
            assert (answer.status_code, answer.json()) == (200, {"ok": True})
