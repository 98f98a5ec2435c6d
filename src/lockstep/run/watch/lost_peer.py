"""Recognizes errors that say that another rank has gone, or has not come.

Such an error is usually a *consequence*: when one rank fails, Gloo, NCCL, the TCPStore or shared
memory of the other ranks report a lost *peer*. Whether it is one is for the caller to judge: if no
other rank has ended, a cable was pulled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# What Gloo, NCCL, TCPStore, DDP and Lockstep say when a peer has gone or has not come. Patterns
# that name the peer or the reason stand first, as the first that matches is shown. `(?<!\] )`
# excludes a builtin OSError, such as `[Errno 32] Broken pipe`: it is about a pipe or socket of the
# script's own.
_LOST_PEER_PATTERNS = (
    # [Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms
    r"Ranks? [\d, ]+ failed to pass monitoredBarrier",
    r"remote process exited or there was a network error",
    r"Connection closed by (?:remote )?peer",
    r"(?<!\] )[Cc]onnection reset by peer",
    r"Connection was likely closed",
    r"Timed out waiting \d+ms for (?:recv|send) operation",
    r"Watchdog caught collective operation timeout",
    r"Failed to check the .should dump. flag on TCPStore",
    r"(?<!\] )Broken pipe",
    r"recvValue failed",
    r"Application timeout caused pair closure",
    r"connectFullMesh failed",
    r"wait timeout after \d+ms",
    r"The client socket has timed out",
    r"(?:failed to connect|Failed to recv|Failed to send), .*0 bytes",
    r"[Ss]ocket [Tt]imeout",
    r"watchdog got stuck",
    r"Heartbeat monitor timed out",
    r"NCCL communicator (?:was|has been) aborted",
    r"Some NCCL operations have failed or timed out",
    r"ncclRemoteError",
    # Rank 0 has 161 params, while rank 1 has inconsistent 0 params.
    r"inconsistent 0 params",
    r"\bChildFailedError\b",
    r"rank 0 or its store went away during the join",
    r"its store answered once and then went away",
    r"ranks? [\d, -]+ did not come within [\d.]+ s",
    r"rank 0 \(.*\) came, but stopped answering",
    r"ranks? [\d, -]+ ended while this rank waited",
)


def find_lost_peer_text(texts: Iterable[str]) -> str | None:
    """Returns the words by which an error says that a peer was lost.

    Args:
        texts: the messages of an exception and of those it was raised from, or lines of a log.

    Returns:
        None if there are no such words.
    """
    joined = "\n".join(texts)
    for pattern in _LOST_PEER_PATTERNS:
        match = re.search(pattern, joined)
        if match is not None:
            return match[0]
    return None
