"""The tables, and how an older file becomes a newer one.

`MIGRATIONS[n]` leads from `user_version` n to n + 1 and is never edited once released: a change is one more
entry. Statements only; `database` runs them. Times are seconds since the epoch, UTC; JSON columns are UTF-8
text.
"""

from __future__ import annotations

from typing import Final

_INITIAL: Final = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID",
    """CREATE TABLE workspaces (
        workspace_id TEXT PRIMARY KEY,
        created_at REAL NOT NULL,
        allow_network INTEGER NOT NULL DEFAULT 0,
        max_vms INTEGER,
        max_memory_mib INTEGER,
        max_storage_gib INTEGER,
        revoked INTEGER NOT NULL DEFAULT 0
    ) STRICT, WITHOUT ROWID""",
    """CREATE TABLE tokens (
        hash BLOB PRIMARY KEY,
        token_id TEXT NOT NULL UNIQUE,
        workspace_id TEXT NOT NULL REFERENCES workspaces,
        created_at REAL NOT NULL,
        expires_at REAL NOT NULL,
        operator INTEGER NOT NULL DEFAULT 0,
        profile TEXT,
        revoked INTEGER NOT NULL DEFAULT 0
    ) STRICT, WITHOUT ROWID""",
    "CREATE INDEX tokens_of_workspace ON tokens (workspace_id)",
    """CREATE TABLE vms (
        vm_id TEXT PRIMARY KEY,
        workspace_id TEXT NOT NULL REFERENCES workspaces,
        state TEXT NOT NULL,
        since REAL NOT NULL,
        created_at REAL NOT NULL,
        name TEXT,
        description TEXT,
        ephemeral INTEGER NOT NULL,
        idle_seconds REAL NOT NULL,
        idle_mode TEXT NOT NULL,
        reason TEXT,
        last_activity_at REAL NOT NULL,
        checkpoint_generation INTEGER NOT NULL,
        spent_generation INTEGER NOT NULL,
        agent_generation INTEGER NOT NULL,
        slot INTEGER,
        memory_mib INTEGER NOT NULL,
        vcpus INTEGER NOT NULL,
        network INTEGER NOT NULL,
        disk_gib INTEGER NOT NULL,
        image_digest TEXT NOT NULL,
        vmm TEXT NOT NULL,
        env TEXT NOT NULL,
        boot_ms REAL,
        resume_ms REAL,
        transitions_total INTEGER NOT NULL,
        CHECK (spent_generation <= checkpoint_generation)
    ) STRICT, WITHOUT ROWID""",
    # A name is free again as soon as its VM's destruction is journaled: from there it only goes forward.
    """CREATE UNIQUE INDEX vm_names ON vms (workspace_id, name)
        WHERE name IS NOT NULL AND state <> 'destroying'""",
    """CREATE TABLE jobs (
        job_id TEXT PRIMARY KEY,
        vm_id TEXT NOT NULL REFERENCES vms ON DELETE CASCADE,
        state TEXT NOT NULL,
        command TEXT NOT NULL CHECK (length(command) <= 200),
        started_at REAL NOT NULL,
        ended_at REAL,
        exit_code INTEGER,
        signal INTEGER,
        timed_out INTEGER NOT NULL,
        cancelled INTEGER NOT NULL,
        truncated INTEGER NOT NULL,
        total_stdout INTEGER NOT NULL,
        total_stderr INTEGER NOT NULL,
        kept_stdout INTEGER NOT NULL,
        kept_stderr INTEGER NOT NULL,
        run_seconds REAL NOT NULL,
        background_processes INTEGER NOT NULL,
        message TEXT,
        output_cached INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID""",
    "CREATE INDEX jobs_of_vm ON jobs (vm_id, started_at)",
    # No foreign keys to VMs and jobs: a receipt is replayed after both are gone.
    """CREATE TABLE receipts (
        workspace_id TEXT NOT NULL REFERENCES workspaces,
        request_id TEXT NOT NULL,
        tool TEXT NOT NULL,
        args_hash TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('pending', 'done', 'unknown')),
        created_at REAL NOT NULL,
        completed_at REAL,
        answer TEXT,
        vm_id TEXT,
        job_id TEXT,
        PRIMARY KEY (workspace_id, request_id),
        CHECK ((state = 'pending') = (completed_at IS NULL)),
        CHECK ((state = 'done') = (answer IS NOT NULL))
    ) STRICT, WITHOUT ROWID""",
    """CREATE TABLE journal (
        intent_id INTEGER PRIMARY KEY AUTOINCREMENT,
        vm_id TEXT NOT NULL,
        op TEXT NOT NULL,
        args TEXT NOT NULL,
        intent_at REAL NOT NULL,
        steps TEXT NOT NULL DEFAULT '[]',
        done_at REAL,
        outcome TEXT,
        CHECK ((done_at IS NULL) = (outcome IS NULL))
    ) STRICT""",
    "CREATE INDEX open_intents ON journal (intent_id) WHERE done_at IS NULL",
    "CREATE INDEX journal_done_at ON journal (done_at) WHERE done_at IS NOT NULL",
    """CREATE TABLE templates (
        key TEXT PRIMARY KEY,
        state TEXT NOT NULL,
        created_at REAL NOT NULL,
        last_used_at REAL NOT NULL,
        detail TEXT NOT NULL
    ) STRICT, WITHOUT ROWID""",
)

MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (_INITIAL,)

SCHEMA_VERSION: Final = len(MIGRATIONS)
