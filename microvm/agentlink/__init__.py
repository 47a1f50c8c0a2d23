"""The host's end of the channel to a guest's supervisor: calls, bodies, flow control, freeze and hello.

`open_link` gives an `AgentLink` over any byte stream. It must not know VMs, jobs' meaning or policy
(`fleet`); the messages are `wire.agent`'s.
"""

from microvm.agentlink.link import AgentLink, GuestCall, GuestHandler, open_link

__all__ = ["AgentLink", "GuestCall", "GuestHandler", "open_link"]
