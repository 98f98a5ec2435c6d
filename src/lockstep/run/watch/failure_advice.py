"""Advises what to do about the failure of a rank.

The advice comes from tables of known error texts, signals and kinds of failure. An *end* says how
the rank's process ended: its exit code or signal, the exception that it recorded, and the last
lines of its output. The *kind* is a `first_failure.FailureKind`, such as "exception".
"""

from __future__ import annotations

import re
import signal

from lockstep.run.watch.exit_status import ExitStatus

_MEMORY = (
    "give the run more memory (look also at the container's or the job's limit), or use less: "
    "fewer DataLoader workers, a smaller --micro-batch-size, data that is read when it is needed"
)
_SHARED_MEMORY = (
    "enlarge /dev/shm (docker run --shm-size=8g, or --ipc=host), or use fewer DataLoader workers"
)
# Advice by a pattern that is searched for in the error's messages, or in the end of the output.
_BY_TEXT = {
    r"'DistributedDataParallel' object (?:is not (?:subscriptable|iterable)|has no len)"
    r"|object of type 'DistributedDataParallel' has no len": (
        "on several processes the model is in DistributedDataParallel: keep a name for the bare "
        "model, and use that for everything but calling it in training"
    ),
    r"CUDA out of memory|OutOfMemoryError|HIP out of memory": (
        "use a smaller --micro-batch-size (the global batch and the numbers stay the same), or "
        "activation checkpointing"
    ),
    r"file </torch_\S+>: (No space left|Success)|(?s:No space left.*_multiprocessing\.SemLock\()": (
        f"/dev/shm, shared memory, is full: {_SHARED_MEMORY}"
    ),
    r"Bus error|out of shared memory|No space left.*/dev/shm": _SHARED_MEMORY,
    r"Too many open files|received 0 items of ancdata": (
        "raise the limit of open files (ulimit -n 65536), close what the script has opened and no "
        "longer needs, or let DataLoader workers share tensors by "
        "torch.multiprocessing.set_sharing_strategy('file_system')"
    ),
    r"\bMemoryError\b|DefaultCPUAllocator: (?:can't|not enough)|Cannot allocate memory": _MEMORY,
    r"Expected to have finished reduction in the prior iteration": (
        "parameters got no gradient in this step: leave them out of the model, use their "
        "output, or pass find_unused_parameters=True to DDP"
    ),
    r"Expected to mark a variable ready only once": (
        "use checkpoint(..., use_reentrant=False), and call each DDP model once per backward"
    ),
    # The first name of both lists is the same but for `module.`, with which DDP's names begin.
    r"(?s)Missing key\(s\) in state_dict: \"module\.(?P<bare>[^\"]+)\".*"
    r"Unexpected key\(s\) in state_dict: \"(?P=bare)\"": (
        "the model is in DistributedDataParallel or DataParallel, and the file has the names of "
        "the bare model: load it into model.module, or by lockstep.load_weights(model, path)"
    ),
    r"(?s)Missing key\(s\) in state_dict: \"(?P<name>[^\"]+)\".*"
    r"Unexpected key\(s\) in state_dict: \"module\.(?P=name)\"": (
        "the names in the file begin with `module.`, as DistributedDataParallel and DataParallel "
        "save them: load it by lockstep.load_weights(model, path), which removes that"
    ),
    r"WeightsUnpickler error:\s+Unsupported operand|UnpicklingError: invalid load key": (
        "torch.load cannot read this file. If lockstep.save_weights has written it, it is a "
        "safetensors file, whatever its name: load it by lockstep.load_weights(model, path)"
    ),
    r"EADDRINUSE|[Aa]ddress already in use": (
        "another program has this port: leave the port out, or give each run its own"
    ),
    # Ranks that the launcher starts have these variables.
    r"environment variable (?:MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE) expected, but not set": (
        "a process that the script starts itself needs MASTER_ADDR and MASTER_PORT, and its rank "
        "and world_size; or call the function without torch.multiprocessing.spawn, and start the "
        "script with lockstep run --nproc N"
    ),
    r"Cannot re-initialize CUDA in forked subprocess": (
        "touch CUDA only in the ranks' own code, not in a Dataset, or start the DataLoader's "
        'workers with multiprocessing_context="spawn"'
    ),
    r"device-side assert triggered|CUDA error: (?:an illegal memory|unspecified launch)": (
        "a GPU says so later than the line that did it, often an index out of range: run it "
        "with CUDA_LAUNCH_BLOCKING=1, or on the CPU, to see that line"
    ),
    r"trying to initialize the default process group twice": (
        "call init_process_group once in a process, and not at all where lockstep.init is called, "
        "which does it"
    ),
    r"invalid device ordinal|Duplicate GPU detected": (
        "use the device of LOCAL_RANK, and at most as many processes as GPUs are visible"
    ),
    r"collective mismatch in your code|doesn't match expected size": (
        "the ranks came to this collective with tensors of other sizes or types, or to another "
        "collective: pad them, or exchange the sizes first"
    ),
    r"devices=\d+.* not match the world size": "start as many processes: lockstep run --nproc N",
    r"unrecognized arguments: --local[-_]rank": (
        "let the script read os.environ['LOCAL_RANK'] instead"
    ),
}
_BY_SIGNAL: dict[int, str] = {
    # The sender of a signal is not known: a script may send one to itself or to another rank.
    signal.SIGKILL: "who sent it is not known: perhaps a scheduler (time or memory limit), "
    "systemd-oomd, a user, the script itself, or another rank; look at the job's and the machine's "
    "log, and for os.kill in the script",
    signal.SIGTERM: "who sent it is not known: perhaps a scheduler that ends the job, a user, the "
    "script itself, or another rank; look at the job's log, and for os.kill in the script",
    signal.SIGSEGV: "code in C or C++ failed: that of a library, or Python's own if functions call "
    "each other too deeply (sys.setrecursionlimit)",
    signal.SIGABRT: "a library ended the process itself and says why at the end of its output",
    signal.SIGBUS: f"if shared memory was full: {_SHARED_MEMORY}",
    signal.SIGILL: "a library was built for another processor",
    signal.SIGXCPU: "the limit of processor time (ulimit -t) was reached",
    signal.SIGXFSZ: "the limit of a file's size (ulimit -f) was reached",
}
ADVICE_BY_KIND = {
    "stopped": "find out who has stopped it: a scheduler, a debugger, Ctrl-Z, or `kill -STOP`",
    "oom": _MEMORY,
    "left": "every rank must take the same number of steps and come to the same collectives: look "
    "for a return, a break or a shorter DataLoader on one rank, and for a collective (world.sum, "
    "checkpoint.save) that only one rank calls",
    "node_lost": "look at that machine: switched off, restarted, or its launcher was killed; "
    "and at the network between it and this one",
}
NOT_ENDED = (
    "about the process that has not ended: look at the kernel's log (dmesg) for a lost GPU (Xid), "
    "or a file server or disk that does not answer; until that is repaired, often by a restart of "
    "the machine, the process holds its memory and its device"
)
_NETWORK = (
    "no rank had ended before: look at the network between the machines (cable, firewall, "
    "interface), and whether a rank came to its collective within the timeout"
)
# Gloo, monitored_barrier and NCCL say how long a collective was allowed to take:
#   Timed out waiting 5000ms for recv operation to complete
#   [Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms
#   Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, ..., Timeout(ms)=5000) ran for
_TIMEOUT_OF_COLLECTIVE = re.compile(
    r"Timed out waiting (\d+)ms for (?:recv|send) operation"
    r"|failed to pass monitoredBarrier in (\d+) ms"
    r"|Timeout\(ms\)=(\d+)"
)
# torch allows 10 minutes at least, so that a timeout of up to a minute was chosen.
_SHORT_TIMEOUT_MAX_S = 60

# The line of a traceback in which Python's multiprocessing makes a semaphore. If shared memory has
# no room for it, the message is only "No space left on device", without a file.
_LINE_THAT_MAKES_SEMAPHORE = "_multiprocessing.SemLock("


def advise(kind: str, end: ExitStatus, *, network_failed: bool) -> tuple[str, ...]:
    """Returns what the user can do about a rank's failure.

    Args:
        kind: the kind of failure, a `first_failure.FailureKind`.
        end: how the rank ended.
        network_failed: True if the rank lost its connection to another rank, but no other rank had
            ended before. So the network has failed, and not the other rank.

    Returns:
        A tuple with one text, and with a second one if a file has the stacks of the rank. It is
        empty if no advice is known, or if the error itself says what to do.
    """
    texts = [_advice_of_first_rule(kind, end, network_failed=network_failed)]
    if kind == "signal" and end.stacks_file:
        texts.append(f"see the Python stacks of that moment in {end.stacks_file}")
    return tuple(text for text in texts if text)


def _advice_of_first_rule(kind: str, end: ExitStatus, *, network_failed: bool) -> str:
    """Returns the advice by the first of these rules that applies; empty if none does.

    The arguments are those of `advise`.
    """
    text = _error_text(end)
    if end.oom:  # the kernel has killed some process for memory, maybe a worker of this rank
        advice = _advice_on_oom_of_other_process(kind, end, text)
        if advice:
            return advice

    if kind in ADVICE_BY_KIND:
        return ADVICE_BY_KIND[kind]

    if end.error is not None and end.error.hiding_file:
        file = end.error.hiding_file
        return (
            f"{file} is imported in place of the installed module of the same name: rename it, if "
            "that module is meant"
        )

    for pattern, what_to_do in _BY_TEXT.items():
        if re.search(pattern, text):
            return what_to_do

    if network_failed:
        return _advise_on_network(text)

    if kind == "signal":
        signal_number = -end.code
        return _BY_SIGNAL.get(signal_number, "")

    return ""


def _advice_on_oom_of_other_process(kind: str, end: ExitStatus, text: str) -> str:
    """Returns the advice on a rank that failed after the out-of-memory killer ended some process.

    That process was another one than the rank: otherwise the kind of failure would be "oom".

    Args:
        kind: the kind of failure.
        end: how the rank ended.
        text: the messages of its error, or the end of its output.

    Returns:
        The advice; empty if the rank does not depend on the process as far as is known.
    """
    # The DataLoader says "DataLoader worker (pid 71) is killed by signal: Killed." or "DataLoader
    # worker (pid(s) 71) exited unexpectedly".
    names_killed_worker = re.search(r"DataLoader worker|signal: Killed", text) is not None
    its_worker_was_killed = kind == "exception" and names_killed_worker
    if its_worker_was_killed:
        return f"the kernel's out-of-memory killer ended a worker: {_MEMORY}"

    # The rank has ended together with the fork server, the process that had started it.
    its_parent_was_killed = end.with_fork_server
    if its_parent_was_killed:
        return f"the kernel's out-of-memory killer has ended a process meanwhile: {_MEMORY}"
    return ""


def _advise_on_network(text: str) -> str:
    """Returns the advice for a rank that lost its connection while no other rank had ended.

    A collective that was only allowed some seconds has probably just taken longer, so that this is
    said before anything about the network.

    Args:
        text: the messages of the rank's error, or the end of its output.
    """
    timeouts_s = []
    for groups in _TIMEOUT_OF_COLLECTIVE.findall(text):
        milliseconds = "".join(groups)  # ("", "3000", ""): one of the alternatives has matched
        timeouts_s.append(int(milliseconds) / 1000)

    # `monitored_barrier` writes one for each rank, what is left of its timeout: 30 s, 29.5 s, ...
    # The longest is about what was set.
    timeout_s = max(timeouts_s, default=None)
    if timeout_s is None or timeout_s > _SHORT_TIMEOUT_MAX_S:
        return _NETWORK
    return (
        f"no rank had ended before, and the collective had a timeout of {timeout_s:g} s, which is "
        "short: raise it (timeout= of init_process_group, new_group, monitored_barrier or wait; "
        "collective_timeout of lockstep.init) if a rank may come that much later than the others, "
        "because it reads data or saves, say. Otherwise look why one came so late and, after that, "
        "at the network between the machines (cable, firewall, interface)"
    )


def _error_text(end: ExitStatus) -> str:
    """Returns the text in which known errors are searched for.

    These are the messages of the recorded exception. If none was recorded, they are the message of
    the traceback that the rank has printed, and the end of its output.
    """
    error = end.error
    if error is None:
        lines_of_message: tuple[str, ...] = ()
        if end.printed_traceback is not None:
            lines_of_message = end.printed_traceback.message_lines
        return "\n".join([*lines_of_message, *end.last_lines])

    lines = [f"{error.type}: {error.message}", *error.chain]

    # The traceback as a whole is not searched: a pattern could match its source code by chance.
    # Only one pattern, that of full shared memory, needs a line of it.
    if _LINE_THAT_MAKES_SEMAPHORE in error.traceback:
        lines.append(_LINE_THAT_MAKES_SEMAPHORE)
    return "\n".join(lines)
