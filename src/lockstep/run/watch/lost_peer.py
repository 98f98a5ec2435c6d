"""Recognizes errors that say that another rank is gone or has not come.

Such an error is usually a *consequence*: when one rank fails, the Gloo, NCCL, TCPStore or shared
memory of the other ranks reports a lost *peer*. The caller has to judge whether it is one: if no
other rank has ended, the network may be at fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# What Gloo, NCCL, TCPStore, DDP and Lockstep say when a peer is gone or has not come. The first
# match is shown, so patterns that name the peer or the reason come first. `(?<!\] )` excludes a
# builtin OSError, such as `[Errno 32] Broken pipe`, which is about a pipe or socket of the script.
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
    """Finds the part of an error that says that a peer was lost: `Connection closed by peer`.

    Args:
        texts: the messages of an exception and of those it was raised from, or the lines of a log.

    Returns:
        The part, or None if there is none.
    """
    joined = "\n".join(texts)
    for pattern in _LOST_PEER_PATTERNS:
        match = re.search(pattern, joined)
        if match is not None:
            return match[0]
    return None
