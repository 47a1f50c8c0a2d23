"""Ids nobody can guess or meet twice. It makes ids only; what they name is `model`'s."""

from __future__ import annotations

import secrets
from typing import Final

from microvm.model import JobId, VmId

_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz234567"
"""RFC 4648 §6 in lower case: survives file names, URLs and double-clicks."""

_ID_CHARACTERS: Final = 20
"""100 bits: a million ids meet with a chance of 2^-61."""


def new_id(prefix: str, characters: int = _ID_CHARACTERS) -> str:
    """A fresh id: `prefix`, then `characters` of lower-case base32 of the system's entropy, 5 bits each."""
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(characters))


def new_vm_id() -> VmId:
    """A VM id that was never used."""
    return VmId(new_id("vm_"))


def new_job_id() -> JobId:
    """A job id that was never used."""
    return JobId(new_id("job_"))
