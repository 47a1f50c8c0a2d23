"""Every core tool has a command, and every parameter of it an option or a stated reason to have none."""

from __future__ import annotations

import pytest
import typer.main

from microvm.catalogue import CATALOGUE
from microvm.cli import vm

# What a command decides by itself, per tool: it moves exact bytes, page by page, and waits to the end.
BY_ITSELF = {
    "vm_exec": {"stdin_base64", "wait_seconds"},
    "vm_read_file": {"encoding"},
    "vm_write_file": {"content", "content_base64"},
}
# Parameters under another name on the command line.
RENAMED = {
    "all": ["all_"],
    "timeout_seconds": ["timeout"],
    "cursor": ["stdout_cursor", "stderr_cursor"],
}


def command_of(tool: str) -> str:
    return {"vm_job_status": "job-status", "vm_job_output": "output", "vm_job_cancel": "cancel"}.get(
        tool, tool.removeprefix("vm_").removesuffix("_file")
    )


@pytest.mark.parametrize("tool", sorted(CATALOGUE))
def test_a_tool_has_a_command_with_its_parameters(tool: str) -> None:
    commands = typer.main.get_group(vm.app).commands
    command = commands[command_of(tool)]
    options = {parameter.name for parameter in command.params}
    for name in CATALOGUE[tool].params.model_fields.keys() - BY_ITSELF.get(tool, set()):
        assert options >= set(RENAMED.get(name, [name])), (tool, name)
    assert "json" in options
