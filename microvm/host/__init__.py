"""The host's side of every effect: processes in their jail, files, reflinks, cgroups, clocks, volumes.

Promises that a failing system call leaves here as a `HostError` that says what was tried, and that nothing
is done by a shell. Must not decide (that is `policy`) and must not know VMs: it is given descriptors, sizes
and names. Import the modules themselves; this package exports nothing of its own.
"""
