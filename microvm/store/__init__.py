"""What the service remembers: tenants and tokens, VMs, jobs, receipts and the journal, in one SQLite file.

The promise: what a call here reports as written survives a power cut (WAL with `synchronous=FULL`), and a
journal record and the change that it announces are one commit. It must not decide anything (that is
`policy`), hold checkpoints or disks (those are files on another file system), or cache tokens: the command
line issues and revokes beside a live daemon. Its neighbour above is `fleet`, which keeps everything live in
memory after `Store.load`.

    open_store ─► Store ─ commit(writes…) ─► writer connection, one transaction per thread call
                    └──── authenticate ────► read-only connection, synchronous
    open_registry ─► Registry                the command line's own short-lived connection
"""

from microvm.store import writes
from microvm.store.ids import new_id, new_job_id, new_vm_id
from microvm.store.registry import IssuedToken, Registry, TokenInfo, open_registry
from microvm.store.rows import TemplateRow
from microvm.store.store import Loaded, Store, open_store
from microvm.store.tokenfile import write_token_file
from microvm.store.tokens import token_id_of
from microvm.store.writes import Write

__all__ = [
    "IssuedToken",
    "Loaded",
    "Registry",
    "Store",
    "TemplateRow",
    "TokenInfo",
    "Write",
    "new_id",
    "new_job_id",
    "new_vm_id",
    "open_registry",
    "open_store",
    "token_id_of",
    "write_token_file",
    "writes",
]
