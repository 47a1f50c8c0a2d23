"""Bytes ⇄ messages, without I/O: the guest channel's framing and the control protocol of a VMM."""
