"""What known error texts mean: which are consequences of another rank's end, and what to do."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# What Gloo, NCCL, TCPStore and DDP say when a peer has gone or has not come. Those that name the
# peer or the reason stand first: of several that match, the first is shown. A builtin OSError
# (`[Errno 32] Broken pipe`) is about a pipe or socket of the script's own.
_LOST_PEER = tuple(
    re.compile(pattern)
    for pattern in (
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
        r"inconsistent 0 params",
        r"\bChildFailedError\b",
        r"rank 0 or its store went away during the join",
        r"its store answered once and then went away",
        r"ranks? [\d, -]+ did not come within [\d.]+ s",
        r"rank 0 \(.*\) came, but stopped answering",
    )
)


def lost_peer(texts: Iterable[str]) -> str | None:
    """The words by which an error shows itself to be the consequence of another rank's end.

    Whether it is one is for the caller to judge: where no rank has ended, a cable was pulled.

    Args:
        texts: messages of an exception and of those it was raised from, or lines of a log.

    Returns:
        None where there are no such words.
    """
    joined = "\n".join(texts)
    for pattern in _LOST_PEER:
        found = pattern.search(joined)
        if found:
            return found[0]
    return None


class _Advice(NamedTuple):
    pattern: str
    do: str


_MEMORY = (
    "give the run more memory (look also at the container's or the job's limit), or use less: "
    "fewer DataLoader workers, a smaller --micro-batch, data that is read when it is needed"
)
_SHARED_MEMORY = (
    "enlarge /dev/shm (docker run --shm-size=8g, or --ipc=host), or use fewer DataLoader workers"
)
_BY_TEXT = tuple(
    _Advice(*pair)
    for pair in (
        (
            r"'ExactDDP' object (?:has no attribute|is not subscriptable)",
            "on several processes world.prepare returns a wrapper: keep a name for the bare model, "
            "and use that for everything but calling it in training",
        ),
        (
            r"CUDA out of memory|OutOfMemoryError|HIP out of memory",
            "use a smaller --micro-batch (the global batch and the numbers stay the same), or "
            "activation checkpointing",
        ),
        (
            r"killed by signal: Bus error|Bus error|out of shared memory|No space left.*/dev/shm",
            _SHARED_MEMORY,
        ),
        (
            r"Expected to have finished reduction in the prior iteration",
            "parameters got no gradient in this step: leave them out of the model, use their "
            "output, or pass find_unused_parameters=True to DDP",
        ),
        (
            r"Expected to mark a variable ready only once",
            "use checkpoint(..., use_reentrant=False), and call each DDP model once per backward",
        ),
        (
            r"EADDRINUSE|[Aa]ddress already in use",
            "another program has this port: leave the port out, or give each run its own",
        ),
        (
            r"Cannot re-initialize CUDA in forked subprocess",
            "touch CUDA only in the ranks' own code, not in a Dataset, or start the DataLoader's "
            'workers with multiprocessing_context="spawn"',
        ),
        (
            r"device-side assert triggered|CUDA error: (?:an illegal memory|unspecified launch)",
            "a GPU says so later than the line that did it, often an index out of range: run it "
            "with CUDA_LAUNCH_BLOCKING=1, or on the CPU, to see that line",
        ),
        (
            r"invalid device ordinal|Duplicate GPU detected",
            "use the device of LOCAL_RANK, and at most as many processes as GPUs are visible",
        ),
        (
            r"collective mismatch in your code|doesn't match expected size",
            "the ranks came to this collective with tensors of other sizes or types, or to another "
            "collective: pad them, or exchange the sizes first",
        ),
        (
            r"unrecognized arguments: --local[-_]rank",
            "let the script read os.environ['LOCAL_RANK'] instead",
        ),
    )
)
_BY_SIGNAL: dict[int, str] = {
    signal.SIGKILL: "it was sent by another process: a scheduler (time or memory limit), "
    "systemd-oomd, or a user; look at the job's and the machine's log",
    signal.SIGTERM: "it came from outside of this run: a scheduler that ends the job, or a user",
    signal.SIGSEGV: "a library of C or C++ code failed; crash.txt has the Python stack of every "
    "thread",
    signal.SIGABRT: "a library ended the process itself and says why at the end of stderr.log; "
    "crash.txt has the Python stack of every thread",
    signal.SIGBUS: f"if shared memory was full: {_SHARED_MEMORY}; crash.txt has the Python stack",
    signal.SIGFPE: "crash.txt has the Python stack of every thread",
    signal.SIGILL: "a library was built for another processor; crash.txt has the Python stack",
    signal.SIGXCPU: "the limit of processor time (ulimit -t) was reached",
    signal.SIGXFSZ: "the limit of a file's size (ulimit -f) was reached",
}
_BY_KIND = {
    "oom": _MEMORY,
    "left": "every rank must take the same number of steps and come to the same collectives: look "
    "for a return, a break or a shorter DataLoader on one rank, and for a collective (world.sum, "
    "checkpoint.save) that only one rank calls",
    "node_lost": "look at that machine: switched off, restarted, out of the network, or its "
    "launcher was killed",
}
_NETWORK = (
    "no rank had ended before: look at the network between the machines (cable, firewall, "
    "interface), and whether a rank came to its collective within the timeout"
)


def advice_for(
    kind: str,
    number: int,
    texts: Sequence[str],
    *,
    oom: bool = False,
    alone: bool = False,
) -> str:
    """What to do about a failure; empty where the failure says it itself.

    Args:
        kind: of the failure, see `first_failure.Kind`.
        number: the signal that ended the process, or 0.
        texts: messages of its exceptions, or its last lines.
        oom: the kernel's out-of-memory killer was at work.
        alone: it says that a peer was lost, but none was.
    """
    joined = "\n".join(texts)
    if kind == "exception" and oom and re.search(r"DataLoader worker|signal: Killed", joined):
        return f"the kernel's out-of-memory killer ended a worker: {_MEMORY}"
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    for advice in _BY_TEXT:
        if re.search(advice.pattern, joined):
            return advice.do
    if alone:
        return _NETWORK
    return _BY_SIGNAL.get(number, "") if kind == "signal" else ""
