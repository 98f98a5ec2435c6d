"""What failed first: a table of runs, each with how its ranks ended and what must be said."""

from __future__ import annotations

import json
import linecache
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest

from lockstep.run.watch.dataclass_json import from_values
from lockstep.run.watch.error_record import ErrorRecord
from lockstep.run.watch.exit_status import ExitStatus, Interruption
from lockstep.run.watch.failure_report import render_failure
from lockstep.run.watch.first_failure import first_failure, lost_node
from lockstep.run.watch.lost_peer import find_lost_peer
from lockstep.run.watch.printed_error import PrintedError
from lockstep.run.watch.stacks import Frame
from lockstep.run.watch.verdict import Row, Verdict

pytestmark = pytest.mark.unit

# As torch 2.13 says it, recorded from runs of two processes.
CLOSED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by "
    "peer [127.0.0.1]:37080. This is typically caused by a remote worker crashing. Check the logs "
    "of the remote worker before reporting an error."
)
RESET = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error "
    "[127.0.0.1]:49328: Connection reset by peer. This is typically caused by a remote worker "
    "hanging or bugs in the application."
)
TIMED_OUT = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out "
    "waiting 1800000ms for recv operation to complete"
)
TIMED_OUT_AFTER_2_S = TIMED_OUT.replace("1800000ms", "2000ms")
MONITORED = (
    f"[Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms\n Original exception: \n{CLOSED}"
)
BARRIER_OF_30_MINUTES = (
    "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1800000 ms\n Original exception: \n"
    "[unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation to complete"
)
NCCL_TIMED_OUT_AFTER_5_S = (
    "[rank0]:[E] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, "
    "OpType=ALLREDUCE, NumelIn=2, NumelOut=2, Timeout(ms)=5000) ran for 5012 milliseconds before "
    "timing out."
)
NCCL = (
    "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error, NCCL "
    "version 2.27.3\nncclRemoteError: A call failed possibly due to a network error or a remote "
    "process exiting prematurely."
)
ZERO_PARAMS = (
    "DDP expects same model across all ranks, but Rank 0 has 161 params, while rank 1 has "
    "inconsistent 0 params."
)


def state_dict_error(missing: str, unexpected: str) -> str:
    """What torch says if a `state_dict` lacks a name and has another."""
    return (
        "Error(s) in loading state_dict for Net:\n"
        f'\tMissing key(s) in state_dict: "{missing}", "x.bias". \n'
        f'\tUnexpected key(s) in state_dict: "{unexpected}", "y.bias". '
    )


def rank_raised(
    rank: int,
    text: str,
    at: float,
    type: str = "RuntimeError",
    line: str | None = "train.py:12: loss.backward()",
    **rest: Any,
) -> ExitStatus:
    """A rank that raised, seen 0.1 s later."""
    error = ErrorRecord(
        type=type,
        message=text,
        headline=f"{type}: {text.partition(chr(10))[0]}",
        line=line,
        time=at,
        chain=rest.pop("chain", ()),
        exit_code=rest.pop("exit_code", 1),
        from_lockstep=rest.pop("from_lockstep", False),
        may_be_temporary=rest.pop("may_be_temporary", True),
        of_rank=rest.pop("of_rank", None),
    )
    code = rest.pop("code", error.exit_code)
    rest = {"host": "a", "time": at + 0.1, "how": f"exit code {code}", **rest}
    return ExitStatus(rank=rank, code=code, error=error, **rest)


def rank_exited(rank: int, code: int, at: float, **rest: Any) -> ExitStatus:
    line = rest.pop("line", None)
    error = None
    if line:
        error = ErrorRecord(
            type="SystemExit",
            message=str(code),
            headline=f"sys.exit({code})",
            line=line,
            time=at,
            exit_code=code,
        )
    rest = {"host": "a", "how": f"exit code {code}", **rest}
    return ExitStatus(rank=rank, code=code, time=at, error=error, **rest)


def rank_killed(rank: int, number: int, name: str, at: float, **rest: Any) -> ExitStatus:
    rest = {"host": "a", "how": f"killed by {name}", **rest}
    return ExitStatus(rank=rank, code=-number, time=at, **rest)


def rank_ended_by_lockstep(rank: int, at: float, since: float, host: str = "a") -> ExitStatus:
    return rank_killed(rank, 15, "SIGTERM", at, asked_to_end=since, host=host)


def deadlock_verdict(ranks: tuple[int, ...] = (0, 1)) -> Verdict:
    rows = tuple(
        Row(rank, "a", "waits in all_reduce", Frame("train.py", 10 + rank, "main"))
        for rank in ranks
    )
    return Verdict("deadlock", True, ranks, "the ranks wait for each other", rows, None, ("do x",))


def hang_verdict(kind: Any, ranks: tuple[int, ...], headline: str) -> Verdict:
    rows = (Row(ranks[0], "a", "is stopped", None),)
    return Verdict(kind, True, ranks, headline, rows, None, ("do as the hang says",))


@dataclass
class Case:
    exits: list[ExitStatus]
    kind: str | None
    ranks: tuple[int, ...] = ()
    exit_code: int = 1
    text_has: tuple[str, ...] = ()
    """Texts that the printed block must contain."""
    text_lacks: tuple[str, ...] = ()
    """Texts that it must not contain."""
    arguments: dict[str, Any] = field(default_factory=dict)


CASES = {
    "nothing failed": Case([rank_exited(0, 0, 1.0), rank_exited(1, 0, 2.0)], None),
    "a safetensors file with the name of a torch file": Case(
        [
            rank_raised(
                0,
                "Weights only load failed. ... your use case: WeightsUnpickler error: \n\n"
                "Unsupported operand 160\n\nCheck the documentation of torch.load",
                10.0,
                "_pickle.UnpicklingError",
            )
        ],
        "exception",
        (0,),
        text_has=("what to do: torch.load cannot read this file", "lockstep.load_weights(model"),
    ),
    "a collective with a timeout of seconds, chosen by the script": Case(
        [rank_raised(0, TIMED_OUT_AFTER_2_S, 10.0), rank_ended_by_lockstep(1, 10.4, 10.3)],
        "exception",
        (0,),
        text_has=(
            "what to do: no rank had ended before, and the collective had a timeout of 2 s",
            "raise",
        ),
        text_lacks=("no rank had ended before: look at the network",),
    ),
    "a monitored barrier, of whose time 1 s was left for this rank": Case(
        [rank_raised(0, BARRIER_OF_30_MINUTES, 10.0), rank_ended_by_lockstep(1, 10.4, 10.3)],
        "exception",
        (0,),
        text_has=("what to do: no rank had ended before: look at the network",),
        text_lacks=("had a timeout of",),
    ),
    "NCCL's watchdog with a timeout of seconds, chosen by the script": Case(
        [
            rank_killed(
                0, 6, "SIGABRT", 10.0, last_lines=("terminate called", NCCL_TIMED_OUT_AFTER_5_S)
            ),
            rank_ended_by_lockstep(1, 10.4, 10.3),
        ],
        "signal",
        (0,),
        exit_code=71,
        text_has=("the collective had a timeout of 5 s",),
    ),
    "an exception, and the other rank is ended by lockstep": Case(
        [rank_raised(1, "loss is NaN", 10.0, "ValueError"), rank_ended_by_lockstep(0, 10.5, 10.2)],
        "exception",
        (1,),
        text_has=(
            "FIRST FAILURE: rank 1 on host a\n  ValueError: loss is NaN\n  train.py:12: loss.",
            "ended by lockstep: rank 0",
        ),
    ),
    "the peer's error is a consequence": Case(
        [rank_raised(0, CLOSED, 10.1), rank_raised(1, "loss is NaN", 10.0, "ValueError")],
        "exception",
        (1,),
        text_has=("consequences: rank 0 (Connection closed by peer)",),
        text_lacks=("network",),
    ),
    "a consequence even if its record is earlier: the group was closed while unwinding": Case(
        [rank_raised(0, RESET, 10.0), rank_raised(1, "loss is NaN", 10.6, "ValueError")],
        "exception",
        (1,),
        text_has=("ValueError: loss is NaN", "rank 0 (Connection reset by peer)"),
    ),
    "a consequence even if the script has wrapped the error": Case(
        [
            rank_raised(0, "training failed", 10.1, chain=(f"RuntimeError: {CLOSED}",)),
            rank_exited(1, 3, 10.3, line="train.py:7: sys.exit(3)"),
        ],
        "exit",
        (1,),
        exit_code=3,
        text_has=("sys.exit(3)\n  train.py:7: sys.exit(3)", "rank 0 (Connection closed by peer)"),
    ),
    "a clear failure much later is not the cause": Case(
        [rank_raised(0, CLOSED, 10.0), rank_raised(1, "bad label", 40.0, "ValueError")],
        "exception",
        (0,),
        text_has=("Connection closed by peer", "rank 1 (ValueError: bad label, 30.0 s later)"),
    ),
    "os._exit without an exception": Case(
        [rank_exited(1, 3, 10.0, last_lines=("giving up",)), rank_raised(0, CLOSED, 10.0)],
        "exit",
        (1,),
        exit_code=3,
        text_has=("exit code 3; no exception was recorded\n", "giving up"),
    ),
    "another program that printed a traceback": Case(
        [
            rank_exited(
                1,
                1,
                10.0,
                last_lines=("Traceback (most recent call last):", "ValueError: x"),
                printed_traceback=PrintedError(
                    "ValueError: x", "train.py:5: f()", ("ValueError: x",)
                ),
            )
        ],
        "exit",
        (1,),
        text_has=(
            "exit code 1; no exception was recorded. The last traceback in its standard error: "
            "ValueError: x\n  train.py:5: f()",
        ),
        text_lacks=("its last lines",),
    ),
    "a lost peer in a traceback that was only printed is a consequence": Case(
        [
            rank_exited(
                0,
                1,
                10.0,
                printed_traceback=PrintedError(
                    "RuntimeError: gone", None, ("RuntimeError", CLOSED)
                ),
            ),
            rank_exited(1, 3, 10.1),
        ],
        "exit",
        (1,),
        exit_code=3,
        text_has=("no exception was recorded", "rank 0 (Connection closed by peer)"),
    ),
    "out of descriptors": Case(
        [rank_raised(1, "[Errno 24] Too many open files: 'a.png'", 10.0, "OSError")],
        "exception",
        (1,),
        text_has=("what to do: raise the limit of open files (ulimit -n",),
    ),
    "out of descriptors, only printed": Case(
        [
            rank_exited(
                1,
                1,
                10.0,
                printed_traceback=PrintedError(
                    "OSError: x", None, ("OSError: x", "Too many open files")
                ),
            )
        ],
        "exit",
        (1,),
        text_has=("what to do: raise the limit of open files (ulimit -n",),
    ),
    "out of memory in Python": Case(
        [rank_raised(1, "", 10.0, "MemoryError")],
        "exception",
        (1,),
        text_has=("what to do: give the run more memory",),
    ),
    "an excepthook has chosen another code": Case(
        [rank_raised(1, "bad", 10.0, "ValueError", code=9)], "exception", (1,), exit_code=9
    ),
    "Ctrl-C of somebody else's": Case(
        [rank_raised(1, "", 10.0, "KeyboardInterrupt", exit_code=-2)],
        "exception",
        (1,),
        exit_code=130,
    ),
    "a message that is a file": Case(
        [rank_raised(1, "x" * 100_000, 10.0, "ValueError")],
        "exception",
        (1,),
        text_has=("ValueError: xxx", "xxx... (see the logs for the rest)"),
        text_lacks=("x" * 2000,),
    ),
    "a killed rank comes before the ranks that lost it": Case(
        [
            rank_raised(0, RESET, 10.0),
            rank_raised(2, CLOSED, 10.02),
            rank_killed(1, 9, "SIGKILL", 10.4),
        ],
        "signal",
        (1,),
        exit_code=71,
        text_has=(
            "killed by SIGKILL",
            "scheduler",
            "rank 0 (Connection reset by peer), rank 2 (Connection closed by peer)",
        ),
    ),
    "equal consequences are merged": Case(
        [
            rank_killed(4, 9, "SIGKILL", 10.0),
            *[rank_raised(rank, CLOSED, 10.0 + rank / 100) for rank in (0, 1, 2, 3, 5)],
        ],
        "signal",
        (4,),
        exit_code=71,
        text_has=("consequences: ranks 0-3, 5 (Connection closed by peer)",),
    ),
    "killed for memory, certainly": Case(
        [
            rank_killed(1, 9, "SIGKILL", 10.0, oom="certain", peak_bytes=3 << 30, step=7),
            rank_raised(0, RESET, 10.0),
        ],
        "oom",
        (1,),
        exit_code=71,
        text_has=(
            "FIRST FAILURE: rank 1 on host a, after step 7",
            "killed by the kernel's out-of-memory killer (SIGKILL; it had used 3.0 GiB)",
            "fewer DataLoader workers",
        ),
    ),
    "the fork server was killed, perhaps for memory": Case(
        [rank_killed(1, 9, "", 10.0, how="the server ended", with_fork_server=True, oom="likely")],
        "signal",
        (1,),
        exit_code=71,
        text_has=("  the server ended\nwhat to do: the kernel's out-of-memory killer has ended a",),
        text_lacks=("probably killed",),
    ),
    "killed for memory, perhaps": Case(
        [rank_killed(1, 9, "SIGKILL", 10.0, oom="likely")],
        "oom",
        (1,),
        exit_code=71,
        text_has=("probably killed by the kernel's out-of-memory killer",),
    ),
    "a loader's worker was killed for memory": Case(
        [
            rank_raised(
                0,
                "DataLoader worker (pid(s) 4711) exited unexpectedly",
                10.0,
                oom="certain",
            )
        ],
        "exception",
        (0,),
        text_has=("the kernel's out-of-memory killer ended a worker",),
    ),
    "segmentation fault": Case(
        [
            rank_killed(
                1,
                11,
                "SIGSEGV",
                10.0,
                crash_line="train.py:9: f(0)",
                stacks_file="crash.txt",
                last_lines=("step 3", "ab"),
            )
        ],
        "signal",
        (1,),
        exit_code=71,
        text_has=("killed by SIGSEGV", "  train.py:9: f(0)", "crash.txt", "    ab"),
    ),
    "abort by C++ that names a lost peer is a consequence": Case(
        [
            rank_killed(
                0, 6, "SIGABRT", 10.2, last_lines=("terminate called", f"  what():  {NCCL}")
            ),
            rank_killed(1, 11, "SIGSEGV", 10.0),
        ],
        "signal",
        (1,),
        exit_code=71,
        text_has=("rank 0 (remote process exited or there was a network error)",),
    ),
    "abort for a reason of its own": Case(
        [rank_killed(0, 6, "SIGABRT", 10.2, last_lines=("Assertion `i < n' failed.",))],
        "signal",
        (0,),
        exit_code=71,
        text_has=("Assertion `i < n' failed.",),
    ),
    "left early": Case(
        [rank_exited(1, 0, 9.0, step=40), rank_raised(0, CLOSED, 10.0)],
        "left",
        (1,),
        exit_code=71,
        text_has=("rank 1 on host a, after step 40", "left early", "rank 0 (Connection closed"),
    ),
    "left early, its end noticed after the others'": Case(
        [rank_raised(0, CLOSED, 10.0), rank_exited(1, 0, 10.6)], "left", (1,), exit_code=71
    ),
    "two left early": Case(
        [rank_exited(1, 0, 9.0), rank_exited(2, 0, 9.05), rank_raised(0, TIMED_OUT, 30.0)],
        "left",
        (1, 2),
        exit_code=71,
        text_has=("ranks 1-2", "Timed out waiting 1800000ms for recv operation"),
    ),
    "told of another rank's error, which is recorded later": Case(
        [
            rank_raised(0, "saving\n  found: rank 2: no space", 10.0, "CheckpointError", of_rank=2),
            rank_raised(1, "saving\n  found: rank 2: no space", 10.0, "CheckpointError", of_rank=2),
            rank_raised(2, "no space", 10.1, "OSError"),
        ],
        "exception",
        (2,),
        text_has=(
            "FIRST FAILURE: rank 2 on host a\n  OSError: no space",
            "consequences: ranks 0-1 (told of the error of rank 2)",
        ),
        text_lacks=("same time", "together"),
    ),
    "the rank that has failed raises what it tells the others": Case(
        [rank_raised(rank, "bad value", 10.0 + rank / 9, of_rank=1) for rank in (0, 1)],
        "exception",
        (1,),
        text_has=("consequences: rank 0 (told of the error of rank 1)",),
    ),
    "told of an error, which its rank has survived": Case(
        [rank_raised(0, "bad value", 10.0, "CheckpointError", of_rank=1), rank_exited(1, 0, 10.1)],
        "exception",
        (0,),
        text_has=("CheckpointError: bad value",),
        text_lacks=("network", "left early"),
    ),
    "who gave up waiting closes the connections of others": Case(
        [
            rank_raised(2, CLOSED, 10.0),
            rank_raised(0, TIMED_OUT, 10.05),
            rank_raised(1, RESET, 10.1),
        ],
        "exception",
        (0,),
        text_has=(
            "FIRST FAILURE: rank 0 on host a\n  RuntimeError: ",
            "what to do: no rank had ended before",
            "consequences: rank 1 (Connection reset by peer), rank 2 (Connection closed by peer)",
        ),
        text_lacks=("same time", "together"),
    ),
    "a rank that lost its connection long before others gave up": Case(
        [rank_raised(2, CLOSED, 10.0), rank_raised(0, TIMED_OUT, 40.0)],
        "exception",
        (2,),
        text_has=("look at the network", "30.0 s later"),
    ),
    "killed by lockstep in the moment in which another rank fails": Case(
        [
            rank_killed(1, 9, "SIGKILL", 10.0, asked_to_end=9.99),
            rank_raised(0, "loss is NaN", 10.05, "ValueError"),
        ],
        "exception",
        (0,),
        text_has=("ended by lockstep: rank 1",),
        text_lacks=("together",),
    ),
    "other exit codes are other failures": Case(
        [rank_exited(1, 3, 10.0), rank_exited(0, 5, 10.1), rank_exited(2, 5, 10.12)],
        "exit",
        (1,),
        exit_code=3,
        text_has=(
            "rank 1 on host a, together with ranks 0, 2\n  exit code 3; no",
            "order unknown):\n  ranks 0, 2: exit code 5",
        ),
    ),
    "a rank that ended well is no cause if another failed": Case(
        [
            rank_exited(2, 0, 9.0),
            rank_raised(1, "x", 10.0, "KeyError"),
            rank_raised(0, CLOSED, 10.1),
        ],
        "exception",
        (1,),
        text_lacks=("left early",),
    ),
    "a lost connection, and nobody has ended": Case(
        [rank_raised(0, CLOSED, 10.0), rank_raised(1, CLOSED, 10.05)],
        "exception",
        (0, 1),
        text_has=("FIRST FAILURE: ranks 0-1", "look at the network"),
    ),
    "a timeout, and nobody has ended": Case(
        [rank_raised(0, TIMED_OUT, 10.0), rank_ended_by_lockstep(1, 10.4, 10.3)],
        "exception",
        (0,),
        text_has=("Timed out waiting", "within the timeout"),
    ),
    "monitored barrier": Case(
        [rank_raised(0, MONITORED, 10.0), rank_exited(1, 9, 10.0)],
        "exit",
        (1,),
        exit_code=9,
        text_has=("rank 0 (Rank 1 failed to pass monitoredBarrier)",),
    ),
    "model of 0 parameters": Case(
        [rank_raised(0, ZERO_PARAMS, 10.0), rank_raised(1, "no file", 9.9, "FileNotFoundError")],
        "exception",
        (1,),
        text_has=("FileNotFoundError", "rank 0 (inconsistent 0 params)"),
    ),
    "a download's reset connection is no lost peer": Case(
        [
            rank_raised(1, "[Errno 104] Connection reset by peer", 10.0, "ConnectionResetError"),
            rank_raised(0, CLOSED, 10.1),
        ],
        "exception",
        (1,),
        text_has=("ConnectionResetError", "rank 0 (Connection closed by peer)"),
        text_lacks=("network",),
    ),
    "the same failure on all ranks is merged": Case(
        [
            rank_raised(rank, f"bad index {rank}", 10.0 + rank / 4, "IndexError", "data.py:3: x[i]")
            for rank in (3, 1, 0, 2)
        ],
        "exception",
        (0, 1, 2, 3),
        text_has=("FIRST FAILURE: ranks 0-3 on host a\n  IndexError: bad index 0\n  data.py:3",),
        text_lacks=("same time", "consequences"),
    ),
    "two different failures at the same time": Case(
        [
            rank_raised(0, "first", 10.0, "ValueError"),
            rank_raised(1, "second", 10.1, "KeyError", line="train.py:30: d[k]"),
        ],
        "exception",
        (0,),
        text_has=(
            "FIRST FAILURE: rank 0 on host a, together with rank 1\n",
            "at the same time (order unknown):\n  rank 1: KeyError: second, train.py:30",
        ),
    ),
    "several equal failures at the same time are merged": Case(
        [
            rank_raised(1, "first", 10.0, "ValueError"),
            rank_raised(0, "failed", 10.1, "SystemError"),
            rank_raised(2, "failed", 10.12, "SystemError"),
        ],
        "exception",
        (1,),
        text_has=("order unknown):\n  ranks 0, 2: SystemError: failed, train.py",),
    ),
    "equal failures at the same time on two other machines are merged": Case(
        [
            rank_raised(0, "first", 10.0, "ValueError"),
            rank_raised(1, "failed", 10.1, "SystemError", host="b"),
            rank_raised(2, "failed", 10.2, "SystemError", host="c"),
        ],
        "exception",
        (0,),
        text_has=("order unknown):\n  ranks 1-2 on hosts b, c: SystemError: failed, train.py",),
    ),
    "two different failures, one after the other": Case(
        [rank_raised(0, "first", 10.0, "ValueError"), rank_raised(1, "second", 10.9, "KeyError")],
        "exception",
        (0,),
        text_has=("consequences: rank 1 (KeyError: second, 0.9 s later)",),
        text_lacks=("same time",),
    ),
    "an error after lockstep asked the rank to end is no failure": Case(
        [
            rank_raised(0, "loss is NaN", 10.0, "ValueError"),
            rank_raised(1, "interrupted in save()", 10.4, "OSError", asked_to_end=10.2),
        ],
        "exception",
        (0,),
        text_has=("ended by lockstep: rank 1",),
        text_lacks=("OSError",),
    ),
    "an error before lockstep asked the rank to end is a failure": Case(
        [
            rank_raised(0, "loss is NaN", 10.1, "ValueError"),
            rank_raised(1, "first", 9.0, "OSError", time=10.6, asked_to_end=10.4),
        ],
        "exception",
        (1,),
    ),
    "signal from outside on all ranks": Case(
        [rank_killed(rank, 15, "SIGTERM", 10.0) for rank in range(4)],
        "signal",
        (0, 1, 2, 3),
        exit_code=71,
        text_has=("killed by SIGTERM", "who sent it is not known", "the script itself"),
        text_lacks=("from outside",),
    ),
    "deadlock": Case(
        [rank_ended_by_lockstep(0, 20.2, 20.1), rank_ended_by_lockstep(1, 20.2, 20.1)],
        "deadlock",
        (0, 1),
        exit_code=70,
        text_has=(
            "FIRST FAILURE: ranks 0-1 on host a\n  the ranks wait for each other\n  rank 0 on a",
            "train.py:10",
            "what to do: do x",
            "ended by lockstep: ranks 0-1",
        ),
        arguments={"hang": replace(deadlock_verdict(), found_at=20.0)},
    ),
    "a rank that gave up in a deadlock is a consequence": Case(
        [rank_raised(0, TIMED_OUT, 19.0), rank_ended_by_lockstep(1, 20.2, 20.1)],
        "deadlock",
        (0, 1),
        exit_code=70,
        text_has=("rank 0 (Timed out waiting",),
        arguments={"hang": replace(deadlock_verdict(), found_at=20.0)},
    ),
    "a failure before the verdict is the root": Case(
        [rank_raised(1, "loss is NaN", 10.0, "ValueError"), rank_ended_by_lockstep(0, 20.2, 20.1)],
        "exception",
        (1,),
        arguments={"hang": replace(hang_verdict("lost", (1,), "rank 1 has died"), found_at=20.0)},
    ),
    "stopped until the others gave up": Case(
        [
            rank_raised(0, TIMED_OUT, 20.0),
            rank_killed(1, 9, "SIGKILL", 32.0, asked_to_end=20.6, was_suspended=True),
            rank_ended_by_lockstep(2, 20.7, 20.6),
        ],
        "stopped",
        (1,),
        exit_code=71,
        text_has=(
            "was stopped by a signal or a debugger",
            "kill -STOP",
            "rank 0 (Timed out waiting",
        ),
    ),
    "stopped while another rank failed": Case(
        [
            rank_raised(0, "loss is NaN", 20.0, "ValueError"),
            rank_killed(1, 9, "SIGKILL", 32.0, asked_to_end=20.6, was_suspended=True),
        ],
        "exception",
        (0,),
    ),
    "left, seen by the hang detector": Case(
        [rank_exited(1, 0, 5.0), rank_ended_by_lockstep(0, 20.2, 20.1)],
        "left",
        (1,),
        exit_code=71,
        text_has=("left early", "what to do: do as the hang says"),
        arguments={"hang": replace(hang_verdict("left", (1,), "rank 1 has left"), found_at=20.0)},
    ),
    "Ctrl-C": Case(
        [
            rank_raised(0, "", 10.1, "KeyboardInterrupt", exit_code=130, code=-2),
            rank_ended_by_lockstep(1, 10.4, 10.05),
        ],
        "interrupted",
        (),
        exit_code=130,
        text_has=("INTERRUPTED: lockstep was sent SIGINT (Ctrl-C)", "ended by lockstep: ranks 0-1"),
        text_lacks=("FIRST",),
        arguments={"interrupted": Interruption(signal=2, time=10.0)},
    ),
    "Ctrl-C after a failure": Case(
        [rank_raised(1, "loss is NaN", 9.0, "ValueError"), rank_ended_by_lockstep(0, 10.4, 10.05)],
        "exception",
        (1,),
        arguments={"interrupted": Interruption(signal=2, time=10.0)},
    ),
    "hang-up": Case(
        [rank_ended_by_lockstep(0, 10.4, 10.05)],
        "interrupted",
        (),
        exit_code=129,
        arguments={"interrupted": Interruption(signal=1, time=10.0)},
    ),
    "a machine is gone": Case(
        [rank_raised(0, CLOSED, 10.0), rank_raised(1, RESET, 10.1)],
        "node_lost",
        (2, 3),
        exit_code=71,
        text_has=(
            "FIRST FAILURE: ranks 2-3 on host b\n  the machine has left the run: no heartbeat",
        ),
        arguments={
            "lost_nodes": [lost_node(host="b", ranks=(2, 3), time=20.0, reason="no heartbeat")],
        },
    ),
    "a machine of unknown ranks is gone": Case(
        [rank_ended_by_lockstep(0, 20.4, 20.2)],
        "node_lost",
        (),
        exit_code=71,
        text_has=("FIRST FAILURE: host b\n  the machine",),
        arguments={"lost_nodes": [lost_node(host="b", ranks=(), time=20.0)]},
    ),
    "a machine went because a rank here had failed": Case(
        [rank_raised(0, "loss is NaN", 10.0, "ValueError")],
        "exception",
        (0,),
        text_has=("rank 0 on host a", "host b (the machine has left the run, 10.0 s later)"),
        arguments={"lost_nodes": [lost_node(host="b", ranks=(), time=20.0)]},
    ),
    "two machines whose clocks differ: cause after consequence": Case(
        [rank_raised(0, CLOSED, 10.0), rank_raised(2, "loss is NaN", 12.5, "ValueError", host="b")],
        "exception",
        (2,),
        text_has=("rank 2 on host b", "rank 0 (Connection closed by peer)"),
    ),
    "two machines: which failed first is not known": Case(
        [
            rank_raised(0, "first", 10.0, "ValueError"),
            rank_raised(2, "second", 12.5, "KeyError", host="b"),
        ],
        "exception",
        (0,),
        text_has=(
            "FIRST FAILURE: rank 0 on host a, together with rank 2\n",
            "order unknown):\n  rank 2 on host b: KeyError: second",
        ),
    ),
    "two machines: more than 5 s apart": Case(
        [
            rank_raised(0, "first", 10.0, "ValueError"),
            rank_raised(2, "second", 16.0, "KeyError", host="b"),
        ],
        "exception",
        (0,),
        text_has=("rank 2 (KeyError: second, 6.0 s later)",),
        text_lacks=("order",),
    ),
    "an error of Lockstep's own": Case(
        [
            rank_raised(
                0,
                "shares 1:2\n  found: 3 ranks\n  do:    give 3 shares\n  at:    rank 0, t.py:3: x",
                10.0,
                "SettingError",
                exit_code=2,
                from_lockstep=True,
            )
        ],
        "exception",
        (0,),
        exit_code=2,
        text_has=(
            "SettingError: shares 1:2\n    found: 3 ranks\n    do:    give 3 shares\n  train",
        ),
        text_lacks=("at:    rank",),
    ),
    "it raised, and crashed while it ended": Case(
        [rank_raised(0, "x", 10.0, "KeyError", code=-6, how="killed by SIGABRT")],
        "exception",
        (0,),
        text_has=("KeyError: x", "its process was then killed by SIGABRT"),
    ),
    "CUDA out of memory": Case(
        [
            rank_raised(
                0, "CUDA out of memory. Tried to allocate 2 MiB", 1.0, "torch.OutOfMemoryError"
            )
        ],
        "exception",
        (0,),
        text_has=("smaller --micro-batch-size",),
    ),
    "a library that counts its processes": Case(
        [rank_raised(0, "You set `devices=2`, but 2 does not match the world size (1).", 1.0)],
        "exception",
        (0,),
        text_has=("lockstep run --nproc N",),
    ),
    "a file that DDP has saved": Case(
        [rank_raised(0, state_dict_error("head.weight", "module.head.weight"), 1.0)],
        "exception",
        (0,),
        text_has=("what to do: the names in the file begin with `module.`",),
    ),
    "a file of the bare model, loaded into DDP": Case(
        [rank_raised(0, state_dict_error("module.head.weight", "head.weight"), 1.0)],
        "exception",
        (0,),
        text_has=("what to do: the model is in DistributedDataParallel or DataParallel",),
    ),
    "a file of another model": Case(
        [rank_raised(0, state_dict_error("head.weight", "module.body.weight"), 1.0)],
        "exception",
        (0,),
        text_lacks=("what to do",),
    ),
    "a full disk is not shared memory": Case(
        [rank_raised(0, "[Errno 28] No space left on device: 'x.pt'", 1.0, "OSError")],
        "exception",
        (0,),
        text_lacks=("/dev/shm", "what to do"),
    ),
    "a CUDA error, which comes late": Case(
        [
            rank_raised(
                0, "CUDA error: device-side assert triggered\nCUDA kernel errors might be ...", 1.0
            )
        ],
        "exception",
        (0,),
        text_has=("CUDA_LAUNCH_BLOCKING=1",),
    ),
    "a long message stays in the folder": Case(
        [rank_raised(0, "head\n" + "\n".join(f"line {i}" for i in range(50)), 1.0)],
        "exception",
        (0,),
        text_has=("RuntimeError: head\n  train.py:12",),
        text_lacks=("line 7",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_first_failure_of_each_case(name: str) -> None:
    case = CASES[name]
    for exits in (case.exits, case.exits[::-1]):
        first = first_failure(exits, folder="logs/x", **case.arguments)
        if case.kind is None:
            assert first is None
            return
        assert first is not None
        assert (first.kind, first.ranks, first.exit_code) == (case.kind, case.ranks, case.exit_code)
        text = render_failure(first)
        for part in case.text_has:
            assert part in text
        for part in case.text_lacks:
            assert part not in text
        assert text.endswith("\ntraceback and logs: logs/x")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (CLOSED, "Connection closed by peer"),
        (RESET, "Connection reset by peer"),
        (TIMED_OUT, "Timed out waiting 1800000ms for recv operation"),
        (MONITORED, "Rank 1 failed to pass monitoredBarrier"),
        (NCCL, "remote process exited or there was a network error"),
        ("wait timeout after 6000ms, keys: /default_pg/0//nokey", "wait timeout after 6000ms"),
        (
            "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
            "Watchdog caught collective operation timeout",
        ),
        (
            "[c10d] recvValue failed on SocketImpl(fd=3): Failed to recv, got 0 bytes. Connection "
            "was likely closed. Did the remote server shutdown or crash?",
            "Connection was likely closed",
        ),
        (
            'Failed to check the "should dump" flag on TCPStore, with error: Broken pipe',
            'Failed to check the "should dump" flag on TCPStore',
        ),
        ("writev [10.0.0.1]:4: Broken pipe", "Broken pipe"),
        ("ProcessGroupNCCL's watchdog got stuck for 480 seconds", "watchdog got stuck"),
        ("torch...ChildFailedError: train.py FAILED", "ChildFailedError"),
        ("rank 1 did not come within 300 s; came: rank 0", "rank 1 did not come within 300 s"),
        (
            "shared memory: all ranks have come, but one did not go on within 9 s to all_reduce",
            "all ranks have come, but one did not go on within",
        ),
        ("[Errno 32] Broken pipe", None),
        ("loss is NaN", None),
    ],
)
def test_texts_of_lost_peers_are_recognized(text: str, shown: str | None) -> None:
    lost_peer = find_lost_peer([text])
    assert (None if lost_peer is None else lost_peer.text) == shown


def test_a_deadlock_shows_the_source_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linecache, "getline", lambda file, line: f"code {line}\n")
    first = first_failure([], hang=replace(deadlock_verdict(), found_at=1.0))
    assert first is not None
    assert "train.py:11: code 11" in render_failure(first)


def test_a_restart_is_vain_only_if_nothing_that_came_first_may_pass() -> None:
    wrong = rank_raised(0, "precision='fp61'", 1.0, type="SettingError", may_be_temporary=False)
    for other, may_be_temporary in (
        (
            rank_raised(1, "precision='fp61'", 1.0, type="SettingError", may_be_temporary=False),
            False,
        ),
        (rank_raised(1, "device='x'", 1.0, type="SettingError", may_be_temporary=False), False),
        (rank_raised(1, "no route", 1.1, type="OSError"), True),  # which was first is not known
        (rank_raised(1, "no route", 9.0, type="OSError"), False),
        (rank_raised(1, CLOSED, 1.1), False),
        (rank_ended_by_lockstep(1, 2.0, 1.5), False),
    ):
        first = first_failure([wrong, other])
        assert first is not None
        assert first.may_be_temporary == may_be_temporary, other


def test_an_exit_status_survives_json() -> None:
    end = rank_raised(2, "x", 1.0, chain=("KeyError: y",), last_lines=("a", "b"), oom="likely")
    assert from_values(ExitStatus, json.loads(json.dumps(asdict(end)))) == end
    plain = rank_exited(0, 0, 1.0)
    assert from_values(ExitStatus, json.loads(json.dumps(asdict(plain)))) == plain


def test_the_closing_block_is_written_in_order() -> None:
    exits = [
        rank_raised(1, "loss is NaN", 10.0, "ValueError", step=12),
        rank_raised(0, CLOSED, 10.1),
        rank_ended_by_lockstep(2, 10.6, 10.5),
        rank_ended_by_lockstep(3, 10.6, 10.5),
    ]
    first = first_failure(exits, folder="runs/logs")
    assert first is not None
    assert render_failure(first) == (
        "FIRST FAILURE: rank 1 on host a, after step 12\n"
        "  ValueError: loss is NaN\n"
        "  train.py:12: loss.backward()\n"
        "consequences: rank 0 (Connection closed by peer), ended by lockstep: ranks 2-3\n"
        "traceback and logs: runs/logs"
    )
