"""The supervisor's operations as typed methods, over one `call`.

Names, arguments and results of `guest/supervisor.py`'s table; nothing of the channel below.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final, Literal, cast

from microvm.model import FILE_CALL_BYTES, ExecSpec, JobId
from microvm.wire import agent
from microvm.wire.agent import FilePart, JobSummary, ProtocolError, Reply

CALL_TIMEOUT_S: Final = 30.0
"""For a call that a healthy guest answers in milliseconds, and one on a busy host in seconds."""
_LIST_BYTES: Final = 1 << 20
"""256 summaries with a message each are under 300 KiB."""
_OUTPUT_BYTES: Final = 16 << 20


class Operations(ABC):
    """The calls that a supervisor answers; see `AgentLink` for what they raise."""

    @abstractmethod
    async def call(
        self,
        op: str,
        args: Mapping[str, Any],
        body: bytes = b"",
        *,
        timeout_s: float,
        max_body_bytes: int = 0,
    ) -> Reply:
        """Makes one call; `AgentLink` does."""

    async def configure(
        self,
        *,
        realtime_ns: int,
        entropy: bytes,
        machine_id: str | None = None,
        hostname: str | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> int:
        """Sets the guest's clock and entropy, and its identity when given; must come before `thaw`.

        Returns:
            The guest's wall clock after it was set, nanoseconds since the epoch.
        """
        args: dict[str, Any] = {"realtime_ns": realtime_ns, "entropy_hex": entropy.hex()}
        if machine_id is not None or hostname is not None:
            args["identity"] = {"machine_id": machine_id, "hostname": hostname}
        reply = await self.call("configure", args, timeout_s=timeout_s)
        return agent.Fields(reply.ok).number("clock_set_ns")

    async def thaw(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Lets jobs and their timeouts run."""
        await self.call("thaw", {}, timeout_s=timeout_s)

    async def sync(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Writes the guest's dirty pages to its disk."""
        await self.call("sync", {}, timeout_s=timeout_s)

    async def noop(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Runs the warm-up command, also while jobs are frozen."""
        await self.call("noop", {}, timeout_s=timeout_s)

    async def stat(self, *, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """Memory, jobs and the supervisor's own size, unchecked."""
        return (await self.call("stat", {}, timeout_s=timeout_s)).ok

    async def poweroff(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Kills all jobs, syncs, and powers the machine off after the answer."""
        await self.call("poweroff", {}, timeout_s=timeout_s)

    async def exec(
        self,
        job_id: JobId,
        spec: ExecSpec,
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> int:
        """Starts a command; the same job id again starts nothing and answers the same.

        Args:
            job_id: Chosen by the host.
            spec: What to run.
            env: The whole environment beside the guest's own; `spec.env` when None.
            timeout_s: For the start, not for the command.

        Returns:
            When it began, nanoseconds since the epoch by the guest's clock.
        """
        text = json.dumps(
            {"command": spec.command, "env": dict(spec.env if env is None else env)}, ensure_ascii=False
        ).encode("utf-8", "surrogatepass")
        args: dict[str, Any] = {
            "job_id": job_id,
            "cwd": spec.cwd,
            "timeout_s": spec.timeout_seconds,
            "output_limit_bytes": spec.output_limit_kib * 1024,
            "spec_bytes": len(text),
        }
        reply = await self.call("exec", args, text + (spec.stdin or b""), timeout_s=timeout_s)
        return agent.Fields(reply.ok).number("started_at_ns")

    async def job_status(self, job_id: JobId, *, timeout_s: float = CALL_TIMEOUT_S) -> JobSummary:
        """The job as it is now."""
        return JobSummary.parse((await self.call("job_status", {"job_id": job_id}, timeout_s=timeout_s)).ok)

    async def job_list(self, *, timeout_s: float = CALL_TIMEOUT_S) -> list[JobSummary]:
        """All jobs that the guest remembers, oldest first."""
        reply = await self.call("job_list", {}, timeout_s=timeout_s, max_body_bytes=_LIST_BYTES)
        value = agent.parse_json(reply.body, most=_LIST_BYTES)
        if not isinstance(value, list):
            raise ProtocolError("job_list is no list")
        return [JobSummary.parse(item) for item in cast("list[object]", value)]

    async def job_cancel(self, job_id: JobId, *, timeout_s: float = CALL_TIMEOUT_S) -> JobSummary:
        """Begins to end a job and all that belongs to it; `job_ended` follows when it is over."""
        return JobSummary.parse((await self.call("job_cancel", {"job_id": job_id}, timeout_s=timeout_s)).ok)

    async def job_output(
        self,
        job_id: JobId,
        stream: Literal["stdout", "stderr"],
        *,
        offset: int,
        length: int,
        follow: bool = False,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> tuple[JobSummary, bytes]:
        """The job, and the retained bytes of one stream at `offset`, at most `length`.

        With `follow` the guest tells of further output by itself for a while (`job_grew`).
        """
        length = min(length, _OUTPUT_BYTES)
        args = {"job_id": job_id, "stream": stream, "offset": offset, "length": length, "follow": follow}
        reply = await self.call("job_output", args, timeout_s=timeout_s, max_body_bytes=length)
        return JobSummary.parse(reply.ok), reply.body

    async def read_file(
        self, path: str, *, offset: int = 0, length: int = FILE_CALL_BYTES, timeout_s: float = CALL_TIMEOUT_S
    ) -> tuple[FilePart, bytes]:
        """Bytes of a file below /workspace, and facts about it."""
        args = {"path": path, "offset": offset, "length": length}
        reply = await self.call("read_file", args, timeout_s=timeout_s, max_body_bytes=length)
        return FilePart.parse(reply.ok), reply.body

    async def write_file(
        self,
        path: str,
        content: bytes,
        *,
        offset: int | None = None,
        truncate: bool = False,
        mode: str | None = "0644",
        make_parents: bool = True,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> tuple[int, str]:
        """Replaces a file atomically, or writes into it at `offset`.

        Returns:
            The file's size and the SHA-256 of `content`, as the guest has them.
        """
        args = {
            "path": path,
            "offset": offset,
            "truncate": truncate,
            "mode": mode,
            "make_parents": make_parents,
        }
        fields = agent.Fields((await self.call("write_file", args, content, timeout_s=timeout_s)).ok)
        return fields.number("size"), fields.text("sha256", most=64)
