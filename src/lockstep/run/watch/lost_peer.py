"""Recognizes errors that say that another rank is gone or has not come.

Such an error is usually a *consequence*: when one rank fails, the Gloo, NCCL, TCPStore or shared
memory of the other ranks reports a lost *peer*. The caller has to judge whether it is one: if no
other rank has ended, the network may be at fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# What Gloo, NCCL, TCPStore, DDP and Lockstep say when a peer has not come in time. It need not have
# failed: it may be slow, or wait for something else.
_TIMEOUT_PATTERNS = (
    # [Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms
    r"Ranks? [\d, ]+ failed to pass monitoredBarrier",
    r"Timed out waiting \d+ms for (?:recv|send) operation",
    r"Watchdog caught collective operation timeout",
    r"wait timeout after \d+ms",
    r"The client socket has timed out",
    r"[Ss]ocket [Tt]imeout",
    r"watchdog got stuck",
    r"Heartbeat monitor timed out",
    r"ranks? [\d, -]+ did not come within [\d.]+ s",
    "all ranks have come, but one did not go on within",
    # Gloo says this to the other operations on a connection on which one has timed out.
    r"Application timeout caused pair closure",
    r"Some NCCL operations have failed or timed out",
)
# What they say when a peer is gone. `(?<!\] )` excludes a builtin OSError, such as `[Errno 32]
# Broken pipe`, which is about a pipe or socket of the script.
_CLOSED_PATTERNS = (
    r"remote process exited or there was a network error",
    r"Connection closed by (?:remote )?peer",
    r"(?<!\] )[Cc]onnection reset by peer",
    r"Connection was likely closed",
    r"Failed to check the .should dump. flag on TCPStore",
    r"(?<!\] )Broken pipe",
    r"recvValue failed",
    r"connectFullMesh failed",
    r"(?:failed to connect|Failed to recv|Failed to send), .*0 bytes",
    r"NCCL communicator (?:was|has been) aborted",
    r"ncclRemoteError",
    # Rank 0 has 161 params, while rank 1 has inconsistent 0 params.
    r"inconsistent 0 params",
    r"\bChildFailedError\b",
    r"rank 0 or its store went away during the join",
    r"its store answered once and then went away",
    r"rank 0 \(.*\) came, but stopped answering",
    r"ranks? [\d, -]+ ended while this rank waited",
)


@dataclass(frozen=True)
class LostPeer:
    """What an error says of a lost peer."""

    text: str
    """The part of the error that says it: `Connection closed by peer`."""
    timed_out: bool
    """True if the peer has not come in time, False if it is gone."""


def find_lost_peer(texts: Iterable[str]) -> LostPeer | None:
    """Finds what an error says of a lost peer.

    Args:
        texts: the messages of an exception and of those it was raised from, or the lines of a log.

    Returns:
        None if the error does not say that a peer was lost.
    """
    joined = "\n".join(texts)
    timeout = _first_match(_TIMEOUT_PATTERNS, joined)
    closed = _first_match(_CLOSED_PATTERNS, joined)

    if timeout is not None and closed is not None:
        # The peer is gone, and the operation has timed out because of that. The text about the
        # timeout may name the peer: "Rank 1 failed to pass monitoredBarrier".
        return LostPeer(timeout, timed_out=False)
    if timeout is not None:
        return LostPeer(timeout, timed_out=True)
    if closed is not None:
        return LostPeer(closed, timed_out=False)
    return None


def _first_match(patterns: Iterable[str], text: str) -> str | None:
    """Returns what the first pattern that is in a text has found; None if none is in it."""
    for pattern in patterns:
        match = re.search(pattern, text)
        if match is not None:
            return match[0]
    return None
